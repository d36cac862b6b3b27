"""Copies of the folder `examples/`, as a user would make one; in a copy, a worker of a script can kill itself."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"

# Rank 1 kills itself after a step of any optimizer, but not after a restart.  The ranks meet in each step, so anything that
# another rank saved before that step is on disk.
_KILL = """\
def _kill_at(number):
    import itertools, signal
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = itertools.count(1)

    def kill(*_):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and next(steps) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("RANK") == "1":
        register_optimizer_step_post_hook(kill)


_kill_at({step})


"""
_START = 'if __name__ == "__main__":'


def copy_examples(folder: Path) -> None:
    if not folder.exists():
        shutil.copytree(EXAMPLES, folder)


def shown_command(script: str) -> list[str]:
    """The command line at the top of an example, without `python`; run it in the folder of all examples."""
    (line,) = re.findall(r"^    python (-m aelastic .*)$", (EXAMPLES / script).read_text(), re.MULTILINE)
    *command, name = shlex.split(line)
    assert name == Path(script).name
    return [*command, script]


def kill_rank_1(script: Path, step: int) -> None:
    """Changes a copy of a script so that rank 1 gets SIGKILL after this step of its optimizer."""
    add(script, _KILL.format(step=step))


def add(script: Path, code: str) -> None:
    """Changes a copy of a script so that this code runs before its `main`."""
    before, start, after = script.read_text().partition(_START)
    assert start
    script.write_text(before + code + start + after)
