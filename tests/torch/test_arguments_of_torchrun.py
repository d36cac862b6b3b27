"""The command line, compared with torchrun's own parser and launcher."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.arguments import install, invoke, is_ours
from kit.workers.torch_versions import LOOKED_AT, SINCE, TORCH, options_of, picks_a_free_port

from aelastic.cli.arguments import parse
from aelastic.cli.options import GROUPS, OPTIONS
from aelastic.cli.parser import read_options
from aelastic.errors import InputError
from aelastic.workers.functions import run_script_path


@pytest.mark.all
def test_auto_finds_the_number_that_torch_finds(script: str, torch_run: Any) -> None:
    count = torch_run.determine_local_world_size("auto")
    assert invoke("--nproc-per-node=auto", script, **os.environ).spec.local_world_size == count


@pytest.mark.skipif(SINCE["duplicate_stdout_filters"] > TORCH, reason="this torch has no filters")
@pytest.mark.parametrize("text", ["apple", "apple,orange", "a,,b,c", "a,,,b", ",a", "a,", ",,"])
def test_filters_are_parted_as_torchrun_does(script: str, text: str, torch_run: Any) -> None:
    theirs = torch_run.parse_args([f"--duplicate-stdout-filters={text}", script]).duplicate_stdout_filters
    assert list(invoke(f"--duplicate-stdout-filters={text}", script).spec.duplicate_stdout_filters) == theirs


def test_a_class_derived_from_torchs_gets_torchs_choice_of_streams(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs = pytest.importorskip("torch.distributed.elastic.multiprocessing")
    entry = "torchs = torch.distributed.elastic.multiprocessing:DefaultLogsSpecs"
    install(tmp_path, monkeypatch, entry, "")
    logs_specs = invoke("--logs-specs=torchs", "--tee=0:3", "-r2", script).spec.logs_specs
    assert isinstance(logs_specs, torchs.DefaultLogsSpecs)
    assert logs_specs._redirects is torchs.Std.ERR
    assert logs_specs._tee == {0: torchs.Std.ALL}


COMMANDS = [
    "SCRIPT",
    "SCRIPT --lr 0.1 -m",
    "-m json.tool --indent 2",
    "--no-python /bin/sh -c true",
    "--run-path SCRIPT a b",
    "--run-path --no-python -m SCRIPT a",
    "-- SCRIPT -- a",
    "--nproc-per=2 --max-r 1 -r3 -t0:1,1:2 SCRIPT --nproc-per-node=4",
    "--ro x SCRIPT",
    "- a",
    "-- -c pass",
]


@pytest.mark.parametrize("python_exec", [None, "/bin/sh"])
@pytest.mark.parametrize("command", COMMANDS)
def test_the_worker_command_is_torchruns(
    script: str, command: str, python_exec: str | None, torch_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = command.replace("SCRIPT", script).split()
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    if python_exec is not None:
        monkeypatch.setenv("PYTHON_EXEC", python_exec)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # otherwise torchrun sets it, permanently
    config, entrypoint, args = torch_run.config_from_args(torch_run.parse_args(argv))
    spec = parse(argv, os.environ).spec
    if entrypoint is torch_run.run_script_path:
        entrypoint = run_script_path
    assert (spec.entrypoint, spec.args) == (entrypoint, tuple(args))
    assert (spec.local_world_size, spec.max_restarts, spec.role) == (
        config.nproc_per_node,
        config.max_restarts,
        config.role,
    )


def prefixes(parser: ArgumentParser) -> Iterator[str]:
    for spelling in parser._option_string_actions:
        if spelling.startswith("--"):
            yield from (spelling[:end] for end in range(3, len(spelling) + 1))


def torchs_reading(parser: ArgumentParser, argv: list[str]) -> dict[str, Any] | None:
    """The result of torch's parser without default values; `None` if it refuses."""
    for action in parser._actions:
        action.default = None
    try:
        found = vars(parser.parse_args(argv))
    except SystemExit:
        return None
    return {
        dest: value for dest, value in found.items() if value is not None and not dest.startswith("training_script")
    }


VALUES = ["1", "SIGTERM", "fork", "node"]  # one of these is valid for each option of torchrun that takes a value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.all
def test_every_prefix_means_what_it_means_to_torchrun(torch_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from aelastic.cli.parser import _find

    torchs = torch_run.get_args_parser()
    # An option that this torch lacks may shadow a prefix of one that it has, as in later versions of torch.
    known = options_of(torchs)
    groups = {
        title: tuple(option for option in options if is_ours(option) or option.dest in known)
        for title, options in GROUPS.items()
    }
    understood = 0
    for prefix in sorted(set(prefixes(torchs)) - {"--help", "--hel", "--he", "--h"}):
        for argv in ([prefix, "x.py"], *([f"{prefix}={value}", "x.py"] for value in VALUES)):
            theirs = torchs_reading(torchs, argv)
            try:
                found = _find(argv, groups, command="")  # like torch, it refuses a command without a script
            except InputError:
                found = None
            if theirs is None and found is not None and len(argv) == 2 and "=" in argv[0]:
                continue  # torch refuses the value there and we refuse it later; other values are compared
            dests = None if found is None else set(found) - {"script", "script_args"}
            assert dests == (None if theirs is None else set(theirs)), f"{argv}: torchrun {theirs}, aelastic {found}"
            understood += theirs is not None
    capsys.readouterr()
    assert understood > 500


def test_every_option_of_torchrun_is_known_with_its_spellings(torch_run: Any) -> None:
    theirs = set(torch_run.get_args_parser()._option_string_actions) - {"-h", "--help"}
    ours = {spelling for option in OPTIONS for spelling in option.spellings}
    assert theirs <= ours
    known = options_of(torch_run.get_args_parser())
    assert ours - theirs == {
        spelling for option in OPTIONS if is_ours(option) or option.dest not in known for spelling in option.spellings
    }


@pytest.mark.skipif(TORCH not in LOOKED_AT, reason="a version of torch that was not looked at")
def test_an_option_that_this_torch_lacks_came_later(torch_run: Any) -> None:
    lacking = {option.dest for option in OPTIONS if not is_ours(option)} - options_of(torch_run.get_args_parser())
    assert lacking == {dest for dest, since in SINCE.items() if since > TORCH}


def test_defaults_are_torchruns(torch_run: Any) -> None:
    def text(default: object) -> str:
        return "" if default is None or default is False or default == [] else str(default)

    theirs = {action.dest: text(action.default) for action in torch_run.get_args_parser()._actions}
    if not picks_a_free_port(torch_run.get_args_parser()):
        assert theirs.pop("master_port") == "29500"
    for option in OPTIONS:
        ours = option.default or "" if option.metavar else ""
        if option.dest in theirs and option.dest != "shutdown_timeout":  # torch fills that in later
            assert ours == theirs[option.dest], option.name


VALUE_OF = {
    "nnodes": "2:3", "nproc_per_node": "2", "rdzv_conf": "a=1", "max_restarts": "2", "monitor_interval": "0.5",
    "start_method": "fork", "redirects": "0:1", "tee": "2", "local_ranks_filter": "0,1", "node_rank": "1",
    "master_port": "29501", "signals_to_handle": "SIGUSR1", "shutdown_timeout": "7", "duplicate_stdout_filters": "a,b",
    "duplicate_stderr_filters": "c",
}  # fmt: skip


@pytest.mark.parametrize(
    "option",
    [option for option in OPTIONS if not is_ours(option)],
    ids=lambda option: option.dest,
)
def test_each_variable_of_torchrun_is_one_here(
    option: Any, script: str, torch_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torchrun honours `PET_<NAME>`, the variable means the same as the option; elsewhere neither honours it."""
    if not hasattr(torch_run.parse_args([script]), option.dest):
        pytest.skip("an option that this torch lacks")
    value = VALUE_OF.get(option.dest, "name") if option.metavar else "1"
    variable = f"PET_{option.dest.upper()}"
    before = getattr(torch_run.parse_args([script]), option.dest)
    monkeypatch.setenv(variable, value)
    is_heeded_there = getattr(torch_run.parse_args([script]), option.dest) != before
    by_variable, by_default = (read_options([script], environ)[option.dest] for environ in ({variable: value}, {}))
    given = [f"{option.name}={value}"] if option.metavar else [option.name]
    by_option = read_options([*given, script], {})[option.dest] if is_heeded_there else by_default
    assert by_variable == by_option
    assert (by_variable != by_default) is is_heeded_there
