"""Where output goes, compared with torch's own `LogsSpecs`: same files, same answers, and objects of either kind."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Launcher, ran
from kit.launching import run as run_on
from kit.waiting import DEADLINE_S, wait_for
from kit.workers import entrypoints
from kit.workers.torch_versions import SINCE, TORCH

from aelastic import InputError, RunResult, Supervisor, WorkerSpec, WorkerState, logs_specs
from aelastic.logs_specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std

pytestmark = pytest.mark.usefixtures("warm_stores")

BOTH = pytest.mark.parametrize("module", ["torch", "ours"], indirect=True)


@pytest.fixture(scope="module")
def torchs() -> Any:
    """torch's own module, the oracle.  Importing it takes seconds, so only tests that compare with it do so."""
    from torch.distributed.elastic import multiprocessing

    return multiprocessing


@pytest.fixture
def module(request: pytest.FixtureRequest) -> Any:
    """torch's module or ours."""
    return logs_specs if request.param == "ours" else request.getfixturevalue("torchs")


def envs(count: int, attempt: int = 0, run_id: str = "job") -> dict[int, dict[str, str]]:
    facts = {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    return {rank: {**facts, "RANK": str(rank)} for rank in range(count)}


def tree(folder: Path) -> set[str]:
    """The content of a folder, with a run's folder named RUN."""
    return {named(folder, path) for path in folder.rglob("*")}


def named(folder: Path, path: object) -> str:
    is_below = str(path).startswith(str(folder))
    return re.sub(r"^job_\w{8}", "RUN", os.path.relpath(str(path), folder)) if is_below else str(path)


def fields_of(dest: Any, torchs: Any) -> dict[str, Any]:
    """Its fields, without those that the installed torch lacks."""
    known = {each.name for each in dataclasses.fields(torchs.LogsDest)}
    return {name: value for name, value in dataclasses.asdict(dest).items() if name in known}


def reified(torchs: Any, module: Any, folder: Path, count: int, **options: Any) -> dict[str, Any]:
    """Return values, attributes and files of a module's `DefaultLogsSpecs`, without the random part of names."""
    folder.mkdir()
    specs, given = module.DefaultLogsSpecs(log_dir=str(folder), **options), envs(count)
    answer = fields_of(specs.reify(given), torchs)
    named_answer = {
        name: {rank: named(folder, path) for rank, path in value.items()}
        if isinstance(value, dict)
        else named(folder, value)
        for name, value in answer.items()
    }
    set_ = {rank: named(folder, env["TORCHELASTIC_ERROR_FILE"]) for rank, env in given.items()}
    return {"answer": named_answer, "set": set_, "tree": tree(folder)}


# Compared with torch.


REDIRECTS: list[Any] = [0, 1, 2, 3, {0: 1, 2: 3, 9: 1}]  # a map may name ranks of larger nodes
TEES: list[Any] = [0, 1, 2, 3, {1: 2, 2: 1}]


@pytest.mark.parametrize("ranks", [None, {0}, {1, 2, 7}, set()], ids=str)
def test_the_answer_is_torchs(tmp_path: Path, torchs: Any, ranks: set[int] | None) -> None:
    def flags(kind: Any, choice: Any) -> Any:
        std = kind.Std
        return {rank: std(each) for rank, each in choice.items()} if isinstance(choice, dict) else std(choice)

    for number, (redirects, tee) in enumerate(itertools.product(REDIRECTS, TEES)):
        folder = tmp_path / str(number)
        folder.mkdir()

        def answer(name: str, module: Any, kind: Any) -> dict[str, Any]:
            chosen = {"redirects": flags(kind, redirects), "tee": flags(kind, tee), "local_ranks_filter": ranks}  # noqa: B023
            return reified(torchs, module, folder / name, 3, **chosen)  # noqa: B023

        theirs, ours = answer("theirs", torchs, torchs), answer("ours", logs_specs, logs_specs)
        mixed = answer("mixed", logs_specs, torchs)
        assert theirs == ours == mixed, (redirects, tee)


def test_dev_null_drops_as_torchs_does(torchs: Any) -> None:
    given = envs(2), envs(2)
    theirs = torchs.DefaultLogsSpecs(log_dir=os.devnull, redirects=torchs.Std.ALL, tee=torchs.Std.ALL).reify(given[0])
    ours = DefaultLogsSpecs(log_dir=os.devnull, redirects=Std.ALL, tee=Std.ALL).reify(given[1])
    assert fields_of(ours, torchs) == fields_of(theirs, torchs)
    assert given[0] == given[1]


@BOTH
def test_attempts_have_folders_of_their_own_and_the_same_one_is_made_again(module: Any, tmp_path: Path) -> None:
    specs = module.DefaultLogsSpecs(log_dir=str(tmp_path), redirects=module.Std.OUT)
    first = specs.reify(envs(1))
    Path(first.stdouts[0]).write_text("old")
    assert specs.reify(envs(1, attempt=1)).stdouts[0] == first.stdouts[0].replace("attempt_0", "attempt_1")
    assert specs.reify(envs(1)) == first
    assert not Path(first.stdouts[0]).exists()


@BOTH
def test_no_workers_and_no_facts_will_do(module: Any, tmp_path: Path) -> None:
    specs = module.DefaultLogsSpecs(log_dir=str(tmp_path))
    assert "attempt_0" in getattr(specs.reify({}), "filtered_stdout", "attempt_0")  # torch 2.8 has none
    assert re.search(r"test_run_id_\w+/attempt_0", specs.reify({0: {}}).error_files[0])


@BOTH
def test_the_log_folder_is_made_or_a_temporary_one(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert module.DefaultLogsSpecs(log_dir=str(tmp_path / "a/b")).root_log_dir == str(tmp_path / "a/b")
    assert (tmp_path / "a/b").is_dir()
    root = Path(module.DefaultLogsSpecs().root_log_dir)
    assert root.is_dir() and root.parent == tmp_path and root.name.startswith("torchelastic_")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"log_dir: .*/file is a file"):
        module.DefaultLogsSpecs(log_dir=str(tmp_path / "file"))


@BOTH
def test_specs_are_equal_by_their_choices(module: Any, tmp_path: Path) -> None:
    def make(**options: Any) -> Any:
        return module.DefaultLogsSpecs(**{"log_dir": str(tmp_path), **options})

    assert make() == make(redirects=module.Std.NONE) != make(tee=module.Std.OUT)
    assert make() != "something else"
    assert make(local_ranks_filter={1}) != make()
    with pytest.raises(TypeError):
        hash(make())
    with pytest.raises(TypeError, match="abstract"):
        module.LogsSpecs()
    assert str(tmp_path) in repr(make()) and "tee=" in repr(make()) and "local_ranks_filter=None" in repr(make())


def test_the_fields_are_torchs(torchs: Any) -> None:
    assert fields_of(LogsDest(), torchs) == fields_of(torchs.LogsDest(), torchs)
    ours, theirs = ([each.name for each in dataclasses.fields(kind)] for kind in (LogsDest, torchs.LogsDest))
    assert ours in (theirs, [*theirs, "filtered_stdout", "filtered_stderr"])
    assert {name: int(value) for name, value in Std.__members__.items()} == {
        name: int(value) for name, value in torchs.Std.__members__.items()
    }


def test_importing_it_pulls_in_no_torch() -> None:
    code = "import aelastic.logs_specs, sys; print('torch' in sys.modules)"
    seen = ran(sys.executable, "-c", code, check=True)
    assert seen.stdout == "False\n"


# Compared with torchrun, on the command line.

WORKER = """
os.write(1, f"out {rank} apple\\npear of {rank}\\n\\nlast of {rank}\\n".encode())
os.write(2, f"err {rank} apple\\n".encode() + b"\\xff bytes of %d\\npear\\n" % rank)
"""


def run_files(folder: Path) -> dict[str, bytes]:
    """Files of the only run in a log folder; filtered lines are sorted, as the order among ranks varies."""
    (root,) = (path for path in folder.iterdir() if not path.is_symlink())
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    files.pop("events.jsonl", None)  # torchrun has none
    return {name: b"\n".join(sorted(text.split(b"\n"))) if "filtered" in name else text for name, text in files.items()}


def teed(text: bytes) -> list[bytes]:
    """The workers' lines, sorted, as the order among ranks varies."""
    return sorted(line for line in text.split(b"\n") if re.search(rb"apple|pear| of |]:$", line))


# `make test` uses fixed paths for torchrun's files (`test_logs.py`), and compares with torch's classes above.
@pytest.mark.all
@pytest.mark.timeout(2 * LAUNCH_TIMEOUT_S)
@pytest.mark.parametrize(
    "options, env",
    [
        (["--redirects=0:0,1:1,2:2,3:3", "--tee=0:1,3:2"], {}),
        (
            [
                *("--redirects=1:3", "--tee=0:3,2:3,3:1", "--local-ranks-filter=0,1,3"),
                *("--duplicate-stdout-filters=apple,last", "--duplicate-stderr-filters=bytes"),
            ],
            {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}/${local_rank} $$ ${unknown}>:"},
        ),
    ],
    ids=["maps", "filters and prefix"],
)
def test_files_and_console_are_those_of_torchrun(launch: Launcher, options: list[str], env: dict[str, str]) -> None:
    if SINCE["duplicate_stdout_filters"] > TORCH and any("filters" in option for option in options):
        pytest.skip("this torch has no filters")
    options = ["--standalone", "--nproc-per-node=4", "--log-dir=logs", *options]
    ours = launch(WORKER, *options, name="ours", env=env)
    assert ours.wait(LAUNCH_TIMEOUT_S) == 0, ours.story
    worker = launch.write("torchrun/worker.py", WORKER)
    folder = worker.parent
    torchrun = subprocess.run(
        [str(Path(sys.executable).with_name("torchrun")), *options, str(worker)],
        cwd=folder,
        env={**os.environ, **env, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        capture_output=True,
        timeout=LAUNCH_TIMEOUT_S,
        check=True,
    )
    theirs = run_files(folder / "logs")
    assert run_files(ours.folder / "logs") == {**theirs, **dict(decoded(theirs))}
    for mine, text in (("stdout", torchrun.stdout), ("stderr", torchrun.stderr)):
        whole = text.replace(b"\xef\xbf\xbd", b"\xff")  # torchrun decodes, with replacement characters
        assert teed((ours.folder / mine).read_bytes()) == teed(whole)


def decoded(files: Mapping[str, bytes]) -> list[tuple[str, bytes]]:
    return [(name, text.replace(b"\xef\xbf\xbd", b"\xff")) for name, text in files.items() if "filtered" in name]


# Custom objects.


run = partial(run_on, "uvloop")


def python(code: str, **spec: Any) -> WorkerSpec:
    preamble = "import os, sys, time\nrank = int(os.environ['RANK'])\n"
    return WorkerSpec(**{"entrypoint": sys.executable, "args": ("-c", preamble + code), "max_restarts": 0, **spec})


class Answers:
    """A user's own `LogsSpecs`: no base class, and answers of any shape."""

    def __init__(self, answer: Callable[[dict[int, dict[str, str]]], Any]) -> None:
        self.answer = answer
        self.calls: list[dict[int, dict[str, str]]] = []

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        self.calls.append({rank: dict(env) for rank, env in envs.items()})
        return self.answer(envs)

    @property
    def root_log_dir(self) -> str:
        return ""


def answers(**fields: Any) -> Answers:
    return Answers(lambda _: SimpleNamespace(**{"stdouts": {}, "stderrs": {}, **fields}))


@BOTH
def test_default_specs_of_either_kind_lead_the_output_and_are_asked_once_for_each_attempt(
    module: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    specs = module.DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=module.Std.ERR, tee={1: module.Std.OUT})
    code = (
        "print('out', rank, flush=True)\n"
        "print('err', rank, file=sys.stderr)\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        f"path = {str(tmp_path)!r} + '/has_written_' + attempt\n"
        "open(path + str(rank), 'w').close()\n"
        "while not os.path.exists(path + str(1 - rank)): time.sleep(0.01)\n"
        "sys.exit(attempt == '0')"
    )
    result = run(Supervisor(python(code, local_world_size=2, logs_specs=specs, max_restarts=1, run_id="job")).run())
    assert result.state is WorkerState.SUCCEEDED
    (root,) = (tmp_path / "logs").iterdir()
    assert {str(path.relative_to(root)): path.read_text() for path in root.rglob("*.log")} == {
        f"attempt_{attempt}/{rank}/{name}.log": f"{name[3:]} {rank}\n"
        for attempt in (0, 1)
        for rank, name in ((0, "stderr"), (1, "stderr"), (1, "stdout"))
    }
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["[default1]:out 1"] * 2 + ["out 0"] * 2
    assert not captured.err


def fails(specs: Any, **spec: Any) -> RunResult:
    worker = WorkerSpec(entrypoint=entrypoints.raise_deeply, max_restarts=0, logs_specs=specs, **spec)
    return run(Supervisor(worker).run())


@BOTH
def test_error_files_are_read_where_the_specs_put_them(module: Any, tmp_path: Path) -> None:
    result = fails(module.DefaultLogsSpecs(log_dir=str(tmp_path)))
    (error_file,) = tmp_path.rglob("error.json")
    assert "no batch left" in error_file.read_text()
    assert (result.failures[0].error_file, "no batch left" in result.failures[0].message) == (str(error_file), True)


def test_every_path_is_honoured_and_specs_see_complete_environments_without_the_agents_own_error_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    specs = answers(
        stdouts={0: str(tmp_path / "0.out"), 1: "", 2: os.devnull},
        stderrs={0: str(tmp_path / "all.err"), 1: tmp_path / "all.err"},
        tee_stderrs={1: str(tmp_path / "all.err")},
        tee_stdouts={0: str(tmp_path / "0.out"), 2: os.devnull},
        filtered_stdout=str(tmp_path / "chosen"),
    )
    code = (
        "os.write(1, b'out %d\\n' % rank)\nos.write(2, b'err %d\\n' % rank)\n"
        "sys.exit(os.environ['TORCHELASTIC_ERROR_FILE'] in {'', '/the/agents/own'})"
    )
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": "/the/agents/own"}
    spec = python(code, local_world_size=3, logs_specs=specs, duplicate_stdout_filters=("out",), env=env, role="r")
    assert run(Supervisor(spec).run()).state is WorkerState.SUCCEEDED
    assert sorted((tmp_path / "all.err").read_text().splitlines()) == ["err 0", "err 1"]
    assert (tmp_path / "0.out").read_text() == "out 0\n"
    assert (tmp_path / "chosen").read_text() == "[r0]:out 0\n"
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["[r0]:out 0", "out 1"]
    assert sorted(captured.err.splitlines()) == ["[r1]:err 0", "[r1]:err 1", "err 2"]
    (seen,) = specs.calls
    names = ("RANK", "LOCAL_RANK", "ROLE_NAME")
    assert [tuple(env[name] for name in names) for env in seen.values()] == [(str(n), str(n), "r") for n in range(3)]
    assert "MASTER_PORT" in seen[0] and "TORCHELASTIC_ERROR_FILE" not in seen[0]


def test_a_line_whose_prefix_names_the_host_and_the_process_is_shown_while_the_worker_runs(launch: Launcher) -> None:
    job = launch(
        "os.write(1, b'pid %d\\n' % os.getpid())\nwait_for('go')",
        *("--nproc-per-node=2", "--tee=1", "--log-dir=logs", "--duplicate-stdout-filters=pid"),
        env={"PET_LOG_LINE_PREFIX_TEMPLATE": "${hostname}:${rank}/${pid} $pid ${unknown}: "},
    )
    wait_for("both lines", lambda: len(job.lines) == 2)
    pids = [line.rpartition(" ")[2] for line in sorted(job.lines)]
    host = os.uname().nodename
    assert sorted(job.lines) == [f"{host}:{n}/{pid} {pid} ${{unknown}}: pid {pid}" for n, pid in enumerate(pids)]
    job.go()
    job.assert_ends()
    (filtered,) = job.folder.glob("logs/latest/*/filtered_stdout.log")
    assert sorted(filtered.read_text().splitlines()) == sorted(job.lines)


def test_files_that_serve_every_attempt_are_added_to_and_shown_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "output"
    path.write_text("of an earlier run\n")
    specs = answers(stdouts={0: str(path)}, tee_stdouts={0: str(path)})
    code = "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', attempt)\nsys.exit(attempt != '2')"
    assert run(Supervisor(python(code, logs_specs=specs, max_restarts=2)).run()).state is WorkerState.SUCCEEDED
    assert path.read_text() == "of an earlier run\nattempt 0\nattempt 1\nattempt 2\n"
    assert capfd.readouterr().out == "".join(f"[default0]:attempt {number}\n" for number in range(3))


@pytest.mark.parametrize(
    "error_files",
    [
        pytest.param({}, id="none", marks=pytest.mark.all),
        pytest.param({0: os.devnull, 1: os.devnull}, id="dev null"),
        pytest.param(None, id="missing"),
    ],
)
def test_a_cause_is_found_where_the_specs_keep_no_error_files(error_files: Any) -> None:
    specs = answers(error_files=error_files, stderrs={0: os.devnull, 1: os.devnull})
    result = fails(specs, local_world_size=2)
    assert result.failures and all("no batch left" in failure.message for failure in result.failures.values())


def test_return_values_do_not_meet_where_error_files_share_a_folder(tmp_path: Path) -> None:
    specs = answers(error_files={rank: str(tmp_path / f"{rank}.json") for rank in range(3)})
    worker = WorkerSpec(entrypoint=entrypoints.rank_squared, logs_specs=specs, local_world_size=3)
    assert run(Supervisor(worker).run()).return_values == {0: 0, 1: 1, 2: 4}
    assert not list(tmp_path.iterdir())


def test_specs_that_take_their_time_do_not_hold_up_the_loop() -> None:
    may_answer = threading.Event()
    specs = Answers(lambda _: LogsDest() if may_answer.wait(DEADLINE_S) else None)

    async def main() -> RunResult:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(Supervisor(python("", logs_specs=specs)).run())
            async with asyncio.timeout(DEADLINE_S):
                while not specs.calls:  # noqa: ASYNC110  a thread calls them
                    await asyncio.sleep(0)
            await asyncio.sleep(0)  # the loop runs while they take their time
            may_answer.set()
        return task.result()

    assert run(main()).state is WorkerState.SUCCEEDED


def refuse(_: object) -> None:
    raise KeyError("no such attempt")


@pytest.mark.parametrize(
    "specs, problem",
    [
        ("a string", "logs_specs is 'a string': pass an object with torch's `reify"),
        (DefaultLogsSpecs, "logs_specs is <class .*DefaultLogsSpecs'>: pass an object"),
        (Answers(refuse), "logs_specs: Answers.reify failed: KeyError: 'no such attempt'"),
        (Answers(lambda _: None), "logs_specs: Answers.reify returned None, which is not a LogsDest"),
        (answers(stdouts=[""]), r"returned stdouts=\[''\], which is not a dict of paths by local rank"),
        (answers(stderrs={0: 3}), r"returned stderrs\[0\]=3, which is not a path"),
        (answers(error_files={0: "a\0b"}), r"error_files\[0\]='a\\x00b', which is not a path"),
        (answers(tee_stdouts={1: ""}), "returned tee_stdouts for local rank 1: ranks here are 0 to 0"),
        (
            answers(stdouts={0: "/proc/nobody/writes"}, filtered_stdout="/dev/null"),
            "logs_specs: /proc/nobody/writes cannot be written .*; choose another path",
        ),
        (answers(stdouts={0: "/proc"}, filtered_stdout="/dev/null"), r"logs_specs: /proc cannot be written \(Is a dir"),
        (answers(filtered_stdout=""), "logs_specs: reify returned no filtered_stdout"),
        (answers(filtered_stdout="/proc/nobody"), "logs_specs: /proc/nobody cannot be written"),
        (answers(filtered_stdout=3), "returned filtered_stdout=3, which is not a path"),
    ],
)
def test_objects_that_will_not_do_are_refused_in_one_sentence(specs: Any, problem: str, tmp_path: Path) -> None:
    spec = python("open(sys.argv[1], 'w')", logs_specs=specs, duplicate_stdout_filters=("x",))
    with pytest.raises(InputError, match=problem) as caught:
        run(Supervisor(dataclasses.replace(spec, args=(*spec.args, str(tmp_path / "started")))).run())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "started").exists()


def test_a_subclass_of_our_own_will_do(tmp_path: Path) -> None:
    class Mine(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            return LogsDest(stdouts={rank: str(tmp_path / f"{env['RANK']}.log") for rank, env in envs.items()})

        @property
        def root_log_dir(self) -> str:
            return str(tmp_path)

    result = run(Supervisor(python("print(rank)", local_world_size=2, logs_specs=Mine())).run())
    assert result.state is WorkerState.SUCCEEDED
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0.log": "0\n", "1.log": "1\n"}
