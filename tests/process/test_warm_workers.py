"""Workers forked by a fork server: the same as cold ones, and no start is ever lost."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from kit.effort import EFFORT
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher, cmdline, run, stand_still
from kit.waiting import wait_for
from kit.workers import entrypoints

from aelastic import Supervisor, WorkerSpec, WorkerState
from aelastic.base.host import proc_table
from aelastic.base.host.usage import usage_of
from aelastic.workers.forkserver.command import PythonCommand
from aelastic.workers.forkserver.server_process import ServerProcess

KIT = Path(__file__).parents[1] / "kit" / "workers"
SERVER = "workers/forkserver/program.py"
# Nothing else imports it: a worker that has it without importing it is warm.
MODULE = "colorsys"
IS_WARM = f"""
is_warm = {MODULE!r} in sys.modules
say("up", rank, restart, is_warm)
"""
# Libraries that have no random number generator to reseed, and do nothing else that causes a warning.
PLAIN = "decimal,multiprocessing,random,tempfile,uuid,numpy,numpy.random"
DESCRIBE = f"""
import {PLAIN}
sys.path.append({str(KIT)!r})
import self_description
self_description.print_description()
"""


# The same worker.

# Named after a job, or random for each run.
OF_A_RUN = (
    "AELASTIC_IN_PLACE",
    "AELASTIC_NOTICE_PAGE",
    "AELASTIC_ROUND",
    "MASTER_PORT",
    "TORCH_WORKER_SERVER_SOCKET",
    "TMPDIR",
    "LAUNCHED_BY_TEST",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
)


def described_by(job: Job) -> list[dict[str, Any]]:
    job.assert_ends()
    assert " W " not in job.stderr, job.stderr
    text = re.sub(r" at 0x[0-9a-f]+", "", job.stdout.replace(str(job.folder), "JOB"))
    workers = sorted((json.loads(line) for line in text.splitlines()), key=lambda one: one["env"]["RANK"])
    for worker in workers:
        for name in OF_A_RUN:
            worker["env"].pop(name, None)
        worker["environ"] = [entry for entry in worker["environ"] if not entry.startswith(OF_A_RUN)]
    return workers


# In the agent, before it starts workers: an embedding program may change these after the fork server has started.
MOVES = """
import os
from aelastic.agent.generation import Generation
usual = Generation._worker_env

def move(self, *args):
    os.umask(0o027)
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere" if os.path.basename(os.getcwd()) != "elsewhere" else ".")
    return usual(self, *args)

Generation._worker_env = move
"""


@pytest.mark.parametrize("how", ["script", pytest.param("module", marks=pytest.mark.all), "folder"])
def test_a_warm_worker_is_a_cold_one_item_by_item(launch: Launcher, how: str) -> None:
    jobs = []
    for name, more in (("cold", []), ("warm", ["--preload", PLAIN])):
        script = launch.write(f"{name}/{'app/__main__' if how == 'folder' else 'worker'}.py", DESCRIBE)
        what = {"module": ["-m", "worker"], "folder": ["app"]}.get(how, [str(script), "--lr", "0.1"])
        options = ["--nproc-per-node", "2", *more, *what]
        env = {"PYTHONFAULTHANDLER": "1", "PYTHONHASHSEED": "7", **({"PYTHONSAFEPATH": "1"} if how == "script" else {})}
        jobs.append(launch.command(*options, name=name, env=env, wrapper=MOVES if how == "script" else ""))
    colds, warms = map(described_by, jobs)
    assert [name for name, own in warms[0]["own"].items() if own == warms[1]["own"][name]] == ["parent", "hash"]
    for cold, warm in zip(colds, warms, strict=True):
        own, others = cold.pop("own"), warm.pop("own")
        assert [name for name in own if own[name] == others[name]] == ["hash"]
        assert {item: value for item, value in warm.items() if value != cold[item]} == {
            item: value for item, value in cold.items() if value != warm[item]
        }


FAILS = {
    "an exception": "raise ValueError('bad')",
    "an exception in a function": "def f():\n    raise ValueError('bad')\nf()",
    "a syntax error": "x = (",
    "an exit code": "sys.exit(3)",
    "an exit message": "sys.exit('no data')",
    "an interrupt": "import atexit, threading; atexit.register(lambda: say('bye'))\nthreading.Timer(0.2, say, ['later']).start(); raise KeyboardInterrupt",
    "a hard exit": "os._exit(9)",
    "a signal": "os.kill(os.getpid(), signal.SIGKILL)",
    "a hook": "sys.excepthook = lambda *_: say(sys.last_type, sys.last_value, sys.last_traceback.tb_lineno); raise ValueError('bad')",
    "a hook that fails": "def hook(*_):\n    1 / 0\nsys.excepthook = hook\nraise ValueError('bad')",
}
SUCCEEDS = {
    "no exit code": "sys.exit()",
    "a thread that goes on": "import threading; threading.Timer(0.2, say, ['later']).start()",
    "what is written at exit": "import atexit; atexit.register(lambda: say('bye')); print('buffered', end='')",
    "a source that pickle and inspect find": """
import inspect, pickle
class Point:
    pass
assert type(pickle.loads(pickle.dumps(Point()))) is Point
say(inspect.getsource(Point), inspect.getsourcefile(Point) == __file__)
""",
    "children of multiprocessing": """
import multiprocessing
def child(queue):
    queue.put(__name__)
if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        say(queue.get(), process.join(), process.exitcode)
""",
}
# In the agent: each generation runs the next script.
NEXT_SCRIPT = """
import os
from aelastic.agent.generation import Generation
usual, numbers = Generation._worker_env, iter(range(100))

def next_script(self, *args):
    if os.path.exists(script := f"script{next(numbers)}.py"):
        os.replace(script, "worker.py")
    return usual(self, *args)

Generation._worker_env = next_script
"""


def ends_of(job: Job, code: int) -> dict[str, Any]:
    """How workers ended, and all of their output."""
    job.assert_ends(code)
    root = job.folder / "logs" / "latest"
    texts = {
        str(path.relative_to(root)): path.read_text().replace(str(job.folder), "JOB") for path in root.rglob("*.log")
    }
    failures = re.findall(r" W rank 0 failed on \S+: (.*)", job.stderr.replace(str(job.folder), "JOB"))
    return {**texts, "failures": failures}


@pytest.mark.parametrize(
    "ends", [pytest.param(FAILS, id="fails"), pytest.param(SUCCEEDS, id="succeeds", marks=pytest.mark.all)]
)
def test_a_warm_worker_ends_as_a_cold_one_does(launch: Launcher, ends: dict[str, str]) -> None:
    by_rank = "\n".join(f"if rank == {n}:\n{textwrap.indent(code, '    ')}" for n, code in enumerate(SUCCEEDS.values()))
    found = []
    for name, more in (("cold", []), ("warm", ["--preload", MODULE])):
        how = ["--nproc-per-node", str(len(SUCCEEDS))]
        if ends is FAILS:  # one after the other, since the first failure ends the others
            how = ["--max-restarts", str(len(FAILS) - 1), "--restart-policy=*: restart"]
            for number, code in enumerate(FAILS.values()):
                launch.write(f"{name}/script{number}.py", code)
        job = launch(by_rank, "--redirects=3", "--log-dir=logs", *how, *more, name=name, wrapper=NEXT_SCRIPT)
        found.append(ends_of(job, 1 if ends is FAILS else 0))
    assert found[0] == found[1]
    assert len(found[0]) == 2 * len(ends) + 1 and len(found[0]["failures"]) == (len(FAILS) if ends is FAILS else 0)


# Each generation changes something for the next one.
CHANGES = f"""
is_warm = {MODULE!r} in sys.modules
import {MODULE}
say("up", restart, is_warm, hasattr({MODULE}, "own"))
say("first")
if restart == 0:
    text = open(__file__).read()
    open(__file__, "w").write(text.replace("fir" + "st", "second"))
if restart == 1:
    open("{MODULE}.py", "w").write("own = True")
if restart == 2:
    os.rename("{MODULE}.py", "{MODULE}/__init__.py")
if restart == 3:
    os.unlink("{MODULE}/__init__.py")
    os.unlink(__file__)
sys.exit(1)
"""


def test_a_warm_worker_that_is_code_on_the_command_line_prints_the_traceback_and_the_loader_of_a_cold_one(
    launch: Launcher,
) -> None:
    code = f"import sys\nprint({MODULE!r} in sys.modules, file=sys.stderr)\ndef f():\n    raise ValueError(__loader__)\nf()"
    tracebacks = []
    for name, more in (("cold", []), ("warm", ["--preload", MODULE])):
        options = ["--max-restarts=0", "--redirects=3", "--log-dir=logs", *more, "--no-python", sys.executable]
        job = launch.command(*options, "-c", code, name=name)
        job.assert_ends(1)
        (stderr,) = (job.folder / "logs" / "latest").resolve().rglob("stderr.log")
        is_warm, _, traceback = stderr.read_text().partition("\n")
        assert is_warm == str(name == "warm"), job.story
        tracebacks.append(traceback)
    assert tracebacks[0] == tracebacks[1]


async def test_a_signal_that_comes_while_it_is_launched_ends_it() -> None:
    command = PythonCommand(sys.executable, (), "code", "import time; time.sleep(600)", ("-c",))
    server = ServerProcess(command, os.environ, (), is_learned=False)
    server.start((), is_beside_workers=False)
    try:
        worker = server.fork()
        await worker.prepare(command, os.environ)
        os.kill(worker.pid, signal.SIGTERM)  # as early as possible: the agent knows the pid once the worker is launched
        with suppress(OSError):
            worker.launch(command, {number: number for number in (0, 1, 2)})
        _, status = await anyio.to_thread.run_sync(os.waitpid, worker.pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        worker.let_go()
    finally:
        await server.take_status(is_importing=False)
        server.close()


def test_each_restart_finds_the_files_as_they_are_then(launch: Launcher) -> None:
    """An edited script, a user's module that shadows a preloaded one, a deleted script."""
    launch.write(f"job/{MODULE}/data.txt", "a folder that is no module", preamble="")
    job = launch(CHANGES, "--preload", MODULE, "--max-restarts=4")
    job.assert_ends(2)
    assert job.lines == [
        *("up 0 True False", "first"),
        *("up 1 True False", "second"),
        *("up 2 False True", "second"),
        *("up 3 False True", "second"),
    ]
    assert job.stderr.count("shadows the preloaded module colorsys; worker 0 starts cold") == 2
    assert f"python: can't open file {str(job.folder / 'worker.py')!r}: [Errno 2]" in job.stderr


MORE_BYTES = 1 << 20  # more than a pipe holds: the process reads its arguments while the agent writes them


def test_functions_start_warm_too() -> None:
    args = (MODULE, bytes(MORE_BYTES))
    spec = WorkerSpec(
        entrypoint=entrypoints.describe_the_second_time,
        args=args,
        local_world_size=3,
        max_restarts=1,
        preload=(MODULE,),
    )
    result = run("uvloop", Supervisor(spec).run())
    assert result.state is WorkerState.SUCCEEDED
    assert result.return_values == {rank: (rank, True, MORE_BYTES) for rank in range(3)}


def test_a_script_in_a_child_of_multiprocessing_starts_warm_too(launch: Launcher) -> None:
    job = launch(IS_WARM, "--run-path", "--preload", MODULE)
    assert job.wait() == 0, job.story
    assert job.lines == ["up 0 0 True"]


# Inherited state.

# A mutex in a file that both generations map; the first one is killed while it holds the mutex.
HOLDS_A_LOCK = """
import ctypes, mmap

EOWNERDEAD, ETIMEDOUT, PTHREAD_MUTEX_ROBUST, PTHREAD_PROCESS_SHARED = 130, 110, 1, 1
c = ctypes.CDLL(None)
file = open("mutex", "a+b")
file.truncate(4096)
memory = mmap.mmap(file.fileno(), 4096)
mutex = ctypes.byref(ctypes.c_char.from_buffer(memory))
if restart == 0:
    attributes = ctypes.create_string_buffer(64)
    c.pthread_mutexattr_init(attributes)
    c.pthread_mutexattr_setrobust(attributes, PTHREAD_MUTEX_ROBUST)
    c.pthread_mutexattr_setpshared(attributes, PTHREAD_PROCESS_SHARED)
    assert c.pthread_mutex_init(mutex, attributes) == 0
    assert c.pthread_mutex_lock(mutex) == 0
    os.kill(os.getpid(), signal.SIGKILL)
code = c.pthread_mutex_trylock(mutex)
say({EOWNERDEAD: "its owner is dead", 16: "it is locked"}.get(code, code))
"""


@pytest.mark.parametrize("preload", [pytest.param("off", marks=pytest.mark.all), MODULE])
def test_a_robust_mutex_of_a_killed_worker_goes_to_the_next_one(launch: Launcher, preload: str) -> None:
    job = launch(HOLDS_A_LOCK, "--preload", preload, "--max-restarts", "1")
    assert job.wait() == 0, job.story
    assert job.lines == ["its owner is dead"]


# The view from outside.

STARTS = """
import socket
port = int(os.environ["MASTER_PORT"])
server = socket.create_server(("127.0.0.1", port)) if rank == 0 else None
wait_for(f"prints{restart}")
say("up")
wait_for(f"joins{restart}")
store = socket.create_connection(("127.0.0.1", port))
say("joined")
wait_for(f"go{restart}")
sys.exit(1 if restart == 0 else 0)
"""


def logged(job: Job, kind: str) -> list[dict[str, Any]]:
    """The records of one kind in the job's event log."""
    lines = [line for path in job.folder.glob("logs/latest/events.jsonl") for line in path.read_text().splitlines(True)]
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if record["event"] == kind]


def wait_logged(job: Job, kind: str, count: int) -> None:
    wait_for(f"{count} x {kind}", lambda: len(logged(job, kind)) == count)


@pytest.mark.all
@pytest.mark.parametrize("kind", ["cold", pytest.param("warm", marks=pytest.mark.ci)])
def test_how_far_a_start_has_come_is_reported_as_it_is_seen(launch: Launcher, kind: str) -> None:
    options = ["--preload", MODULE] if kind == "warm" else []
    wrapper = (
        "from aelastic.agent.watches import start\nfrom aelastic.workers.forkserver import fork_server\n"
        "start.START_IDLE_S = 600.0\nfork_server.MEASURE_DELAY_S = fork_server.MEASURE_INTERVAL_S = 0.1\n"
    )
    job = launch(
        STARTS, "--nproc-per-node", "4", "--max-restarts", "1", "--log-dir", "logs", "--redirects", "3", *options,
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, wrapper=wrapper,
    )  # fmt: skip
    expected: list[tuple[int, int, str, str]] = []
    for number in range(2):
        for step, phase in (("prints", "output"), ("joins", "process_group")):
            (job.folder / f"{step}{number}").touch()
            expected += [(number + 1, local_rank, kind, phase) for local_rank in range(4)]
            wait_logged(job, "worker_reached", len(expected))
        if kind == "warm":
            wait_for(
                "four are parked", lambda: [each["parked"] for each in logged(job, "fork_server_measured")][-1:] == [4]
            )
        assert [[each["kind"] for each in start["workers"]] for start in logged(job, "workers_started")][number] == [
            kind
        ] * 4
        if kind == "warm":
            # The processes parked for the next start use less memory than one and a half workers.
            alone = max(rss_bytes(each["id"]) for each in logged(job, "workers_started")[-1]["workers"])
            assert 0 < logged(job, "fork_server_measured")[-1]["pss_bytes"] <= 1.4 * alone
        restart(job, number)
    assert job.wait() == 0, job.story
    reached = logged(job, "worker_reached")
    assert sorted((each["generation"], each["local_rank"], each["kind"], each["phase"]) for each in reached) == sorted(
        expected
    )


def rss_bytes(pid: int) -> int:
    usage = usage_of(pid)
    return 0 if usage is None else usage.rss_bytes


# Effects of modules.

# By the start of the warning about each.
BAD_MODULES = {
    "fails: RuntimeError: no license": "raise RuntimeError('no\\nlicense')",
    "calls sys.exit(4)": "import sys; sys.exit(4)",
    "starts a thread": "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "opens a socket": "import socket; s = socket.socket()",
    "starts a process": "import subprocess; p = subprocess.Popen(['sleep', '600'])",
    "opens /dev/fuse": "f = open('/dev/fuse', 'rb')",
    "handles SIGTERM": "import signal; signal.signal(signal.SIGTERM, print)",
    "changes the working directory": "import os; os.chdir('/')",
    "changes the umask": "import os; os.umask(0)",
    "fails: KeyError: 'LOCAL_RANK'": "import os; rank = os.environ['LOCAL_RANK']",
    "reads LOCAL_RANK, which differs from worker to worker": "import os; rank = os.environ.get('LOCAL_RANK')",
    "reads LOCAL_RANK, ": "import os; rank = os.environb.get(b'LOCAL_RANK')",
    "replaces sys.stdout": "import io, sys; sys.stdout = io.StringIO()",
    "is not installed: No module named 'nosuch'": "import nosuch",
    "initializes CUDA": (
        "import sys, types; t = types.ModuleType('torch'); sys.modules['torch'] = t\n"
        "t.cuda = types.SimpleNamespace(is_initialized=lambda: True)"
    ),
}
# Its child inherits open descriptors, and outlives the test.
FORKS = "import os, time\nif os.fork() == 0:\n    time.sleep(600)"
# Likewise, but each of these ends a fork server.
BAD_ENDS = {
    "ends the process (exit code 4)": "import os; os._exit(4)",
    "ends the process (exit code -11)": "import ctypes; ctypes.string_at(0)",
    "ends the process (exit code 0)": "import os; os._exit(0)",
    "ends the process (exit code 3)": f"{FORKS}\nos._exit(3)",
    "starts a process": FORKS,
}


def test_modules_that_must_not_be_preloaded_are_left_out_in_a_line_each(launch: Launcher) -> None:
    expected = {}
    for number, (why, code) in enumerate([*BAD_MODULES.items(), *BAD_ENDS.items()]):
        if "/dev/fuse" not in code or os.access("/dev/fuse", os.R_OK):
            launch.write(f"lib/mod{number}.py", code, preamble="")
            expected[f"mod{number}"] = why
    # Without a limit on the import time, which would be the time-out's responsibility.
    wrapper = "from aelastic.workers.forkserver import fork_server\nfork_server.FIRST_TIMEOUT_S = 600.0\n"
    job = launch(
        f"say(*[name for name in sys.modules if name.startswith('mod')])\n{IS_WARM}", "--preload",
        ",".join([*expected, MODULE]), env={"PYTHONPATH": str(launch.folder / "lib")}, wrapper=wrapper,
    )  # fmt: skip
    job.assert_ends()
    assert job.lines == ["", "up 0 0 True"]
    warnings = [line.partition("W --preload: ")[2] for line in job.stderr.splitlines()]
    assert len(warnings) == len(expected) and all(line.endswith("; it is not preloaded") for line in warnings), (
        job.stderr
    )
    for name, why in expected.items():
        (line,) = [line for line in warnings if line.startswith(f"{name} ")]
        assert line.startswith(f"{name} {why}")


# In the agent: local rank 1 gets an extra variable, as a user's `LogsSpecs` may do.
SPECS = """
from aelastic.agent.generation import Generation
usual = Generation._worker_env
Generation._worker_env = lambda self, rank, page: {**usual(self, rank, page), **({"MODE": "fast"} if rank == 1 else {})}
"""


def test_what_modules_print_change_in_the_environment_and_keep_of_generators_is_reported_but_not_what_libraries_keep(
    launch: Launcher,
) -> None:
    mod = "import random\nfrom random import _inst, random as draw\nrng = again = random.Random()"
    more = "import library, numpy\nfrom mod import rng\na, b, c = map(numpy.random.default_rng, range(3))"
    env = "import os; os.environ.copy(); os.environ['NEW'] = '1'; os.environ['OLD'] = 'b'; del os.environ['GONE']"
    launch.write("lib/mod.py", f"{mod}\n{env}\nprint('welcome')", preamble="")
    launch.write("lib/more.py", more, preamble="")
    launch.write("lib/site-packages/library.py", "import random\nrng = random.Random()", preamble="")
    code = """
import mod, more, numpy
say("env", os.environ["NEW"], os.environ["OLD"], os.environ.get("GONE"))
say(mod.rng.random(), more.a.random()); say(mod.draw()); say(numpy.random.rand())
"""
    given = {
        "PYTHONPATH": f"{launch.folder / 'lib'}:{launch.folder / 'lib' / 'site-packages'}",
        "OLD": "a",
        "GONE": "x",
    }
    job = launch(code, "--nproc-per-node=2", "--preload=mod,more", env=given)
    job.assert_ends()
    env_lines = [line for line in job.lines if line.startswith("env")]
    numbers = [line for line in job.lines if not line.startswith("env")]
    assert env_lines == ["env 1 b None"] * 2
    assert len(numbers) == 6 and len({*numbers}) == 5, "the warnings about generators are true"
    assert [line.partition(" W --preload: ")[2] for line in job.stderr.splitlines()] == [
        "mod prints during its import: 'welcome'",
        "all workers get the same random numbers from mod.rng, more.a, more.b and 1 more: make the generators in the script",
    ]


@pytest.mark.all
def test_torch_keeps_no_generators(launch: Launcher) -> None:  # see `PLAIN`
    job = launch("say('up')", "--preload", "torch,torch.utils.data,torch._dynamo")
    assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.story
    assert (job.lines, job.stderr) == (["up"], "")


def test_a_worker_whose_variables_are_not_those_that_modules_read_starts_cold(launch: Launcher) -> None:
    launch.write("lib/mod.py", "import os; mode = os.environ.get('MODE')", preamble="")
    launch.write("lib/specs.py", SPECS, preamble="")
    wrapper = "from aelastic.logs import run_logs\nimport specs\n"
    env = {"PYTHONPATH": str(launch.folder / "lib")}
    job = launch("import mod; say(mod.mode)", "--nproc-per-node", "2", "--preload", "mod", env=env, wrapper=wrapper)
    assert job.wait() == 0, job.story
    assert sorted(job.lines) == ["None", "fast"]
    assert "MODE was read during the imports, and differs for this worker; worker 1 starts cold" in job.stderr


@pytest.mark.all
@pytest.mark.ci
def test_a_module_that_takes_too_long_is_not_waited_for(launch: Launcher) -> None:
    launch.write("lib/mod.py", "import time; time.sleep(600)", preamble="")
    env = {"PYTHONPATH": str(launch.folder / "lib")}
    wrapper = "from aelastic.workers.forkserver import fork_server\nfork_server.FIRST_TIMEOUT_S = 0.3\n"
    job = launch(IS_WARM, "--preload", f"{MODULE},mod", env=env, wrapper=wrapper)
    job.assert_ends()
    assert job.lines == ["up 0 0 False"]
    assert "W --preload: imports took more than 0.3 s; workers start cold until they finish" in job.stderr


# Learning from the first workers' imports.

LEARNS = f"""
say("up", rank, restart, {MODULE!r} in sys.modules, "own" in sys.modules)
import {MODULE}, own.inner
open("imported", "w").close()
wait_for(f"go{{restart}}")
sys.exit(1 if restart == 0 else 0)
"""
# In the agent.  Its children lack the privilege required to leave `SCHED_IDLE`.
QUICK = """
import ctypes
from aelastic.workers.forkserver import fork_server, learning
learning.LEARN_TIMEOUT_S = 1.0
fork_server.IDLE_TIMEOUT_S = 0.5
PR_CAPBSET_DROP, CAP_SYS_NICE = 24, 23
ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_NICE, 0, 0, 0)
"""
# The time for imports ends a second after a worker has made its own, however late that was.
ONCE_IMPORTED = """
import os
import anyio

gather = learning.Imports.gather

async def gather_once_imported(self):
    while not os.path.exists("imported"):
        await anyio.sleep(0.01)
    return await gather(self)

learning.Imports.gather = gather_once_imported
"""
# Imports are over when a worker reports it.
LEARN_ONCE = f"{QUICK}\nlearning.LEARN_TIMEOUT_S = 600.0"


def auto(launch: Launcher, code: str, *options: str, learn: bool = False, **more: Any) -> list[str]:
    """Output of workers that restart once the modules they imported are in a fork server with parked processes."""
    job = launch(code, *("--nproc-per-node=2", "--preload=auto", "--max-restarts=1"), *options, **more)
    job.wait_line("up", 2)
    bare = server_of(job)
    if learn:
        (job.folder / "learn").touch()
    wait_for("another fork server", lambda: parked_by(job, other_than=bare))
    restart(job, 0)
    restart(job, 1)
    job.assert_ends()
    assert " W --preload" not in job.stderr
    return sorted(job.lines)


def test_auto_preloads_what_the_first_workers_imported_but_not_the_users_own(launch: Launcher) -> None:
    for name in ("__init__", "inner"):
        launch.write(f"lib/own/{name}.py", "", preamble="")
    env = {"PYTHONPATH": str(launch.folder / "lib")}
    lines = auto(launch, LEARNS, wrapper=QUICK + ONCE_IMPORTED, env=env)
    assert lines == ["up 0 0 False False", "up 0 1 True False", "up 1 0 False False", "up 1 1 True False"]


LAZY = f"""
import importlib
say("up", rank, restart, {MODULE!r} in sys.modules)
importlib.import_module({MODULE!r})
wait_for("learn")
import torch.distributed.distributed_c10d, decimal
wait_for(f"go{{restart}}")
sys.exit(1 if restart == 0 else 0)
"""


def torch_stub(launch: Launcher, code: str) -> dict[str, str]:
    """The environment of workers whose torch has this code in `distributed_c10d`."""
    for name in ("torch/__init__", "torch/distributed/__init__"):
        launch.write(f"lib/{name}.py", "", preamble="")
    launch.write("lib/torch/distributed/distributed_c10d.py", code, preamble="")
    return {"PYTHONPATH": str(launch.folder / "lib"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def test_auto_preloads_what_a_library_has_imported_late_and_keeps_it_in_the_cache_folder_for_agents_to_come(
    launch: Launcher,
) -> None:
    # Workers find a process group as soon as they have imported the module that makes one.
    env = torch_stub(launch, "def is_initialized(): return True")
    kept = launch.folder / "kept"
    lines = auto(launch, LAZY, f"--cache-dir={kept}", learn=True, wrapper=LEARN_ONCE, env=env)
    assert lines == ["up 0 0 False", "up 0 1 True", "up 1 0 False", "up 1 1 True"]
    assert [*kept.glob("*/imports.json")]
    (launch.folder / "job" / "go0").unlink()
    options = ("--nproc-per-node=2", "--preload=auto", f"--cache-dir={kept}")
    again = launch.command(*options, str(launch.folder / "job" / "worker.py"), wrapper=LEARN_ONCE, env=env)
    again.wait_line("up", 2)
    restart(again, 0)
    assert again.wait() == 1
    assert sorted(again.lines) == ["up 0 0 True", "up 1 0 True"], again.story


@pytest.mark.all
def test_auto_learns_until_a_worker_joins_its_process_group_though_it_says_nothing_of_it(launch: Launcher) -> None:
    code = STARTS.replace('say("up")', f"say('up', {MODULE!r} in sys.modules)\nimport {MODULE}")
    wrapper = (
        f"{QUICK}\nfrom aelastic.agent.watches import start\nlearning.LEARN_TIMEOUT_S = start.START_IDLE_S = 600.0"
    )
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = launch(code, "--nproc-per-node", "2", "--preload", "auto", "--max-restarts", "1", wrapper=wrapper, env=env)
    for number in range(2):
        (job.folder / f"prints{number}").touch()
    job.wait_line("up", 2)
    bare = server_of(job)
    for number in range(2):
        job.wait_line("up", 2 + 2 * number)
        (job.folder / f"joins{number}").touch()
        job.wait_line("joined", 2 + 2 * number)  # rank 0, which listens, must not exit before
        wait_for("another fork server", lambda: parked_by(job, other_than=bare))
        restart(job, number)
    assert job.wait() == 0, job.story
    assert sorted(job.lines) == ["joined"] * 4 + ["up False", "up False", "up True", "up True"]


# The process group is there at once; the hook notices it at the next import.
PRINTS_PIPES = """
from torch.distributed.distributed_c10d import is_up


def pipes():
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(path).startswith("pipe:") for path in paths if os.path.lexists(path))


sys.path.append(KIT)
from self_description import fds_of_a_program
say(*fds_of_a_program())
before = pipes()
is_up.append(1)
import colorsys
say(before, pipes())
"""


def test_a_worker_that_tells_what_it_imports_hands_the_pipe_to_no_program_and_closes_it_in_the_end(
    launch: Launcher,
) -> None:
    env = torch_stub(launch, "is_up = []\ndef is_initialized(): return bool(is_up)")
    job = launch(PRINTS_PIPES.replace("KIT", repr(str(KIT))), "--preload", "auto", env=env)
    assert job.wait() == 0, job.story
    assert job.lines == ["0 1 2", "1 0"]


TAKES_NUMBERS = """
mine = open("mine", "wb")
paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
taken = [int(os.path.basename(path)) for path in paths if os.path.lexists(path) and os.readlink(path).startswith("pipe:")]
for number in taken:
    os.dup2(mine.fileno(), number)
import colorsys, decimal
say(len(taken), os.path.getsize("mine"))
"""


def test_a_worker_that_uses_the_number_of_the_pipe_for_a_file_finds_no_names_in_it(launch: Launcher) -> None:
    job = launch(TAKES_NUMBERS, "--preload", "auto")
    assert job.wait() == 0, job.story
    assert job.lines == ["1 0"]


def parked_by(job: Job, other_than: int) -> bool:
    """Whether two processes are parked that another fork server has forked."""
    sessions = [entry.session for pid in parked(job) if (entry := proc_table.process(pid))]
    return len(sessions) == 2 and other_than not in sessions


# A failing fork server.

RESTARTS = f"""
{IS_WARM}
wait_for(f"go{{restart}}")
sys.exit(1)
"""


def parked(job: Job) -> list[int]:
    """Processes that wait to become workers: in the session of a live fork server."""
    here = [entry for pid in job.left() if (entry := proc_table.process(pid)) and SERVER in " ".join(cmdline(pid))]
    running = [entry for entry in here if entry.parent == job.pid and entry.state not in "TZ"]
    servers = {entry.pid for entry in running if entry.session == entry.pid}
    return [entry.pid for entry in running if entry.session in servers and entry.pid not in servers]


def server_of(job: Job) -> int:
    """The fork server: it leads the session of the processes that it has forked, which look the same."""

    def found() -> list[int]:
        here = [entry for pid in job.left() if (entry := proc_table.process(pid)) and SERVER in " ".join(cmdline(pid))]
        return [entry.pid for entry in here if entry.session == entry.pid]

    return int(wait_for("a fork server", found)[0])


def restart(job: Job, number: int) -> None:
    (job.folder / f"go{number}").touch()


TROUBLE = [
    ("server", signal.SIGKILL),
    ("parked", signal.SIGKILL),
    ("parked", signal.SIGSTOP),
    ("server", signal.SIGSTOP),
]


def test_a_restart_is_never_lost_with_the_fork_server_and_nothing_outlives_a_killed_agent(launch: Launcher) -> None:
    """A single job: before each restart something happens to the fork server, or to its parked processes."""
    last = len(TROUBLE) + 1
    job = launch(RESTARTS, "--nproc-per-node", "2", "--preload", MODULE, "--max-restarts", str(last))
    for number, (victim, signum) in enumerate(TROUBLE):
        job.wait_line("up", 2 * (number + 1))
        wait_for("the next generation is parked", lambda: len(parked(job)) == 2)
        for pid in [server_of(job)] if victim == "server" else parked(job):
            if signum == signal.SIGSTOP:
                stand_still(pid)
            else:
                os.kill(pid, signum)
        restart(job, number)
    job.wait_line("up", 2 * last)
    restart(job, last - 1)  # the parked processes are used up, and the fork server does not answer
    job.wait_line("up", 2 * (last + 1))
    wait_for("another fork server has parked", lambda: len(parked(job)) == 2)
    assert "W --preload: the template does not answer; workers 0, 1 start cold" in job.stderr
    started = Counter(tuple(line.split()[2:]) for line in job.lines)
    # Parked processes outlive their server; if they were hit themselves, the next workers start cold.
    warm = {0: True, 1: True, 2: False, 3: False, 4: True}
    assert all(started[str(number), str(is_warm)] == 2 for number, is_warm in warm.items()), job.story
    assert len(job.lines) == 2 * (last + 1)
    job.process.kill()
    job.process.wait()
    job.wait_nothing_left()


def test_an_agent_that_is_asked_to_stop_while_modules_are_imported_stops(launch: Launcher) -> None:
    launch.write("lib/mod.py", "import time; time.sleep(600)", preamble="")
    job = launch(IS_WARM, "--preload", "mod", env={"PYTHONPATH": str(launch.folder / "lib")})
    job.child(SERVER)
    job.signal(signal.SIGTERM)
    job.assert_ends(-signal.SIGTERM)


# For the agent and the fork server: descriptors, threads, KiB of memory.
HOLDS = f"""
from aelastic.base.host import proc_table

agent = os.getppid()
with open(f"/proc/{{agent}}/task/{{agent}}/children") as file:
    children = [proc_table.process(pid) for pid in file.read().split()]
servers = [each for each in children if each and {SERVER!r} in open(f"/proc/{{each.pid}}/cmdline").read()]
for who, pid in ("agent", agent), ("server", min(servers, key=lambda each: each.began).pid):
    status = dict(line.split(":", 1) for line in open(f"/proc/{{pid}}/status"))
    say("holds", who, len(os.listdir(f"/proc/{{pid}}/fd")), status["Threads"].strip(), status["VmRSS"].split()[0])
open(f"held{{restart}}", "w").close()
"""
# Counted while others start; an allocator takes a while to reach its working size.
GROWTH_MAX = (10, 3, 2048)


@pytest.mark.all
def test_many_warm_restarts_leak_nothing(launch: Launcher) -> None:
    count = {"quick": 30, "all": 100, "soak": 1000}[EFFORT]
    module = "torch" if EFFORT == "soak" else MODULE
    looks = f"if rank == 0:{textwrap.indent(HOLDS, '    ')}\nelse:\n    wait_for(f'held{{restart}}')"
    code = f"{IS_WARM.replace(MODULE, module)}\n{looks}\nsys.exit(restart < {count})"
    job = launch(code, "--nproc-per-node", "2", "--preload", module, "--max-restarts", str(count))
    job.assert_ends(limit_s=100 + 2 * count)
    assert all(line.endswith("True") for line in job.lines if line.startswith("up"))
    for who in "agent", "server":
        of_one = [[int(n) for n in line.split()[2:]] for line in job.lines if line.startswith(f"holds {who} ")]
        early, late = ([max(values) for values in zip(*part, strict=True)] for part in (of_one[4:14], of_one[-10:]))
        assert all(b <= a + more for a, b, more in zip(early, late, GROWTH_MAX, strict=True)), (early, late)


# Invalid options.


def test_what_cannot_be_forked_is_refused(launch: Launcher) -> None:
    job = launch.command("--preload", "json", "--no-python", "true")
    assert job.wait() == 2
    why = "'true' is not a Python interpreter with a program to run: start python itself"
    assert why in job.stderr and job.stderr.count("\n") == 1
    assert job.stdout == ""
