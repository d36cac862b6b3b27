"""Copies of the folder `examples/`, as a person makes one; in a copy, a worker of a script can kill itself."""

from __future__ import annotations

import shutil
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"

# Rank 1 kills itself after a step of any optimizer, but not after a restart.  The ranks meet in each step, so what
# another rank saved before that step is on the disk.
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


def kill_rank_1(script: Path, step: int) -> None:
    """Changes a copy of a script: rank 1 gets SIGKILL after this step of its optimizer."""
    before, start, after = script.read_text().partition(_START)
    assert start
    script.write_text(before + _KILL.format(step=step) + start + after)
