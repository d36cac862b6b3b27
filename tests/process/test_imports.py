"""What is imported at the start of an agent, and what is not: a start pays for what it uses."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["aelastic", "aelastic.supervisor", "aelastic.cli.main"])
def test_importing_pulls_in_neither_torch_nor_aiohttp(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'torch', 'aiohttp', 'numpy'}} & set(sys.modules)))"

    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert seen.stdout == "[]\n"


def test_what_only_a_failure_needs_is_imported_while_the_workers_start_or_later() -> None:
    rooms = ["aelastic.failures.exit_reason", "aelastic.failures.report"]
    code = f"import aelastic.cli.main, aelastic.supervisor, sys; print(sorted({{*{rooms}}} & set(sys.modules)))"

    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert seen.stdout == "[]\n"


def test_importing_the_package_alone_imports_none_of_its_rooms() -> None:
    code = "import aelastic, sys; print([name for name in sys.modules if name.startswith('aelastic.')])"

    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert seen.stdout == "[]\n"


def test_the_registry_costs_what_is_used() -> None:
    code = (
        "import sys; from aelastic.rdzv import registry; "
        "print(sorted(n for n in sys.modules if n.split('.')[0] in {'torch', 'aiohttp'} or '.boards.' in n))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_asking_torch_does_not_import_it_here(script: str) -> None:
    code = (
        "import os, sys; from aelastic.cli.arguments import parse\n"
        f"parse(['--nproc-per-node=auto', {script!r}], os.environ)\n"
        "assert 'torch' not in sys.modules and 'asyncio' not in sys.modules, sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
