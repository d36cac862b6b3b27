"""The launcher as a library: its results and exceptions, compared with torch's."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, on_both_loops, ran
from kit.ports import quiet_port
from kit.stories import launches as stories
from kit.stories.launches import one_node
from kit.waiting import DEADLINE_S
from kit.workers.torch_versions import SINCE

from aelastic import ChildFailedError, InputError, LaunchConfig, SignalException, elastic_launch, launch_agent, procs
from aelastic.compat.launcher import blocking, errors
from aelastic.compat.launcher.blocking import BlockingRun
from aelastic.compat.launcher.launch_config import worker_spec
from aelastic.errors import ProcessFailure
from aelastic.launch import _get_entrypoint_name
from aelastic.logs_specs import DefaultLogsSpecs
from aelastic.rdzv.settings import split_endpoint
from aelastic.settings import Std

# In `make test`, test_embedding.py starts functions in every way.
with_every_method = pytest.mark.parametrize(
    "method", ["spawn", *(pytest.param(one, marks=pytest.mark.all) for one in ("fork", "forkserver"))]
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.usefixtures("warm_stores"),
]


def launch(entrypoint: Any, *args: Any, **fields: Any) -> dict[int, Any]:
    return elastic_launch(one_node(**fields), entrypoint)(*args)


def failure_of(entrypoint: Any, *args: Any, **fields: Any) -> ChildFailedError:
    with pytest.raises(ChildFailedError) as caught:
        launch(entrypoint, *args, **fields)
    return caught.value


# Compared with torch.


@pytest.mark.long
@pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S)
@pytest.mark.all
def test_every_story_ends_as_it_does_with_torch(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{quiet_port()}"
    results = {}
    for whose in ("aelastic", "torch"):
        env = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_ERROR_FILE"}
        done = ran(sys.executable, stories.__file__, whose, endpoint, str(tmp_path / whose), env=env)
        assert done.returncode == 0, done.stderr
        results[whose] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert results["aelastic"] == results["torch"]
    assert len(results["torch"]) == 16 + len(stories.MISUSES)


@pytest.mark.filterwarnings("ignore")
def test_the_config_has_the_fields_and_defaults_of_torchs() -> None:
    torchs = pytest.importorskip("torch.distributed.launcher.api").LaunchConfig

    def described(config: Any) -> list[tuple[str, Any, Any]]:
        return [
            (each.name, each.default, each.default_factory() if callable(each.default_factory) else None)
            for each in dataclasses.fields(config)
        ]

    known = {each.name for each in dataclasses.fields(torchs)}
    later = [each.name for each in dataclasses.fields(LaunchConfig) if each.name not in known]
    assert set(later) - {*SINCE, "numa_options"} == {"cache_dir", "preload", "progress", "recovery", "restart_grace"}
    assert [each for each in described(LaunchConfig) if each[0] in known] == described(torchs)
    assert isinstance(one_node().logs_specs, DefaultLogsSpecs)
    assert type(one_node(torchs).logs_specs).__name__ == "DefaultLogsSpecs"
    for more in ({}, {"rdzv_timeout": 5}, {"rdzv_configs": {"timeout": 7}}, {"shutdown_timeout": 3}):
        if more.keys() & set(later):
            continue
        ours, theirs = vars(one_node(**more)), vars(one_node(torchs, **more))
        ours = {name: value for name, value in ours.items() if name in known}
        assert {**ours, "logs_specs": None} == {**theirs, "logs_specs": None}


def test_the_shutdown_timeout_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert (one_node().shutdown_timeout, one_node(shutdown_timeout=0).shutdown_timeout) == (7, 0)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon: use whole seconds"):
        one_node()


def test_warm_starts_caches_and_the_grace_of_a_restart_are_as_the_spec_has_them(tmp_path: Path) -> None:
    ours = {"cache_dir": tmp_path, "preload": ("colorsys",), "restart_grace": 3.0, "recovery": "restart"}
    spec = worker_spec(one_node(**ours), "true", [], os.environ)
    assert {name: getattr(spec, name) for name in ours} == ours
    with pytest.raises(ValueError, match="restart_grace is 'soon': use seconds"):
        worker_spec(one_node(restart_grace="soon"), "true", [], os.environ)


def test_a_config_of_an_older_torch_has_defaults_for_what_it_lacks() -> None:
    old = vars(one_node())
    later = "numa_options signals_to_handle duplicate_stdout_filters virtual_local_rank shutdown_timeout"
    for name in later.split():
        del old[name]
    assert elastic_launch(SimpleNamespace(**old), "true")() == {0: None, 1: None}  # type: ignore[arg-type]
    for config in (SimpleNamespace(nodes=1), None):
        with pytest.raises(ValueError, match="pass a LaunchConfig"):
            elastic_launch(config, "true")()  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_a_config_of_torchs_is_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torchs = pytest.importorskip("torch.distributed.launcher.api")
    multiprocessing_ = pytest.importorskip("torch.distributed.elastic.multiprocessing")
    logs = multiprocessing_.DefaultLogsSpecs(log_dir=str(tmp_path), tee=multiprocessing_.Std.OUT)
    config = one_node(torchs.LaunchConfig, logs_specs=logs)
    assert elastic_launch(config, stories.rank_and)(1) == {0: [0, 1], 1: [1, 1]}
    assert elastic_launch(config, "echo")("hi") == {0: None, 1: None}
    assert sorted(capfd.readouterr().out.splitlines()) == ["[default_role0]:hi", "[default_role1]:hi"]


@pytest.mark.filterwarnings("ignore")
def test_handlers_of_torchs_errors_catch_ours() -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    with pytest.raises(errors.ChildFailedError) as caught:
        launch("false")
    again = pickle.loads(pickle.dumps(caught.value))
    for error in (caught.value, again):
        assert isinstance(error, ChildFailedError) and isinstance(error, errors.ChildFailedError)
        assert (error.name, set(error.failures) <= {0, 1}) == ("false", True)
    assert str(again) == str(caught.value)
    stopped = pickle.loads(pickle.dumps(SignalException("stopped", signal.SIGTERM)))
    assert (str(stopped), stopped.sigval) == ("stopped", signal.SIGTERM)


def test_an_error_does_not_wait_for_a_disk_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(errors, "KEEP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(errors, "_write_cause", lambda _: answers.wait(LAUNCH_TIMEOUT_S))
    failure = ProcessFailure.from_elsewhere("host", 0, 0, 77, 1, "ValueError", "", 0)
    errors._keep_cause(ChildFailedError("train", {0: failure}))
    assert not answers.is_set() and "since the disk of the temporary folder does not answer" in caplog.text
    answers.set()


# Functions.


@with_every_method
def test_what_functions_return_comes_by_global_rank_and_no_files_are_left(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    args = ["${local_rank}", ["${local_rank}"], None]
    values = launch_agent(one_node(start_method=method), stories.rank_and, args)
    assert values == {rank: [rank, str(rank), ["${local_rank}"], None] for rank in (0, 1)}
    failure_of(stories.fail)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("pymp-")]  # multiprocessing's own


@with_every_method
def test_queues_events_locks_and_barriers_reach_the_functions(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    queue, event, lock, barrier = context.Queue(), context.Event(), context.Lock(), context.Barrier(2)
    event.set()
    assert launch(stories.meet, queue, event, lock, barrier, start_method=method) == {0: True, 1: True}
    assert {queue.get(timeout=DEADLINE_S), queue.get(timeout=DEADLINE_S)} == {0, 1}
    queue.close()
    queue.join_thread()


# A function's result or exception takes one path to the agent, whatever its start method.


@pytest.mark.all
def test_large_results_come_whole() -> None:  # test_embedding.py covers smaller ones
    (value,) = launch(stories.many_bytes, 200, start_method="spawn", nproc_per_node=1).values()
    assert value == stories.many_bytes(200)
    (value,) = launch(stories.large_dict, 200_000, start_method="spawn", nproc_per_node=1).values()
    assert value == stories.large_dict(200_000)


def test_tensors_come_back_those_in_shared_memory_too() -> None:
    torch = pytest.importorskip("torch")
    (value,) = launch(stories.tensors, nproc_per_node=1, start_method="fork").values()  # torch is imported here only
    assert torch.equal(value["shared"], torch.arange(1000.0))
    assert value["leaf"].requires_grad and torch.equal(value["leaf"], torch.ones(3))
    assert torch.equal(value["strided"], torch.eye(4)[::2])


@pytest.mark.parametrize(
    "function, message",
    [
        (stories.fail, r"LookupError: no batch left"),
        (stories.unpicklable, r".*the return value cannot be pickled.*lock"),
        (stories.fail_with_a_lock, r".*UnpicklableError.*a lock inside"),
    ],
)
def test_a_failure_has_the_functions_name_message_and_traceback(function: Callable[[], Any], message: str) -> None:
    failed = failure_of(function)
    rank, cause = failed.get_first_failure()
    assert failed.name == function.__name__ and rank in {0, 1}
    assert re.match(message, cause.message, re.DOTALL) and re.search(message, str(failed), re.DOTALL)
    assert "launches.py" in cause.traceback or function is stories.unpicklable


@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.all), "forkserver"])
def test_a_function_that_has_ended_before_the_kernel_was_asked_to_tell_is_seen_to_end(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork server reaps its children at once, while the agent may have waited for a CPU."""
    monkeypatch.setattr(procs, "pidfd_of", lambda pid: None)
    assert launch(stories.rank_and, start_method=method) == {0: [0], 1: [1]}


@pytest.mark.all
def test_a_worker_may_launch_itself() -> None:  # as any child may: test_launch_again.py
    values = launch(stories.launch_inside, "spawn", start_method="spawn", nproc_per_node=1)
    assert values == {0: {0: [0, "inside"], 1: [1, "inside"]}}


# Programs.


def test_a_programs_arguments_are_text_with_the_local_rank_put_in(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("echo", "hi", 3, Path("x"), "at ${local_rank}", [1, "${local_rank}"]) == {0: None, 1: None}
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"hi 3 x at {rank} [1, '{rank}']".replace(f"'{rank}'", "'" + str(rank) + "'") for rank in (0, 1)]


def test_what_runs_in_our_own_python_is_called_by_its_name() -> None:
    torchs = pytest.importorskip("torch.distributed.launcher.api")
    for entrypoint, args, name in (
        (sys.executable, ["-u", "train.py", "-x"], "train.py"),
        (sys.executable, ["-u"], ""),
        ("/bin/echo", ["train.py"], "/bin/echo"),
        (stories.fail, [], "fail"),
        (None, [], ""),
    ):
        assert _get_entrypoint_name(entrypoint, args) == name == torchs._get_entrypoint_name(entrypoint, args)
    failed = failure_of(sys.executable, "-c", "raise SystemExit(4)")
    assert failed.name == "raise SystemExit(4)" and failed.get_first_failure()[1].exitcode == 4


@on_both_loops
def test_the_agent_runs_on_the_loop_of_the_variable_and_the_signals_are_in_this_programs_environment(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    run = BlockingRun._main

    async def spy(self: BlockingRun) -> Any:
        import asyncio

        seen.append(type(asyncio.get_running_loop()).__module__)
        return await run(self)

    monkeypatch.setattr(BlockingRun, "_main", spy)
    monkeypatch.setenv("AELASTIC_LOOP", loop)
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "before")
    launch("true", signals_to_handle="SIGTERM,SIGUSR1")
    assert os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1", "as with torch"
    assert [module.partition(".")[0] for module in seen] == [loop]
    monkeypatch.setenv("AELASTIC_LOOP", "curio")
    with pytest.raises(ValueError, match="AELASTIC_LOOP=curio: use uvloop or asyncio"):
        launch("true")


# Output.


def test_everything_teed_is_out_before_the_call_returns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), tee=Std.ALL)
    launch(stories.speak, 20_000, logs_specs=logs, log_line_prefix_template="${role_name}/${rank} ", role="r")
    lines = capfd.readouterr().out.splitlines()
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"r/{rank} ")] == [
            f"r/{rank} line {n}" for n in range(20_000)
        ]
        (kept,) = tmp_path.glob(f"story_*/attempt_0/{rank}/stdout.log")
        assert kept.read_text().count("\n") == 20_000


# Health.


class Delegating:
    """Like torch's `_AliveCallbackProxy`."""

    def __init__(self) -> None:
        self.delegate: Any = None

    def set_delegate(self, delegate: Any) -> None:
        self.delegate = delegate


class Server(stories.Health):
    def __init__(self, callback: Any) -> None:
        super().__init__()
        self.callback = callback

    @property
    def alive_callback(self) -> Any:
        return self.callback


@pytest.mark.parametrize("entrypoint", ["true", "false", "no such program"])
def test_a_health_check_server_is_stopped_however_the_job_ends(entrypoint: str) -> None:
    server = Server(lambda: 0)
    try:
        elastic_launch(one_node(), entrypoint, server)()
    except (ChildFailedError, InputError):
        assert entrypoint != "true"
    assert server.calls == ["stop"]


def test_the_health_check_learns_when_the_loop_last_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "_ANSWER_TIMEOUT_S", DEADLINE_S)
    callback = Delegating()
    answers: list[tuple[float, int, float]] = []

    def ask() -> None:
        while not (tmp_path / "0").exists():
            time.sleep(0.01)
        answers.append((time.time(), callback.delegate(), time.time()))
        (tmp_path / "asked").touch()

    code = f"import os, time\nopen({str(tmp_path / '0')!r}, 'w')\nwhile not os.path.exists({str(tmp_path / 'asked')!r}): time.sleep(0.01)"
    asking = threading.Thread(target=ask)
    asking.start()
    elastic_launch(one_node(nproc_per_node=1), sys.executable, Server(callback))("-c", code)
    asking.join(DEADLINE_S)
    ((before, answer, after),) = answers
    assert int(before) <= answer <= after
    assert callback.delegate() >= answer, "also after the job"


# Misuse; core/test_spec.py covers more of the fields, and core/test_bad_usage.py more of the options.


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"nproc_per_node": 0}, "nproc_per_node is 0: at least 1 worker"),
        ({"min_nodes": 2}, "min_nodes is 2 and max_nodes 1"),
        ({"min_nodes": 0}, "at least 1 node"),
        ({"rdzv_backend": "c10"}, "did you mean c10d"),
        ({"rdzv_backend": "static", "rdzv_endpoint": "h:1"}, "rank is None in rdzv_configs"),
        ({"rdzv_endpoint": "h:1", "rdzv_configs": {"join_timeout": -2}}, "join_timeout=-2"),
        ({"signals_to_handle": "SIGKILL"}, "SIGKILL cannot be handled"),
        ({"numa_options": "everywhere"}, "numa_binding is 'everywhere'"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_work_is_refused_with_its_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        launch(stories.rank_and, **fields)
    assert isinstance(caught.value, InputError) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "entrypoint, words",
    [
        (None, "entrypoint is None: pass a function"),
        ("", "entrypoint is '': pass a function"),
        ("no-such-program", "no-such-program is not a program in PATH"),
    ],
)
def test_an_entrypoint_that_is_none_is_refused(entrypoint: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        launch(entrypoint)


WRONG_TYPES = {
    "min_nodes": "1", "max_nodes": None, "nproc_per_node": 1.5, "max_restarts": "a", "monitor_interval": "a",
    "rdzv_timeout": "x", "shutdown_timeout": "x", "run_id": 7, "role": 5, "local_addr": 5, "rdzv_endpoint": 5,
    "rdzv_configs": 5, "signals_to_handle": 5, "log_line_prefix_template": 3, "duplicate_stdout_filters": "a",
    "virtual_local_rank": "no", "start_method": None, "event_log_handler": 1, "rdzv_backend": None,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_value_of_another_type_is_named(name: str) -> None:
    value = WRONG_TYPES[name]
    with pytest.raises(ValueError, match=f"^{name} is {re.escape(repr(value))}: use "):
        one_node(**{name: value})
    config = one_node()
    setattr(config, name, value)  # torch's config checks nothing
    with pytest.raises(ValueError, match=f"^{name} is {re.escape(repr(value))}: use "):
        elastic_launch(config, "true")()


def test_a_config_without_a_name_or_an_endpoint_has_torchs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    api = pytest.importorskip("torch.distributed.launcher.api")
    utils = pytest.importorskip("torch.distributed.elastic.rendezvous.utils")
    asked: list[Any] = []

    def look(parameters: Any) -> None:
        asked.append(parameters)
        raise LookupError("that was all")

    monkeypatch.setattr(api.rdzv_registry, "get_rendezvous_handler", look)
    ports = {"c10d": 29400, "etcd": 2379, "etcd-v2": 2379}
    for backend, port in ports.items():
        for nothing in ("", None):
            fields = {"max_nodes": 2, "run_id": nothing, "rdzv_endpoint": nothing, "rdzv_backend": backend}
            with pytest.raises(LookupError):
                api.launch_agent(one_node(api.LaunchConfig, **fields), "true", [])
            caplog.clear()
            spec = worker_spec(one_node(**fields), "true", [], os.environ)
            theirs = utils.parse_rendezvous_endpoint(asked[-1].endpoint, port)
            assert spec.rdzv is not None and theirs == split_endpoint(spec.rdzv.endpoint)
            assert len(str(spec.run_id)) == pytest.approx(len(asked[-1].run_id), abs=6) and "no run_id" in caplog.text
            assert spec.run_id != worker_spec(one_node(**fields), "true", [], os.environ).run_id


def test_a_job_of_one_to_two_nodes_without_a_name_runs_on_one() -> None:
    fields = {"max_nodes": 2, "run_id": None, "rdzv_backend": "c10d", "rdzv_endpoint": f"localhost:{quiet_port()}"}
    assert launch(stories.rank_and, 1, rdzv_configs={"last_call_timeout": 0.1}, **fields) == {0: [0, 1], 1: [1, 1]}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_functions_that_cannot_be_sent_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match="define it at the top of a module"):
        launch(lambda: 1, start_method=method)


@pytest.mark.skipif(
    not hasattr(multiprocessing.get_context("fork").Lock(), "_is_fork_ctx"),
    reason="multiprocessing of this Python sends a lock of another start method",
)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_queue_of_another_start_method_is_refused(method: str) -> None:
    queue: Any = multiprocessing.get_context("fork").Queue()
    with pytest.raises(ValueError, match=f"get_context\\({method!r}\\)"):
        launch(stories.rank_and, queue, start_method=method)


def test_a_numa_mode_may_be_an_option_object_of_torchs_kind() -> None:
    from enum import Enum
    from types import SimpleNamespace

    class Mode(str, Enum):  # noqa: UP042  as torch's
        NODE = "node"

    for options in ("node", Mode.NODE, SimpleNamespace(affinity_mode=Mode.NODE), SimpleNamespace(affinity_mode="node")):
        assert worker_spec(one_node(numa_options=options), "true", [], os.environ).numa_binding == "node"


def test_what_a_config_says_reaches_the_spec(tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path))
    config = LaunchConfig(
        min_nodes=2, max_nodes=3, nproc_per_node=4, logs_specs=logs, run_id="id", role="r", rdzv_endpoint="h:5",
        rdzv_backend="c10d", rdzv_configs={"join_timeout": 7, "rank": 1}, max_restarts=9, monitor_interval=2.0,
        start_method="forkserver", log_line_prefix_template="p", metrics_cfg={"a": "b"}, local_addr="l",
        event_log_handler="console", duplicate_stdout_filters=["o"], duplicate_stderr_filters=["e"],
        virtual_local_rank=True, shutdown_timeout=6,
    )  # fmt: skip
    spec = worker_spec(config, "true", ["x"], {"PATH": os.defpath})
    assert spec.rdzv is not None
    settings = spec.rdzv
    assert (settings.backend, settings.endpoint, settings.min_nodes, settings.max_nodes) == ("c10d", "h:5", 2, 3)
    assert (settings.node_rank, settings.local_addr, settings.join_timeout_s) == (1, "l", 7.0)
    assert (spec.local_world_size, spec.run_id, spec.role, spec.max_restarts) == (4, "id", "r", 9)
    assert (spec.logs_specs, spec.log_line_prefix_template, spec.event_log_handler) == (logs, "p", "console")
    assert (spec.monitor_interval, spec.start_method, spec.shutdown_timeout_s) == (2.0, "forkserver", 6)
    assert (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters) == (("o",), ("e",))
    assert spec.virtual_local_rank and spec.args == ("x",)
    assert spec.env == {"PATH": os.defpath, "TORCHELASTIC_SIGNALS_TO_HANDLE": config.signals_to_handle}
