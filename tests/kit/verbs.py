"""Commands such as `aelastic status` as people type them, without starting an interpreter for each."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

from aelastic.cli.commands import run_command
from aelastic.cli.options import GROUPS


class Output(NamedTuple):
    code: int
    out: str
    err: str


def verb(folder: Path, *argv: str, cwd: Path | None = None) -> Output:
    """Runs a verb against agents whose control sockets are in a folder, from that folder or another."""
    out, complaints = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True), list[str]()
    with contextlib.redirect_stdout(out), contextlib.chdir(cwd or folder):
        code = run_command(argv, {"XDG_RUNTIME_DIR": str(folder)}, GROUPS, complaints.append)
    out.seek(0)
    return Output(code, out.read(), "\n".join(complaints))


def json_of(folder: Path, *argv: str) -> dict[str, Any]:
    """The JSON output of a verb."""
    output = verb(folder, *argv, "--json")
    found: dict[str, Any] = json.loads(output.out)
    return found
