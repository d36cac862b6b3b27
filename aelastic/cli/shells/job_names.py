"""Prints the run ids of this user's jobs, for shells: `python -P -m aelastic.cli.shells.job_names`.

Prints one a line; with `--ended`, also those of jobs that have ended within the hour.  A person waits for it after
pressing Tab, so it imports little, and an agent that does not answer at once is left out.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from aelastic.base.host import control_sockets

ANSWERS_S = 0.3  # for the answers of all agents
# Words that a shell takes as they are: `compgen -W` would run a command in an id.
_PLAIN = re.compile(r"[\w.+:@=,-]+", re.ASCII)


def main(argv: list[str]) -> int:
    folder = control_sockets.folder_of(os.environ)  # noqa: TID251  it is a process of its own
    found = [*_running(folder), *(_ended(folder) if "--ended" in argv else ())]
    for name in sorted({name for name in found if _PLAIN.fullmatch(name)}):
        print(name)  # noqa: T201  that is its output
    return 0


def _running(folder: Path) -> Iterator[str]:
    until = time.monotonic() + ANSWERS_S
    for socket_name in control_sockets.names_in(folder):
        left_s = until - time.monotonic()
        if left_s > 0 and (conn := control_sockets.connect(folder, socket_name, left_s)) is not None:
            with conn, conn.makefile("r", encoding="utf-8") as lines, suppress(OSError, ValueError):
                conn.sendall(b'{"verb": "here"}\n')
                yield from _names(lines.readline())


def _ended(folder: Path) -> Iterator[str]:
    for data in control_sockets.left_in(folder):
        yield from _names(data)


def _names(text: str | bytes) -> Iterator[str]:
    """The run id in an answer, or in what an agent has left; none if another version wrote it."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        answer: Any = json.loads(text)
        yield str(answer["run"]["run_id"])


if __name__ == "__main__":
    with suppress(OSError):  # the folder is not this user's alone; or nobody reads
        sys.exit(main(sys.argv[1:]))
