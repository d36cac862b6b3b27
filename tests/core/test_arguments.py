"""The command line, example by example."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from kit.arguments import complaint, install, invoke

from aelastic.cli.options import OPTIONS
from aelastic.cli.parser import read_options
from aelastic.settings import Std

# Defaults and values.


def test_a_script_alone_is_one_worker_without_restarts(script: str) -> None:
    invocation = invoke(script)
    spec = invocation.spec
    assert invocation.name == script
    assert (spec.local_world_size, spec.max_restarts, spec.role) == (1, 0, "default")
    assert (spec.monitor_interval, spec.shutdown_timeout_s, spec.start_method) == (0.1, 30.0, "spawn")
    assert (spec.redirects, spec.tee, spec.log_dir) == (Std.NONE, Std.NONE, None)
    assert (invocation.loop, invocation.exit_codes) == ("uvloop", "cause")
    assert invocation.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def test_every_value_reaches_the_spec(script: str, tmp_path: Path) -> None:
    options = (
        "--nnodes=1 --nproc-per-node=2 --max-restarts=3 --monitor-interval=0.5 --role=trainer -r 0:1 -t 3 "
        f"--log-dir={tmp_path / 'logs'} --start-method=fork --signals-to-handle=SIGUSR1 --shutdown-timeout=2.5 "
        "--loop=asyncio --exit-codes=torchrun"
    ).split()
    invocation = invoke(*options, script)
    spec = invocation.spec
    assert (spec.local_world_size, spec.max_restarts, spec.monitor_interval, spec.role) == (2, 3, 0.5, "trainer")
    assert (spec.redirects, spec.tee, spec.log_dir) == ({0: Std.OUT}, Std.ALL, tmp_path / "logs")
    assert (spec.start_method, spec.shutdown_timeout_s) == ("fork", 2.5)
    assert (invocation.loop, invocation.exit_codes, invocation.signals) == ("asyncio", "torchrun", (signal.SIGUSR1,))
    assert not (tmp_path / "logs").exists(), "a check leaves nothing behind"
    assert invoke("--role", "", script).spec.role == "", "torchx's dist.ddp always passes it"


def test_dashes_and_underscores_are_the_same(script: str) -> None:
    assert invoke("--nproc_per_node=2", "--max_restarts=1", script) == invoke(
        "--nproc-per-node=2", "--max-restarts=1", script
    )


def test_what_follows_the_script_is_the_scripts(script: str) -> None:
    assert invoke(script, "--max-restarts=9", "-m", "--", "x").spec.args == (
        "-u", script, "--max-restarts=9", "-m", "--", "x",
    )  # fmt: skip


def test_cpu_means_one_worker_for_each_cpu_we_may_use(script: str) -> None:
    assert invoke("--nproc-per-node=cpu", script).spec.local_world_size == len(os.sched_getaffinity(0))


def test_signals_are_named_with_spaces_and_in_lower_case_too(script: str) -> None:
    assert invoke("--signals-to-handle", " sigterm, SIGUSR2,SIGTERM", script).signals == (
        signal.SIGTERM,
        signal.SIGUSR2,
    )
    assert invoke("--signals-to-handle", "", script).signals == ()


# Variables.


def test_a_pet_variable_is_the_default_and_the_command_line_wins(script: str) -> None:
    assert invoke(script, PET_NPROC_PER_NODE="2").spec.local_world_size == 2
    assert invoke("--nproc-per-node=3", script, PET_NPROC_PER_NODE="2").spec.local_world_size == 3


@pytest.mark.parametrize("value, is_module", [("1", True), ("0", False), ("", False)])
def test_a_flag_variable_is_one_zero_or_empty(value: str, is_module: bool) -> None:
    assert ("-m" in invoke(__file__ if not is_module else "json.tool", PET_MODULE=value).spec.args) is is_module


def test_a_module_or_a_program_by_a_variable_may_have_a_name_like_that_of_a_command() -> None:
    assert "timeit" in invoke("timeit", PET_MODULE="1").spec.args  # as in timeline
    assert invoke("stat", PET_NO_PYTHON="1").spec.entrypoint == "stat"  # as in status


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.variables], ids=lambda option: option.dest)
def test_an_empty_variable_is_unset(script: str, option: Any) -> None:
    unset, empty = read_options([script], {}), read_options([script], {option.variables[0]: ""})
    assert empty == unset


def test_the_shutdown_timeout_is_looked_for_in_three_places(script: str) -> None:
    both = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7", "PET_SHUTDOWN_TIMEOUT": "6"}
    assert invoke("--shutdown-timeout=5", script, **both).spec.shutdown_timeout_s == 5
    assert invoke(script, **both).spec.shutdown_timeout_s == 6
    assert invoke(script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").spec.shutdown_timeout_s == 7


def test_a_restart_grace_is_a_time_or_that_of_other_stops(script: str) -> None:
    assert invoke(script).spec.restart_grace is None
    assert invoke("--restart-grace=1.5", script).spec.restart_grace == 1.5
    assert invoke(script, AELASTIC_RESTART_GRACE="shutdown-timeout").spec.restart_grace == "shutdown-timeout"


# Output.


def test_filters_reach_the_spec(script: str) -> None:
    spec = invoke(
        "--local-ranks-filter=0,2", "--duplicate-stdout-filters=loss,a,,b", "--duplicate-stderr-filters", "E", script,
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="${rank}> ",
    ).spec  # fmt: skip
    assert spec.local_ranks_filter == frozenset({0, 2})
    assert (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters) == (("loss", "a,b"), ("E",))
    assert spec.log_line_prefix_template == "${rank}> "
    assert invoke(script).spec.local_ranks_filter is None


def test_the_prefix_of_lines_is_looked_for_in_three_places(script: str) -> None:
    both = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "a", "PET_LOG_LINE_PREFIX_TEMPLATE": "b"}
    assert invoke("--log-line-prefix-template=c", script, **both).spec.log_line_prefix_template == "c"
    assert invoke(script, **both).spec.log_line_prefix_template == "b"
    assert invoke(script, TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="a").spec.log_line_prefix_template == "a"
    assert invoke("--log_line_prefix_template", "", script).spec.log_line_prefix_template is None


def test_a_class_of_a_package_shows_where_output_goes(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "quiet = quiet:Quiet\nbroken = quiet:broken\ngone = quiet:Gone", QUIET)
    spec = invoke("--logs-specs=quiet", "--tee=0:3", "--local-ranks-filter=1", f"--log-dir={tmp_path}", script).spec
    given = spec.logs_specs.given
    assert (given["log_dir"], given["local_ranks_filter"]) == (str(tmp_path), {1})
    assert (given["redirects"], given["tee"]) == (Std.NONE, {0: Std.ALL})
    assert complaint("--logs-specs=broken", script).endswith("--logs-specs broken: OSError: no room")
    assert "Gone" in complaint("--logs-specs=gone", script)
    assert "use one of broken, default, gone, quiet" in complaint("--logs-specs=loud", script)
    assert invoke("--logs-specs=default", script).spec.logs_specs is None


QUIET = """\
class Quiet:
    def __init__(self, **given):
        self.given = given

def broken(**given):
    raise OSError("no room")
"""


# What workers get.


def test_workers_inherit_the_environment_and_what_torchrun_adds(script: str) -> None:
    assert invoke(script, A="b").spec.env == {
        "PATH": os.defpath,
        "A": "b",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }


@pytest.mark.parametrize(
    "workers, given, expected", [("1", {}, None), ("2", {}, "1"), ("2", {"OMP_NUM_THREADS": "4"}, "4")]
)
def test_several_workers_get_one_openmp_thread_each_unless_told(
    script: str, workers: str, given: dict[str, str], expected: str | None
) -> None:
    env = invoke("--nproc-per-node", workers, script, **given).spec.env
    assert env is not None
    assert env.get("OMP_NUM_THREADS") == expected


# The expected results come from running torchrun 2.13 with each of these.
@pytest.mark.parametrize(
    "options, expected",
    [
        ("", ("localhost", None, None)),
        ("--standalone", ("localhost", None, None)),
        ("--standalone --rdzv-id resnet", ("localhost", None, "resnet")),
        ("--master-addr 127.0.0.2", ("localhost", None, None)),
        ("--master-port 29555", ("127.0.0.1", 29555, "none")),
        ("--master-port 0", ("127.0.0.1", 0, "none")),
        ("--master-addr node7 --master-port 29556", ("node7", 29556, "none")),
        ("--master-addr [::1] --master-port 29556", ("::1", 29556, "none")),
        ("--standalone --master-addr node7 --master-port 29557", ("localhost", None, None)),
    ],
)
def test_a_master_port_without_standalone_makes_the_rendezvous_static(
    script: str, options: str, expected: tuple[str, int | None, str | None]
) -> None:
    spec = invoke(*options.split(), script).spec
    assert (spec.master_addr, spec.master_port, spec.run_id) == expected


def test_the_static_rule_holds_for_variables(script: str) -> None:
    spec = invoke(script, PET_MASTER_ADDR="node7", PET_MASTER_PORT="29558", MASTER_PORT="1").spec
    assert (spec.master_addr, spec.master_port, spec.run_id) == ("node7", 29558, "none")


def test_one_node_on_its_own_has_rank_0_whatever_its_scheduler_calls_it(script: str) -> None:
    assert invoke(script, PET_NODE_RANK="3").spec.master_addr == "localhost"


def test_the_page_for_users_of_torchrun_names_each_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "from-torchrun.md").read_text()
    missing = [option.name for option in OPTIONS if option.name not in page and option.name != "--module"]
    assert not missing
    assert "`-m`" in page
