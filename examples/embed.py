"""Runs training jobs inside an asyncio program that has other things to do.

    python embed.py

`await Supervisor(spec).run()` is an ordinary coroutine: it installs no signal handler, changes neither `os.environ` nor
the event loop policy, and doesn't block the loop.  Here three jobs run at once in one loop:

- `training` trains a network on two workers (`ddp.py`);
- `flaky` fails at first and is restarted;
- `endless` never ends by itself; `asyncio.timeout` cancels it, and none of its processes is left.

Next to them a heartbeat, standing for the rest of your program, measures how long it was ever kept waiting.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from aelastic import Supervisor, WorkerSpec

HEARTBEAT_S = 0.01
ENDLESS_LIMIT_S = 3.0

# A worker is any program; these two are short enough to write here.
FLAKY = "import os, sys; sys.exit(0 if int(os.environ['TORCHELASTIC_RESTART_COUNT']) else 'not the first time')"
ENDLESS = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(3600)"


class Heartbeat:
    """The rest of the program: ticks as long as it runs, and knows the longest it was ever late."""

    def __init__(self) -> None:
        self.ticks = 0
        self.largest_gap_s = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(HEARTBEAT_S)
            self.largest_gap_s = max(self.largest_gap_s, loop.time() - before - HEARTBEAT_S)
            self.ticks += 1


async def train(folder: Path) -> bool:
    script = Path(__file__).with_name("ddp.py")
    spec = WorkerSpec(
        entrypoint=sys.executable,
        args=("-u", str(script), "--epochs", "5", "--checkpoint", str(folder / "checkpoint.pt")),
        local_world_size=2,
        max_restarts=1,
        role="training",
    )
    result = await Supervisor(spec).run()
    print(f"training: {result.state.name}")
    return not result.is_failed()


async def recover() -> bool:
    spec = WorkerSpec(entrypoint=sys.executable, args=("-c", FLAKY), local_world_size=2, max_restarts=1, role="flaky")
    result = await Supervisor(spec).run()
    print(f"flaky: {result.state.name}")
    return not result.is_failed()


async def give_up(folder: Path) -> bool:
    """Cancels a job that doesn't end; whether all of its workers ran, and none does any more."""
    pid_file = str(folder / "endless-${local_rank}.pid")  # each worker sees its own local rank here
    spec = WorkerSpec(
        entrypoint=sys.executable, args=("-c", ENDLESS, pid_file), local_world_size=2, max_restarts=0, role="endless"
    )
    try:
        async with asyncio.timeout(ENDLESS_LIMIT_S):
            await Supervisor(spec).run()
    except TimeoutError:
        pids = [int(path.read_text()) for path in folder.glob("endless-*.pid")]
        left = [pid for pid in pids if is_running(pid)]
        print(f"endless: cancelled after {ENDLESS_LIMIT_S:.0f} s; of {len(pids)} workers {len(left)} are left")
        return len(pids) == spec.local_world_size and not left
    print("endless: ended by itself, which it cannot")
    return False


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def has_children() -> bool:
    """Whether this process has any child left, dead and unnoticed ones (zombies) included."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


async def main() -> int:
    heartbeat = Heartbeat()
    with tempfile.TemporaryDirectory(prefix="aelastic-embed-") as name:
        folder = Path(name)
        async with asyncio.TaskGroup() as program:
            beating = program.create_task(heartbeat.run())
            async with asyncio.TaskGroup() as group:
                jobs = [
                    group.create_task(train(folder)),
                    group.create_task(recover()),
                    group.create_task(give_up(folder)),
                ]
            beating.cancel()
    print(f"heartbeat: {heartbeat.ticks} ticks, at most {heartbeat.largest_gap_s * 1000:.1f} ms late")
    print("left behind: " + ("a child process" if has_children() else "nothing"))
    return 0 if all(job.result() for job in jobs) and not has_children() else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
