"""The command line for tests: arguments in, an `Invocation` out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from aelastic.cli.arguments import Invocation, parse
from aelastic.cli.options import OWN
from aelastic.errors import InputError
from aelastic.spec import WorkerSpec


def invoke(*argv: str, **environ: str) -> Invocation:
    return parse(argv, {"PATH": os.defpath, **environ})


def spec_of(script: str, options: str = "", **environ: str) -> WorkerSpec:
    return invoke(*options.split(), script, **environ).spec


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entry_points: str, code: str) -> None:
    """Installs a package with classes in the group `torchrun.logs_specs`."""
    package = folder / "quiet-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: quiet\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[torchrun.logs_specs]\n{entry_points}\n")
    (folder / "quiet.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "quiet", raising=False)


def is_ours(option: Any) -> bool:
    return option.dest in OWN


def complaint(*argv: str, **environ: str) -> str:
    with pytest.raises(InputError) as caught:
        invoke(*argv, **environ)
    return str(caught.value)
