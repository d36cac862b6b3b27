"""Shows what an elastic agent is for: kills a worker in the middle of a training, and sees the training finish.

    python examples/demo/demo.py            (or `make demo`)

Starts `train_digits.py` on two workers, waits until some epochs are done and saved, kills one worker with SIGKILL as
the kernel does when memory runs out, and checks that the agent starts both again, that they go on from the checkpoint
rather than from scratch, and that the accuracy is reached.  The exit code says whether all of that happened.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

WORKERS = 2
EPOCHS = 20
KILL_AFTER_EPOCH = 5
VICTIM = "1"  # its rank
MIN_ACCURACY = 0.95
TIME_LIMIT_S = 180.0  # some 10 s are usual; importing torch from a cold disk may take a minute


class Story:
    """What the training's output has told so far."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}  # by rank, of the workers that run now
        self.epochs_done = 0
        self.killed = False
        self.restarted = False
        self.resumed_after: int | None = None
        self.accuracy: float | None = None

    def read(self, line: str) -> None:
        if found := re.search(r"worker rank=(\d+) pid=(\d+) world_size=\d+ restart=(\d+)", line):
            rank, pid, restart = found.groups()
            self.pids[rank] = int(pid)
            self.restarted |= int(restart) > 0
        elif found := re.search(r"epoch (\d+)/\d+ loss=", line):
            self.epochs_done = int(found[1])
        elif found := re.search(r"resuming after epoch (\d+)", line):
            self.resumed_after = int(found[1])
        elif found := re.search(r"accuracy ([\d.]+) on", line):
            self.accuracy = float(found[1])

    def complaints(self, returncode: int) -> list[str]:
        """What should have happened and did not."""
        checks = {
            "the training was over before a worker could be killed": self.killed,
            "no worker was started again": self.restarted,
            f"training did not go on from the checkpoint of epoch {KILL_AFTER_EPOCH} or later": (
                self.resumed_after is not None and self.resumed_after >= KILL_AFTER_EPOCH
            ),
            f"the accuracy of {MIN_ACCURACY} was not reached": (self.accuracy or 0.0) >= MIN_ACCURACY,
            f"the agent's exit code is {returncode}": returncode == 0,
        }
        return [complaint for complaint, holds in checks.items() if not holds]


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a worker in the middle of a training and see it finish.")
    parser.add_argument("--launcher", default="aelastic", metavar="MODULE", help="another: torch.distributed.run")
    launcher = parser.parse_args().launcher
    with tempfile.TemporaryDirectory(prefix="aelastic-demo-") as folder:
        command = training_command(launcher, Path(folder) / "digits.pt")
        tell(f"Two workers learn to read handwritten digits, {EPOCHS} epochs, a checkpoint after each:")
        tell("  " + " ".join(["python", *command[1:]]))
        story = Story()
        try:
            returncode = follow(command, story)
        except TimeoutError as error:
            tell(f"FAILED: {error}.")
            return 1
    complaints = story.complaints(returncode)
    for complaint in complaints:
        tell(f"FAILED: {complaint}.")
    if not complaints:
        tell(f"It worked: one worker lost, no epoch up to {story.resumed_after} done twice, accuracy {story.accuracy}.")
    return 1 if complaints else 0


def training_command(launcher: str, checkpoint: Path) -> list[str]:
    script = Path(__file__).with_name("train_digits.py")
    agent = ["-m", launcher, "--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "3"]
    options = ["--checkpoint", str(checkpoint), "--epochs", str(EPOCHS), "--min-accuracy", str(MIN_ACCURACY)]
    return [sys.executable, *agent, str(script), *options]


def follow(command: list[str], story: Story) -> int:
    """Runs the training, shows its output, and kills the victim once; the agent's exit code."""
    deadline = time.monotonic() + TIME_LIMIT_S
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as agent:
        try:
            for line in lines_until(agent, deadline):
                print(f"  | {line}", flush=True)
                was_restarted = story.restarted
                story.read(line)
                if story.restarted and not was_restarted:
                    tell("The agent noticed, and has started all workers again.")
                if not story.killed and story.epochs_done >= KILL_AFTER_EPOCH:
                    kill_victim(story)
            return agent.wait(max(1.0, deadline - time.monotonic()))
        except BaseException:  # Ctrl-C or out of time: leave no training behind
            agent.terminate()
            try:
                agent.wait(10.0)
            except subprocess.TimeoutExpired:
                agent.kill()
            raise


def kill_victim(story: Story) -> None:
    pid = story.pids[VICTIM]
    tell(f"Epoch {story.epochs_done} is done and saved. Now killing worker {VICTIM} (pid {pid}) with SIGKILL.")
    os.kill(pid, signal.SIGKILL)
    story.killed = True


def lines_until(agent: subprocess.Popen[bytes], deadline: float) -> Iterator[str]:
    """The agent's output line by line, its workers' included, as it comes.

    Raises:
        TimeoutError: it is not over by the deadline.
    """
    assert agent.stdout is not None
    unfinished = b""
    with selectors.DefaultSelector() as selector:
        selector.register(agent.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"the training is not over after {TIME_LIMIT_S:.0f} s")
            chunk = os.read(agent.stdout.fileno(), 65536)
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if not chunk:
                return


def tell(sentence: str) -> None:
    print(f"demo: {sentence}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
