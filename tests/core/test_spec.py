"""An invalid worker spec is refused at once, and the message names the field."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from aelastic.base.setting import options_of, settings_of
from aelastic.cli.options import OPTIONS
from aelastic.diagnose.hangs.options import ExpectedOutput
from aelastic.errors import InputError
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.settings import Std
from aelastic.spec import WorkerSpec
from aelastic.workers.requirements import check_program, check_torch

SPEC: Callable[..., WorkerSpec] = WorkerSpec  # also accepts values of the wrong type
EXPECTED: Callable[..., ExpectedOutput] = ExpectedOutput


@pytest.mark.parametrize(
    "name, value, remedy",
    [
        ("local_world_size", "2", "use an int"),
        ("local_world_size", 2.5, "use an int"),
        ("max_restarts", None, "use an int"),
        ("master_port", "29500", "use an int, or None"),
        ("shutdown_timeout_s", "30", "use a number"),
        ("hang_timeout_s", "5", "use a number, or None"),
        ("hang_timeout_steps", "5x", "use a number, or None"),
        ("hang_timeout_steps", 1, "use more than 1, times the median step"),
        ("role", None, "use a str"),
        ("run_id", 7, "use a str, or None"),
        ("args", "train.py", "use a tuple or list of arguments"),
        ("args", {"a": 1}, "use a tuple or list of arguments"),
        ("entrypoint", 7, "use the name of a program, or a function"),
        ("redirects", "3", "use a Std, or a dict of them by local rank"),
        ("rdzv", "c10d", "use RendezvousSettings, or None"),
        ("duplicate_stdout_filters", "loss", "use a tuple or list of texts"),
        ("hang_signals", "cpu", "use a tuple of one or more of output, cpu, io"),
        ("log_dir", 3, "use a Path, or None"),
        ("env", ["A=1"], "use a dict, or None"),
        ("tee", 17, "use a Std, or a dict of them by local rank"),
        ("redirects", {"a": 1}, "use a Std, or a dict of them by local rank"),
        ("redirects", {0: "x"}, "use a Std, or a dict of them by local rank"),
        ("local_ranks_filter", {"a"}, "use a frozenset of local ranks, or None"),
        ("duplicate_stderr_filters", (1,), "use a tuple or list of texts"),
        ("rdzv_handler", 5, "use a torch RendezvousHandler, or None"),
        ("virtual_local_rank", "no", "use a bool"),
        ("expect_output", EXPECTED(5, 2.0), "use an ExpectedOutput of a str"),
        ("expect_output", EXPECTED("x", "2"), "use an ExpectedOutput of a str"),
        ("expect_output", EXPECTED("x", 2.0, "a"), "use an ExpectedOutput of a str"),
        ("hang_timeout_s", 0, "use 1 second or more"),
        ("hang_timeout_s", float("inf"), "use 1 second or more"),
        ("hang_timeout_s", float("nan"), "use 1 second or more"),
        ("hang_signals", (), "use one or more of output, cpu, io"),
        ("hang_signals", ("gpu",), "use one or more of output, cpu, io"),
        ("hang_signals", ("cpu", "cpu"), "use one or more of output, cpu, io"),
        ("hang_action", "kill", "use one of stop, report"),
        ("start_method", "thread", "use one of spawn, fork, forkserver"),
        ("expect_output", "loss:5", "use an ExpectedOutput of a str"),
        ("expect_output", EXPECTED("", 5.0), "the pattern is empty"),
        ("expect_output", EXPECTED("[", 5.0), "the pattern '[' is not a regular expression"),
        ("expect_output", EXPECTED("a", 0.0), "use 1 second or more"),
        ("expect_output", EXPECTED("a", 5.0, frozenset()), "ranks is empty"),
        ("local_ranks_filter", {-1}, "count from 0"),
        ("local_world_size", 0, "at least 1 worker is needed"),
        ("local_world_size", 1 << 17, "use at most 65536"),
        ("max_restarts", -1, "use 0 or more"),
        ("master_port", 65536, "use a port from 0 (a free one) to 65535"),
        ("monitor_interval", 0, "use seconds above 0"),
        ("linger_s", float("nan"), "use seconds, 0 or more"),
        ("log_max_bytes", 5, "use 1048576 (1M) or more"),
        ("metrics_textfile", "m.txt", "use a name that ends in .prom"),
        ("run_id", "a\nb", "use a run id without line breaks and NUL"),
        ("preload", ("torch", "a b"), "'a b' is not the name of a module: use names such as torch"),
        ("numa_binding", "near", "use one of node, socket, exclusive, core-complex"),
        ("event_log_handler", "", "use a name that is not empty"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_the_name_of_the_field(name: str, value: object, remedy: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"{name} is {value!r}: {remedy}")):
        SPEC(**{"entrypoint": "true", name: value})


@pytest.mark.parametrize("name", ["max_restarts", "master_port", "shutdown_timeout_s", "hang_timeout_s"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_beyond_what_a_machine_counts_is_refused_by_its_size(name: str, digits: int) -> None:
    with pytest.raises(InputError, match=rf"^{name} is an int of \d+ bits, which is too large: use (an int|a number)"):
        SPEC(**{"entrypoint": "true", name: 10**digits})


def test_an_argument_that_the_system_cannot_take_is_refused() -> None:
    for arg in ("a\0b", b"a\0b", Path("a\0b"), 1, "\ud800"):
        words = re.escape(f"args[1] is {arg!r} ({type(arg).__name__}): every argument of a program must be a str")
        with pytest.raises(InputError, match=words):
            SPEC(entrypoint="true", args=["x", arg])
    assert len(SPEC(entrypoint="true", args=["a=b", b"\xff", Path("c"), "\udcff"]).args) == 4


@pytest.mark.parametrize(
    "env", [{"SECRET": 1}, {1: "SECRET"}, {"A=B": "x"}, {"A\0B": "x"}, {"A": "x\0"}, {"\ud800": "x"}]
)
def test_a_variable_that_cannot_be_is_named_without_its_value(env: dict[object, object]) -> None:
    words = r"env has the name .*: use a str without NUL and =|env\[.*\] is of type \w+: every value must be a str without NUL"
    with pytest.raises(InputError, match=words) as refused:
        SPEC(entrypoint="true", env=env)
    assert repr(next(iter(env))) in str(refused.value) and repr(next(iter(env.values()))) not in str(refused.value)


@pytest.mark.parametrize("kind", [WorkerSpec, RendezvousSettings])
def test_each_field_is_a_setting_with_words(kind: type[WorkerSpec | RendezvousSettings]) -> None:
    assert {field.name for field in fields(kind)} == settings_of(kind).keys()
    assert all(each.text for each in settings_of(kind).values())


def test_each_option_of_a_field_is_in_the_table_of_options() -> None:
    assert options_of(WorkerSpec, RendezvousSettings).keys() <= {option.name for option in OPTIONS}


@pytest.mark.parametrize("value", ["soon", -1.0, float("nan"), [2], 31.0])
def test_a_restart_grace_is_seconds_up_to_the_shutdown_timeout_or_that_itself(value: object) -> None:
    assert SPEC(entrypoint="true", restart_grace=30.0).restart_grace == 30.0
    assert SPEC(entrypoint="true", restart_grace="shutdown-timeout").restart_grace == "shutdown-timeout"
    with pytest.raises(InputError, match=r"restart_grace is .*: use "):
        SPEC(entrypoint="true", restart_grace=value)


@pytest.mark.parametrize("value", [object(), 3.5, "x", b"x", [], {}, print])
def test_no_value_of_any_field_raises_anything_else(value: object) -> None:
    for field in fields(WorkerSpec):
        try:
            SPEC(**{"entrypoint": "true", field.name: value})
        except InputError:
            pass


def test_what_is_as_good_is_taken() -> None:
    spec = SPEC(entrypoint="true", args=["-c", "x"], log_dir="/logs", redirects=3, shutdown_timeout_s=5)
    assert (spec.args, spec.log_dir, spec.redirects) == (("-c", "x"), Path("/logs"), Std.ALL)


def test_a_program_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.touch()
    path = {"PATH": str(tmp_path)}
    with pytest.raises(
        InputError, match="entrypoint nosuch is not a program in PATH: check its name, or give its path"
    ):
        check_program("nosuch", path)
    hint = r"use entrypoint=sys.executable, args=\('train.py', \.\.\.\)"
    with pytest.raises(InputError, match=f"entrypoint train.py is not a program in PATH: for a script {hint}"):
        check_program("train.py", path)
    with pytest.raises(InputError, match=r"entrypoint /no/such does not exist: check the path"):
        check_program("/no/such", path)
    with pytest.raises(InputError, match=rf"entrypoint {here} cannot be executed: check its permissions"):
        check_program(str(here), path)
    with pytest.raises(InputError, match=f"entrypoint {tmp_path} is a folder: name a program in it"):
        check_program(str(tmp_path), path)
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(InputError, match=r"cannot be executed: for a script use entrypoint=sys\.executable, args="):
        check_program(str(script), path)
    here.chmod(0o755)
    check_program("here", path)
    check_program(str(here), path)
    check_program(print, {})


def test_a_script_or_a_module_that_is_not_there_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python, env = sys.executable, dict(os.environ)
    for args, words in (
        (("train.py",), f"script train.py not found from {tmp_path}: check the path"),
        (("-u", "-X", "dev", b"train.py"), f"script train.py not found from {tmp_path}: check the path"),
        ((str(tmp_path),), f"script {tmp_path} is a folder without __main__.py: name a file in it"),
        (("-m", "nosuch.part"), "module nosuch not found: install it, set PYTHONPATH, or leave out -m for a script"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            check_program(python, env, args)
    (tmp_path / "nosuch").mkdir()
    (tmp_path / "train.py").touch()
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "other").mkdir(parents=True)
    for args in (
        ("train.py", "absent.py"), ("rank${local_rank}.py",), ("-m", "nosuch.part"), ("-c", "absent.py"), ("-V",), ("-",),
    ):  # fmt: skip
        check_program(python, env, args)
    check_program(python, {**env, "PYTHONPATH": f"/absent:{elsewhere}"}, ("-m", "other"))
    check_program("true", env, ("absent.py",))


def test_a_python_without_torch_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(InputError, match=rf"torch is not installed for {re.escape(sys.executable)}: pip install torch"):
        check_torch()
    monkeypatch.setitem(sys.modules, "torch", sys)
    check_torch()
