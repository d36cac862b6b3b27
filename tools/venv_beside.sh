#!/usr/bin/env bash
# venv_beside.sh FOLDER PIP_ARGUMENTS...: a virtual environment whose packages come before those of .venv, which it sees, too.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
shift
# It sees .venv's pip, too: one of its own takes longer to install than a few small packages.
"${PYTHON:-python3}" -m venv --without-pip "$folder"
echo "import site; site.addsitedir('$(echo "$PWD"/.venv/lib/python*/site-packages)')" \
    >"$(echo "$folder"/lib/python*/site-packages)/ours.pth"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
