"""What other sources know about collectives in a hang, each in a line: torch's flight recorder, and NCCL's RAS.

The flight recorder keeps the last collectives of a rank, and writes them to a file when its watchdog ends the rank, or
when something is written to its pipe, which nccl2 (what `nccl` is since torch 2.15) does not read.  If hangs are
looked for and the user has set none of its variables, ranks record to a folder of their generation.  RAS answers one
question in text, at `NCCL_RAS_ADDR`, about the whole job.

Neither names a rank here: they may be off, of another version, or report that all is well while the job hangs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio

from aelastic.base.host import names
from aelastic.base.loop.threads import in_thread, run_sync

FILE_VARIABLE, PIPE_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
# torch's, also by older names: if one is set, the user has chosen.
_CHOSEN = re.compile(r"TORCH_(FR|NCCL_TRACE)_BUFFER_SIZE|TORCH_(FR_DUMP|NCCL_DEBUG_INFO)_(TEMP|PIPE)_FILE")
ENTRIES = 2000  # torch's own number: some 1 MiB
RAS_VARIABLE, RAS_ADDRESS = "NCCL_RAS_ADDR", "localhost:28028"
# A hang comparison waits for it: torch looks at its pipe once a second, and RAS asks all ranks.
TIMEOUT_S = 2.0
LOOK_AGAIN_S = 0.05
ANSWER_BYTES_MAX = 1 << 20
PROBLEMS_MAX = 3
_PROBLEM = re.compile(r"(#\d+-\d+) \([0-9a-f]+\) (\w+)|(INCOMPLETE|DEAD|TIMEOUT)$")
_RANK = re.compile(r"Rank (\d+) -- ")


class FlightRecorder:
    """The flight recorders of this node's ranks."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    async def begin(self, folder: Path, envs: Mapping[int, dict[str, str]]) -> None:
        """Makes `folder`, and adds it to the environments of a new generation's workers, which are about to start."""
        if any(_CHOSEN.fullmatch(name) for env in envs.values() for name in env):
            self._folder = None
            return
        self._folder = folder
        with suppress(OSError):  # or a time-out: without the folder, torch itself reports that it cannot write there
            await in_thread(folder.mkdir, within_s=TIMEOUT_S)
        names = {
            "TORCH_FR_BUFFER_SIZE": str(ENTRIES),
            FILE_VARIABLE: f"{folder}/rank_",
            PIPE_VARIABLE: f"{folder}/rank_",
        }
        for each in envs.values():
            each.update(names)

    async def line(self) -> str:
        """Makes all ranks write their records; returns a line that names their place, or "" if there are none."""
        if self._folder is None:
            return ""
        count = 0
        with anyio.move_on_after(TIMEOUT_S):  # in threads: the disk may hang
            fired = await run_sync(_fire, self._folder, abandon_on_cancel=True)
            while (count := await run_sync(_count_files, self._folder, abandon_on_cancel=True)) < fired:  # noqa: ASYNC110
                await anyio.sleep(LOOK_AGAIN_S)
        return f"flight recorder: {self._folder} ({count} file{'s' if count > 1 else ''})" if count else ""


def _fire(folder: Path) -> int:
    """Writes to each pipe that a rank reads; returns how many there are."""
    fired = 0
    for pipe in folder.glob("*.pipe"):
        with suppress(OSError), open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb", buffering=0) as opened:
            fired += 1
            opened.write(b"1\n")
    return fired


def _count_files(folder: Path) -> int:
    return sum(path.suffix != ".pipe" for path in folder.glob("rank_*"))


async def ras_line(env: Mapping[str, str]) -> str:
    """Returns what NCCL's RAS reports about this job; "" if it does not answer.

    Args:
        env: of the workers.
    """
    host, _, port = env.get(RAS_VARIABLE, RAS_ADDRESS).rpartition(":")
    answer = bytearray()
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16
    if env.get("NCCL_RAS_ENABLE") == "0" or not is_port:
        return ""
    with anyio.move_on_after(TIMEOUT_S), suppress(OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        host, number = host.strip("[]") or "localhost", int(port)
        async with await names.connect(host, TIMEOUT_S, lambda address: anyio.connect_tcp(address, number)) as stream:
            await stream.send(b"VERBOSE STATUS\n")
            while len(answer) < ANSWER_BYTES_MAX:
                answer += await stream.receive()
    return summary_of_ras(answer.decode(errors="replace"))


def summary_of_ras(answer: str) -> str:
    """Returns the problems that an answer of RAS names, in one line; "" if it is not an answer of RAS."""
    if "Communicators..." not in answer:
        return ""
    problems: list[tuple[str, list[str]]] = []
    for line in map(str.strip, answer.partition("Communicators...")[2].splitlines()):
        if found := _PROBLEM.match(line):
            problems.append((" ".join(filter(None, found.groups())), []))
        elif problems and line and not set(line) <= {"="} and line not in {"Errors", "Warnings"}:
            details, rank = problems[-1][1], _RANK.match(line)
            if rank and details and details[-1].startswith("rank"):
                details[-1] += f", {rank[1]}"
            else:
                details.append(f"rank {rank[1]}" if rank else line)
    shown = [f"{head}: {'; '.join(details)}" for head, details in problems[:PROBLEMS_MAX]]
    more = [f"and {len(problems) - PROBLEMS_MAX} more"] if len(problems) > PROBLEMS_MAX else []
    return f"NCCL RAS: {' · '.join(shown + more) if shown else 'no communicator has a problem'}"
