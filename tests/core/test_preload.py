"""The lifecycle of a fork server, as its core decides it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.arguments import complaint

from aelastic.base.machine import InvalidTransition
from aelastic.workers.forkserver.command import parse
from aelastic.workers.forkserver.learning import KeptImports
from aelastic.workers.forkserver.preload import (
    DEATHS_MAX,
    STARTS_MAX,
    Action,
    Ended,
    Event,
    Importing,
    Learned,
    LeftOut,
    Phase,
    Preload,
    Ready,
    Refused,
    Replace,
    Start,
    Stop,
    Tripped,
    Warn,
)


def after(core: Preload, *events: Event) -> list[Action]:
    return [action for event in events for action in core.handle(event, 0.0)]


def test_without_trouble_it_is_ready_after_its_imports() -> None:
    core = Preload(("a", "b"))
    assert after(core, Importing("a"), Importing("b"), Ready()) == []
    assert core.phase is Phase.READY


def test_what_the_first_workers_import_is_preloaded_by_a_process_of_its_own() -> None:
    core = Preload((), is_learning=True)
    assert after(core, Ready(), Learned(("a", "b"))) == [Replace(("a", "b"))]
    assert after(core, Importing("a"), Importing("b"), Ready()) == []
    assert (core.phase, core.is_learning) == (Phase.READY, False)


def test_what_is_learned_too_late_starts_nothing() -> None:
    core = Preload((), is_learning=True)
    after(core, Refused("no rights"))
    assert after(core, Learned(("a",))) == []
    assert core.phase is Phase.OFF


def test_a_module_that_is_left_out_is_reported_once_and_not_imported_again() -> None:
    core = Preload(("a", "b"))
    actions = after(core, Importing("a"), LeftOut("a", "starts a thread"), Importing("b"), Tripped(), Ended(0))
    assert actions == [Warn("a starts a thread; it is not preloaded"), Stop(), Start(("b",))]
    assert after(core, Importing("b"), Ready()) == []


def test_a_module_that_ends_the_process_is_the_one_that_was_being_imported() -> None:
    core = Preload(("a", "b"))
    warning, again = after(core, Importing("a"), Importing("b"), Ended(-11, "'Fatal error'"))
    assert warning == Warn("b ends the process (exit code -11, 'Fatal error'); it is not preloaded")
    assert again == Start(("a",))


def test_a_module_that_ends_the_process_as_if_all_were_well_is_left_out_too() -> None:
    core = Preload(("a", "b"))
    actions = after(core, Importing("a"), Importing("b"), Ended(0))
    assert actions == [Warn("b ends the process (exit code 0); it is not preloaded"), Start(("a",))]


def test_a_process_that_has_reported_what_it_tripped_over_may_end_as_it_likes() -> None:
    core = Preload(("a", "b"))
    actions = after(core, Importing("a"), LeftOut("a", "fails"), Importing("b"), Tripped(), Ended(-9))
    assert actions[-2:] == [Stop(), Start(("b",))]
    assert after(core, Importing("b"), Ended(0)) == [
        Warn("b ends the process (exit code 0); it is not preloaded"),
        Warn("no module remains to preload; workers start cold"),
    ]


def test_with_no_module_left_workers_start_cold() -> None:
    core = Preload(("a",))
    actions = after(core, Importing("a"), LeftOut("a", "is not installed"), Tripped(), Ended(0))
    assert actions[2:] == [Warn("no module remains to preload; workers start cold")]
    assert core.phase is Phase.OFF


def test_a_process_that_ends_before_it_imports_is_not_started_again() -> None:
    core = Preload(("a",))
    assert after(core, Ended(1, "no such option")) == [
        Warn("the template cannot start (exit code 1, no such option); workers start cold")
    ]


def test_one_that_is_killed_is_replaced_but_not_without_end() -> None:
    core = Preload(("a",))
    for _ in range(DEATHS_MAX):
        actions = after(core, Importing("a"), Ready(), Ended(-9))
        assert actions == [Warn("the template died (exit code -9); starting another"), Start(("a",))]
    assert after(core, Importing("a"), Ready(), Ended(-9)) == [
        Warn("the template died (exit code -9); workers start cold")
    ]
    assert core.phase is Phase.OFF


def test_modules_that_hide_behind_each_other_are_tried_so_often_and_no_more() -> None:
    core = Preload(tuple(f"m{number}" for number in range(100)))
    for number in range(STARTS_MAX - 1):
        module = f"m{number}"
        assert after(core, Importing(module), LeftOut(module, "fails"), Tripped(), Ended(0))[-1] == Start(core.modules)
    actions = after(core, Importing("m50"), LeftOut("m50", "fails"), Tripped(), Ended(0))
    assert actions[-1] == Warn(f"the template was started {STARTS_MAX} times; workers start cold")


@pytest.mark.parametrize("before", [(), (Importing("a"), Ready())])
def test_a_machine_that_cannot_fork_so_is_not_asked_again(before: tuple[Event, ...]) -> None:
    core = Preload(("a",))
    after(core, *before)
    actions = after(core, Refused("riscv64 is not among the CPUs it knows"))
    assert actions == [
        Stop(),
        Warn("the template cannot fork: riscv64 is not among the CPUs it knows; workers start cold"),
    ]
    assert after(core, Refused("again"), Ended(0), Importing("a"), Ready(), LeftOut("a", "fails"), Tripped()) == []


@pytest.mark.parametrize("event", [Importing("a"), LeftOut("a", "fails"), Tripped(), Ready()])
def test_a_ready_process_imports_no_more(event: Event) -> None:
    core = Preload(("a",))
    after(core, Importing("a"), Ready())
    with pytest.raises(InvalidTransition):
        after(core, event)


def test_what_was_learned_holds_for_the_same_command_and_script_only(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()

    def kept(*args: str) -> KeptImports:
        command = parse("python", args)
        assert command is not None
        return KeptImports(tmp_path, command)

    words = "-u", str(script), "--lr=1"
    assert kept(*words).read() == ()
    kept(*words).write(("torch", "torch.nn"))
    assert kept(*words).read() == ("torch", "torch.nn")
    assert kept(*words[:2], "--lr=2").read() == kept("-m", "train").read() == ()
    assert [path.name for path in tmp_path.iterdir() if path != script] == ["imports.json"]

    os.utime(script, (1, 1))
    assert kept(*words).read() == ()
    kept(*words).write(("json",))  # the last one to learn wins
    assert kept(*words).read() == ("json",)
    (tmp_path / "imports.json").unlink()
    (tmp_path / "imports.json").mkdir()  # as with a full disk: nothing is kept, and nothing left behind
    kept(*words).write(("json",))
    assert [path.name for path in tmp_path.iterdir() if path != script] == ["imports.json"]
    (tmp_path / "imports.json").rmdir()
    for damage in ("", "[]", '{"modules": ["json"]}', "\ud800".encode(errors="surrogatepass").decode("latin-1")):
        (tmp_path / "imports.json").write_text(damage)
        assert kept(*words).read() == ()


@pytest.mark.parametrize(
    "options, why",
    [
        ("--preload a-b", "--preload a-b: 'a-b' is not the name of a module: use names such as"),
        ("--preload auto,json", "--preload auto,json: auto cannot be combined with modules: use it alone"),
        ("--preload json --numa-binding node", "preload and numa_binding are both given"),
        ("--preload json --run-path --start-method fork", "preload is given with start_method 'fork'"),
    ],
)
def test_what_cannot_be_preloaded_is_refused(options: str, why: str) -> None:
    assert why in complaint(*options.split(), __file__)
