"""Workers run on the CPUs near their GPU and on no others; the agent's own CPUs don't change."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from kit.launching import Launcher, alive, ran
from kit.launching import run as run_on
from kit.waiting import DEADLINE_S, wait_for
from kit.workers import entrypoints
from kit.workers.machines import Cpu, Machine, write_torch

from aelastic import InputError, RunResult, Supervisor, WorkerSpec, WorkerState
from aelastic.compat.launcher.launch_config import LaunchConfig, worker_spec
from aelastic.procs import NOT_EXECUTABLE
from aelastic.workers import topology

CPUS = sorted(os.sched_getaffinity(0))
# No machine has this CPU, so the kernel refuses.
NO_CPU = 1023

PRINT_CPUS = "import os; print(*sorted(os.sched_getaffinity(0)), file=open('cpus' + os.environ['RANK'], 'w'))"

pytestmark = [
    pytest.mark.usefixtures("warm_stores"),
    pytest.mark.skipif(len(CPUS) < 2, reason="with one CPU there is no choice"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks that after each test, all threads of this process may still run on all CPUs."""
    monkeypatch.chdir(tmp_path)
    before = threads_of_this_process()
    yield
    assert threads_of_this_process() <= before == {tuple(CPUS)}


def threads_of_this_process() -> set[tuple[int, ...]]:
    found = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            found.add(tuple(sorted(os.sched_getaffinity(int(thread)))))
        except ProcessLookupError:
            pass  # it has ended
    return found


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Makes each of this machine's first two CPUs look like a NUMA node with a GPU; GPU 0 is near the second one.

    Returns the environment in which torch sees them.
    """
    first, second = CPUS[:2]
    fake = Machine((Cpu(first, 0, 0, 0, 0), Cpu(second, 1, 1, 1, 1)), (1, 0))
    monkeypatch.setattr(topology, "SYSFS", fake.write(tmp_path / "sys"))
    return environ(write_torch(tmp_path / "fake", fake.gpus))


def environ(python_path: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path}


def run(spec: WorkerSpec) -> RunResult:
    return run_on("uvloop", Supervisor(spec).run())


def workers(env: Mapping[str, str], **given: Any) -> WorkerSpec:
    usual = {"entrypoint": sys.executable, "args": ("-c", PRINT_CPUS), "max_restarts": 0, "numa_binding": "node"}
    return WorkerSpec(**{**usual, "env": env, **given})


def cpus_written(folder: Path, *ranks: int) -> list[list[int]]:
    return [[int(cpu) for cpu in (folder / f"cpus{rank}").read_text().split()] for rank in ranks]


def test_programs_run_on_the_cpus_near_their_gpu_also_when_they_start_again_and_get_another_local_rank(
    tmp_path: Path, two_nodes: dict[str, str]
) -> None:
    code = f"{PRINT_CPUS}; import sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    spec = workers(
        two_nodes, args=("-c", code), local_world_size=2, max_restarts=1, restart_policy="*: restart",
        numa_binding="core-complex", virtual_local_rank=True,
    )  # fmt: skip
    assert run(spec).state is WorkerState.SUCCEEDED
    assert cpus_written(tmp_path, 0, 1) == [[CPUS[1]], [CPUS[0]]]


@pytest.mark.parametrize("method", ["spawn", "fork", pytest.param("forkserver", marks=pytest.mark.all)])
def test_functions_run_on_the_cpus_near_their_gpu(two_nodes: dict[str, str], method: str) -> None:
    spec = workers(two_nodes, entrypoint=entrypoints.allowed_cpus, args=(), local_world_size=2, start_method=method)
    result = run(spec)
    assert result.return_values == {0: [CPUS[1]], 1: [CPUS[0]]}, result
    # Nothing affects the next worker, even one of the same fork server.
    spec = workers(two_nodes, entrypoint=entrypoints.allowed_cpus, args=(), start_method=method, numa_binding=None)
    assert run(spec).return_values == {0: CPUS}


@pytest.mark.parametrize("workers, code", [(1, 0), (2, 2)])
def test_an_agent_that_is_bound_itself_leaves_its_workers_no_more(
    launch: Launcher, tmp_path: Path, two_nodes: dict[str, str], workers: int, code: int
) -> None:
    agent = f"""
        import os
        from pathlib import Path
        from aelastic.workers import topology
        topology.SYSFS = Path({str(tmp_path / "sys")!r})
        os.sched_setaffinity(0, {CPUS[1:2]})
    """
    env = {"PYTHONPATH": two_nodes["PYTHONPATH"]}
    job = launch(
        "say(*os.sched_getaffinity(0))", "--numa-binding=node", f"--nproc-per-node={workers}", wrapper=agent, env=env
    )
    assert job.wait() == code
    assert job.lines == ([str(CPUS[1])] if code == 0 else [])
    assert code == 0 or f"may not use any CPU of NUMA node 0 ({CPUS[0]}), only {CPUS[1]}" in job.stderr


def test_threads_that_a_library_has_started_are_bound_with_the_process() -> None:
    code = f"""
import os, threading
from aelastic.workers.affinity import bind_process

def stay(cpus):
    os.sched_setaffinity(0, cpus)
    ready.wait()
    over.wait()

ready, over = threading.Barrier(3), threading.Event()
common, own = [threading.Thread(target=stay, args=(cpus,)) for cpus in ({CPUS[:2]}, {CPUS[1:2]})]
os.sched_setaffinity(0, {CPUS[:2]})
common.start(), own.start()
ready.wait()
bind_process(frozenset({CPUS[:1]}))
print([sorted(os.sched_getaffinity(thread)) for thread in (0, common.native_id, own.native_id)])
over.set()
"""
    done = ran(sys.executable, "-c", code, check=True)
    assert done.stdout.strip() == str([CPUS[:1], CPUS[:1], CPUS[1:2]])


# Failures.


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPUs that were chosen are taken away before the workers start."""

    async def found(*_: Any, **__: Any) -> dict[int, frozenset[int]]:
        return {0: frozenset({NO_CPU})}

    monkeypatch.setattr(topology, "cpus_of_workers", found)


@pytest.mark.usefixtures("refused")
def test_a_worker_whose_cpus_the_kernel_refuses_fails_with_the_reason(tmp_path: Path) -> None:
    program = run(workers(os.environ)).failures[0]
    assert program.exitcode == NOT_EXECUTABLE and not (tmp_path / "cpus0").exists()
    function = run(workers(os.environ, entrypoint=entrypoints.allowed_cpus, args=(), start_method="fork")).failures[0]
    assert "aelastic" not in function.traceback
    for failure in (program, function):
        assert f"may not run on CPUs {NO_CPU}: Invalid argument" in failure.message


def test_fewer_gpus_than_workers_are_refused_before_any_worker_starts(
    tmp_path: Path, two_nodes: dict[str, str]
) -> None:
    with pytest.raises(InputError, match="torch sees 2 GPUs, so local rank 2 has none"):
        run(workers(two_nodes, local_world_size=3))
    assert not list(tmp_path.glob("cpus*"))


def test_asked_to_fall_back_workers_without_an_answer_run_anywhere(
    tmp_path: Path, two_nodes: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "aelastic"):
        run(workers(two_nodes, local_world_size=3, numa_fall_back=True))
    assert cpus_written(tmp_path, 0, 1, 2) == [[CPUS[1]], [CPUS[0]], CPUS]
    [warning] = [record.getMessage() for record in caplog.records if "numa" in record.getMessage()]
    assert warning.startswith("local rank 2 is not bound to CPUs: numa_binding is 'node', but torch sees 2 GPUs")


@pytest.mark.parametrize(
    "gpus, before, words",
    [
        ([], "raise OSError('libcuda.so is broken')", "OSError: libcuda.so is broken"),
        (["?"], "", "the kernel does not report the NUMA node of GPU 0"),  # an accelerator that is not on the bus
    ],
)
def test_asked_to_fall_back_workers_run_where_there_is_no_answer_at_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gpus: list[str], before: str, words: str
) -> None:
    with caplog.at_level(logging.WARNING, "aelastic"):
        run(workers(environ(write_torch(tmp_path / "fake", gpus, before)), numa_fall_back=True))
    assert cpus_written(tmp_path, 0) == [CPUS]
    assert "not bound to CPUs" in caplog.text.replace("no worker is bound", "not bound") and words in caplog.text


def test_torchs_options_decide_whether_to_fall_back() -> None:
    binding = pytest.importorskip("torch.numa.binding")
    for fall_back in (False, True):
        options = binding.NumaOptions(binding.AffinityMode.SOCKET, should_fall_back_if_binding_fails=fall_back)
        config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", rdzv_endpoint="localhost:0", numa_options=options)
        spec = worker_spec(config, "true", [], os.environ)
        assert (spec.numa_binding, spec.numa_fall_back) == ("socket", fall_back)


NO_WORD = "torch cannot tell where the GPUs are (no reason given)"


@pytest.mark.parametrize("before, words", [("", "torch sees no GPU"), ("import os; os._exit(3)", NO_WORD)])
def test_without_gpus_the_command_line_reports_it_and_starts_nothing(
    launch: Launcher, tmp_path: Path, before: str, words: str
) -> None:
    path = write_torch(tmp_path / "fake", [], before)
    job = launch("say('started')", "--numa-binding=exclusive", env={"PYTHONPATH": path})
    job.assert_ends(2)
    assert not job.stdout
    [line] = job.stderr.splitlines()
    assert line.startswith("aelastic: error: numa_binding is ") and words in line


SLOW = (
    "import os, time; open('asked.new', 'w').write(str(os.getpid())); os.rename('asked.new', 'asked'); time.sleep(600)"
)


async def asked_pid(folder: Path) -> int:
    """Waits for the process that queries torch."""
    return await asyncio.to_thread(
        wait_for, "torch is asked", lambda: (folder / "asked").exists() and int((folder / "asked").read_text())
    )


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_neither_a_stop_nor_a_cancellation_waits_for_torchs_answer(tmp_path: Path, is_cancelled: bool) -> None:
    supervisor = Supervisor(workers(environ(write_torch(tmp_path / "fake", [], before=SLOW))))

    async def main() -> None:
        running = asyncio.ensure_future(supervisor.run())
        pid = await asked_pid(tmp_path)
        running.cancel() if is_cancelled else supervisor.stop()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(asyncio.CancelledError) if is_cancelled else nullcontext():
                assert (await running).state is WorkerState.STOPPED
        await asyncio.to_thread(wait_for, "its end", lambda: not alive(pid))

    run_on("asyncio", main())
    assert not (tmp_path / "cpus0").exists()


def test_torch_that_never_answers_is_waited_for_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_ASK_TIMEOUT_S", 0.2)
    env = environ(write_torch(tmp_path / "fake", [], before="import time; time.sleep(600)"))
    with pytest.raises(InputError, match=r"torch did not answer in 0\.2 s"):
        run(workers(env))


def test_a_job_that_is_not_bound_asks_no_driver(tmp_path: Path) -> None:
    env = environ(write_torch(tmp_path / "fake", [], before="open('asked', 'w')"))
    assert run(workers(env, numa_binding=None)).state is WorkerState.SUCCEEDED
    assert not (tmp_path / "asked").exists()


def test_finding_the_gpus_does_not_import_torch_here(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys\n"
        "from aelastic.workers import topology\n"
        "try: asyncio.run(topology.cpus_of_workers('node', 1, os.environ))\n"
        "except ValueError as error: print('sees no GPU' in str(error), 'torch' in sys.modules)\n"
    )
    env = environ(write_torch(tmp_path / "fake", []))
    done = ran(sys.executable, "-c", code, env=env, check=True)
    assert done.stdout == "True False\n"
