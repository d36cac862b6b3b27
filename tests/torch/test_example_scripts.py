"""The training scripts of `examples/`, copied and run by the command at their top: a worker dies, and all resume."""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher
from kit.servers.frameworks import INSTALL_TIMEOUT_S
from kit.workers.examples import EXAMPLES, copy_examples, kill_rank_1, shown_command


class Example(NamedTuple):
    script: str
    options: tuple[str, ...]
    killed_at: int  # the step of the optimizer
    resumed: str


DDP = Example("ddp.py", ("--epochs", "4"), 128 * 2 + 60, "resuming after epoch 2")
FSDP2 = Example("fsdp2.py", ("--steps", "80"), 50, "resuming after step 40")
OF_FRAMEWORKS = [
    Example("lightning_trainer.py", ("--epochs", "4"), 128 * 2 + 60, "resuming after epoch 2"),
    Example("transformers_trainer.py", ("--steps", "80"), 50, "resuming after step 40"),
]


def start(
    launch: Launcher, name: str, command: list[str], *, kill: Example | InPlaceExample | None = None, python: str = ""
) -> Job:
    """Runs a command in a copy of the examples, with workers forked by the tests unless `python` is given."""
    folder = launch.folder / name
    copy_examples(folder)
    if kill:
        kill_rank_1(folder / kill.script, kill.killed_at)
    env = {"OMP_NUM_THREADS": "1"} if python else launch.warm.env
    job = Job(folder, [python or sys.executable, *command], env)
    launch.jobs.append(job)
    return job


def run_twice(launch: Launcher, example: Example | InPlaceExample, python: str = "") -> tuple[Job, Job]:
    """An example undisturbed, and one with rank 1 killed: both succeed, and leave nothing behind."""
    command = [*shown_command(example.script), *example.options]
    undisturbed = start(launch, "undisturbed", command, python=python)
    assert undisturbed.wait(LAUNCH_TIMEOUT_S) == 0, undisturbed.story
    killed = start(launch, "killed", command, kill=example, python=python)
    assert killed.wait(LAUNCH_TIMEOUT_S) == 0, killed.story
    assert re.search(r"aelastic: W rank 1 failed on .*SIGKILL", killed.stderr), killed.story
    assert len(losses_of(undisturbed)) == 4, undisturbed.story
    assert not killed.left(), killed.left_described()
    return undisturbed, killed


def check_resumes(launch: Launcher, example: Example, python: str = "") -> None:
    undisturbed, killed = run_twice(launch, example, python)
    starts = ["starting from scratch", example.resumed]
    assert starts_of(killed) == starts, killed.story
    assert len(re.findall(r"rank \d is process \d+", killed.stdout)) == 4, killed.story
    # Each loss appears once, so no saved step was repeated.
    assert losses_of(killed) == losses_of(undisturbed), killed.story


# Compare words, not lines: `print` writes the newline separately, and another rank may write in between.


def starts_of(job: Job) -> list[str]:
    return re.findall(r"starting from scratch|resuming after \w+ \d+", job.stdout)


def losses_of(job: Job) -> list[str]:
    return re.findall(r"(?:epoch|step) \d+: loss \d+\.\d+", job.stdout)


@pytest.mark.all
@pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S)
@pytest.mark.parametrize("example", [pytest.param(DDP, marks=pytest.mark.ci), FSDP2], ids=["ddp", "fsdp2"])
def test_an_example_resumes_after_a_kill_and_its_losses_are_those_of_an_undisturbed_run(
    launch: Launcher, example: Example
) -> None:
    check_resumes(launch, example)


@pytest.mark.all
@pytest.mark.timeout(INSTALL_TIMEOUT_S + 3 * LAUNCH_TIMEOUT_S)
@pytest.mark.parametrize("example", OF_FRAMEWORKS, ids=lambda example: example.script)
def test_an_example_of_a_framework_resumes_after_a_kill_with_the_losses_of_an_undisturbed_run(
    launch: Launcher, example: Example, python: str
) -> None:
    check_resumes(launch, example, python)


@pytest.mark.all
@pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S)
@pytest.mark.parametrize("script, options, done", [("ddp.py", "--epochs", "2"), ("fsdp2.py", "--steps", "40")])
def test_an_example_resumes_on_another_number_of_workers(
    launch: Launcher, script: str, options: str, done: str
) -> None:
    command = shown_command(script)
    first = start(launch, "job", [*command, options, done])
    assert first.wait(LAUNCH_TIMEOUT_S) == 0, first.story
    command[command.index("2")] = "1"
    more = start(launch, "job", [*command, options, str(int(done) * 2)])
    assert more.wait(LAUNCH_TIMEOUT_S) == 0, more.story
    assert starts_of(more) == [f"resuming after {options[2:-1]} {done}"], more.story
    assert losses_of(more), more.story


class InPlaceExample(NamedTuple):
    script: str
    options: tuple[str, ...]
    killed_at: int  # the step of the optimizer


IN_PLACE = InPlaceExample("in_place/train.py", ("--steps", "400", "--save-every", "100"), 250)
IN_PLACE_FSDP2 = [
    InPlaceExample("in_place/fsdp2.py", ("--steps", "80", "--save-every", "20", "--replicas", replicas), 50)
    for replicas in ("2", "1")
]


def check_recovers_in_place(launch: Launcher, example: InPlaceExample) -> None:
    undisturbed, killed = run_twice(launch, example, sys.executable)
    assert "round 2 continues in place: 3 of 4 workers kept, state of step " in killed.stderr, killed.story
    processes = re.findall(r"rank (\d) is process (\d+)", killed.stdout)
    assert len(processes) == 8 and len(set(processes)) == 5, killed.story
    losses, expected = numbers_in(losses_of(killed)), numbers_in(losses_of(undisturbed))
    # DDP sums in another order in its first step.
    assert losses == pytest.approx(expected, abs=0.001), killed.story


def numbers_in(losses: list[str]) -> list[float]:
    return [float(loss.rpartition(" ")[2]) for loss in losses]


@pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S)
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(IN_PLACE, marks=[pytest.mark.all, pytest.mark.ci]),
        *(pytest.param(each, marks=pytest.mark.all) for each in IN_PLACE_FSDP2),
    ],
    ids=["ddp", "fsdp2 with replicas", "fsdp2 without"],
)
def test_an_example_recovers_in_place_from_a_kill_with_the_losses_of_an_undisturbed_run(
    launch: Launcher, example: InPlaceExample
) -> None:
    check_recovers_in_place(launch, example)


@pytest.mark.all
@pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S)
def test_an_example_that_recovers_in_place_loads_its_checkpoint_under_torchrun_and_alone(launch: Launcher) -> None:
    script, *options = IN_PLACE.script, "--save-every", "100", "--steps"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *options, "200"]
    first = start(launch, "job", torchrun, python=sys.executable)
    assert first.wait(LAUNCH_TIMEOUT_S) == 0, first.story
    alone = start(launch, "job", [script, *options, "300"], python=sys.executable)
    assert alone.wait(LAUNCH_TIMEOUT_S) == 0, alone.story
    assert re.findall(r"rank 0 is process \d+ and begins at step 200", alone.stdout), alone.story
    assert len(losses_of(alone)) == 1, alone.story


def test_the_examples_name_each_file_and_none_that_is_not_there() -> None:
    programs = (path for path in EXAMPLES.rglob("*") if path.suffix in {".py", ".ipynb"})
    files = {path.relative_to(EXAMPLES).as_posix() for path in programs if path.parent.name != "demo"}
    assert set(re.findall(r"^\| \[(.*)\]\(\1\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)) == files
