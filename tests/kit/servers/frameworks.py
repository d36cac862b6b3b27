"""An interpreter with the training frameworks that tests run, and all packages of the tests' own interpreter.

The first test that needs the frameworks installs them into a folder below `build/`, which later runs reuse.  That
environment also sees torch and the other packages of this one, so there is little to download.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from kit.launching import ran

INSTALL_TIMEOUT_S = 600.0
REQUIREMENTS = ("accelerate>=1.2", "lightning>=2.4", "torchx>=0.7", "transformers>=4.50")
# What pip prints, again for each package, if no server answers.
UNREACHABLE = ("Retrying (Retry(", "Temporary failure in name resolution", "Network is unreachable")


@cache
def python_with_frameworks() -> str:
    """An interpreter that has the frameworks, and all packages of this one."""
    torch = importlib.metadata.version("torch")
    name = f"frameworks-python{sys.version_info.major}.{sys.version_info.minor}-torch{torch}"
    folder = Path(__file__).parents[3] / "build" / name
    interpreter, stamp = folder / "bin" / "python", folder / "installed"
    requirements = "\n".join((*REQUIREMENTS, f"torch=={torch}"))
    folder.parent.mkdir(exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes, each with its own session
        if not stamp.exists() or stamp.read_text() != requirements:
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=INSTALL_TIMEOUT_S)
            inherit_packages(interpreter)
            install(interpreter, requirements.split("\n"))
            stamp.write_text(requirements)
    return str(interpreter)


def inherit_packages(interpreter: Path) -> None:
    """Lets a virtual environment see the packages of this one, including editable installs."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    where = ran(interpreter, "-c", ask, check=True).stdout.strip()
    ours = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    # Python would search a plain path for packages, but not for `.pth` files.
    (Path(where) / "inherited.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in ours))


def install(interpreter: Path, requirements: list[str]) -> None:
    command = [str(interpreter), "-m", "pip", "install", "--disable-pip-version-check", "--retries=1", *requirements]
    run = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=INSTALL_TIMEOUT_S
    )
    if run.returncode and any(words in run.stdout for words in UNREACHABLE):
        pytest.skip(f"the package index cannot be reached: {run.stdout.strip().splitlines()[-1]}")
    assert run.returncode == 0, run.stdout
