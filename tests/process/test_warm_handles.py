"""What a warm worker holds: locks that end with it, and no descriptor that what it executes would inherit."""

from __future__ import annotations

import pytest
from kit.launching import Launcher

MODULE = "colorsys"
# A mutex in a file that both generations map; the first one is killed while it holds it.
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


@pytest.mark.parametrize("preload", ["off", MODULE])
def test_a_robust_mutex_of_a_killed_worker_goes_to_the_next_one(launch: Launcher, preload: str) -> None:
    job = launch(HOLDS_A_LOCK, "--preload", preload, "--max-restarts", "1")
    assert job.wait() == 0, job.story
    assert job.lines == ["its owner is dead"]


OPENS_NOTHING = """
code = "import os; print(sorted(os.listdir('/proc/self/fd'), key=int)[:-1])"
say(subprocess.check_output([sys.executable, "-c", code], close_fds=False, text=True).strip())
"""


def test_what_a_warm_worker_executes_has_the_descriptors_that_it_has_from_a_cold_one(launch: Launcher) -> None:
    found = []
    for given in ("off", MODULE, "auto"):
        job = launch(OPENS_NOTHING, "--preload", given, name=given)
        assert job.wait() == 0, job.story
        found.append(job.lines)
    assert found[0] == found[1] == found[2] != []


# The process group is there at once; the hook sees it with the next import.
LEARNS = """
from torch.distributed.distributed_c10d import is_up


def pipes():
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(path).startswith("pipe:") for path in paths if os.path.lexists(path))


before = pipes()
is_up.append(1)
import colorsys
say(before, pipes())
"""


def test_a_worker_that_has_told_what_it_imports_closes_the_pipe(launch: Launcher) -> None:
    for name in ("torch/__init__", "torch/distributed/__init__"):
        launch.write(f"lib/{name}.py", "", preamble="")
    launch.write(
        "lib/torch/distributed/distributed_c10d.py", "is_up = []\ndef is_initialized(): return bool(is_up)", preamble=""
    )
    env = {"PYTHONPATH": str(launch.folder / "lib"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = launch(LEARNS, "--preload", "auto", env=env)
    assert job.wait() == 0, job.story
    assert job.lines == ["1 0"]
