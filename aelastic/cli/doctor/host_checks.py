"""Checks of this host: torch, shared memory, limits, the clock, and the log folder."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from aelastic.cli.doctor.finding import Finding
from aelastic.diagnose.stacks.interpreter import stacks_of
from aelastic.diagnose.stacks.memory import Unreadable

# `import torch` takes seconds, and a minute from a cold network file system.
IMPORT_TIMEOUT_S = 300.0
# Docker's default is 64 MiB, which the batches of a few data loaders fill.
SHARED_MEMORY_MIN = 1 << 30
# Linux's default: an agent needs a few files for each worker, and one for each node that it coordinates.
FILES_MIN = 1024
# A worker with its data loaders and the threads of its libraries takes a hundred or more.
PROCESSES_MIN = 1024
_CGROUPS = Path("/sys/fs/cgroup")
# The answer of adjtimex(2) for a clock that is not synchronized; its struct has 208 bytes on 64-bit machines.
_TIME_ERROR = 5
_TIMEX_BYTES = 512


def check_host(environ: Mapping[str, str], log_dir: Path | None, max_nodes: int) -> Iterator[Finding]:
    """Runs all checks, one after the other.

    Args:
        environ: of the future agent.
        log_dir: where logs would go; `None` is a temporary folder.
        max_nodes: of the job.
    """
    yield check_torch(environ)
    yield check_shared_memory()
    yield check_open_files(max_nodes)
    yield check_processes()
    yield check_clock()
    yield check_log_folder(log_dir)
    yield check_stacks()


def check_torch(environ: Mapping[str, str]) -> Finding:
    # -P: do not import a torch.py next to the script.
    command = [sys.executable, "-P", "-c", "import torch; print(torch.__version__)"]
    try:
        asked = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        words = f"{sys.executable} did not import it within {IMPORT_TIMEOUT_S:g} s: is its disk slow?"
        return Finding("error", "torch", words)
    if asked.returncode == 0:
        return Finding("ok", "torch", f"{asked.stdout.split()[-1]}, imported by {sys.executable}")
    lines = [line for line in asked.stderr.splitlines() if line.strip()]
    reason = lines[-1].strip() if lines else f"exit code {asked.returncode}"
    return Finding("error", "torch", f"{sys.executable} cannot import it ({reason}): pip install torch")


def check_shared_memory(path: str = "/dev/shm") -> Finding:  # noqa: S108  looked at only
    try:
        found = os.statvfs(path)
    except OSError as error:
        return Finding("warning", path, f"{error.strerror}: torch's data loaders need it: mount a tmpfs there")
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    words = f"{free >> 20} of {size >> 20} MiB are free"
    remedy = "docker run --shm-size=8g, or in Kubernetes an emptyDir with medium Memory"
    return _judged(free >= SHARED_MEMORY_MIN, path, words, f", and data loaders put their batches there: {remedy}")


def check_open_files(max_nodes: int) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = max(FILES_MIN, 2 * max_nodes)
    words = f"at most {_limit(soft)} in each process, {_limit(hard)} if raised"
    is_enough = soft == resource.RLIM_INFINITY or soft >= least
    return _judged(is_enough, "open files", words, f": raise the limit to {least} or more (ulimit -n)")


def check_processes() -> Finding:
    limits = [each for each in (resource.getrlimit(resource.RLIMIT_NPROC)[0], *_pids_max()) if each >= 0]
    least = min(limits, default=resource.RLIM_INFINITY)
    words = f"at most {_limit(least)} processes and threads"
    is_enough = least == resource.RLIM_INFINITY or least >= PROCESSES_MIN
    return _judged(is_enough, "processes", words, ": raise the limit (ulimit -u, pids.max, docker run --pids-limit)")


def _judged(is_enough: bool, subject: str, words: str, remedy: str) -> Finding:
    return Finding("ok" if is_enough else "warning", subject, words if is_enough else words + remedy)


def _pids_max() -> Iterator[int]:
    """The limits of this process's cgroup and those above it (cgroups(7)); none if they cannot be read."""
    try:
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        own = "/"
    folder = _CGROUPS / own.strip("/")
    for each in (folder, *folder.parents):
        try:
            yield int((each / "pids.max").read_text())
        except (OSError, ValueError):  # it has no limit, or is not there
            continue


def _limit(number: int) -> str:
    return "any number of" if number == resource.RLIM_INFINITY else str(number)


def check_clock() -> Finding:
    """Checks whether the kernel's clock is synchronized; agents do not need that, but readers of their logs do."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # modes 0: only reads
    except AttributeError:  # another C library
        state = -1
    if state < 0:
        return Finding("ok", "clock", "unknown whether it is synchronized; agents do not depend on it")
    if state != _TIME_ERROR:
        return Finding("ok", "clock", "synchronized")
    return Finding(
        "warning", "clock",
        "not synchronized, so times in the logs of different nodes will not agree: start an NTP client such as chrony",
    )  # fmt: skip


def check_stacks() -> Finding:
    """Checks on a child of this process whether an agent could see where a worker hangs."""
    command = [sys.executable, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdout.readline()
        try:
            stacks_of(worker.pid)
        except Unreadable as error:
            return Finding(
                "warning", "stacks",
                f"the stacks of hanging workers cannot be read: {error}; let this user trace its own processes "
                "(kernel.yama.ptrace_scope=1, a seccomp profile that allows process_vm_readv)",
            )  # fmt: skip
        finally:
            worker.stdin.close()
    return Finding("ok", "stacks", "stacks of workers can be read")


def check_log_folder(log_dir: Path | None) -> Finding:
    folder = Path(tempfile.gettempdir()) if log_dir is None else log_dir
    above = (folder.absolute(), *folder.absolute().parents)
    nearest = next((each for each in above if os.path.lexists(each)), Path("/"))
    if not nearest.is_dir():
        return Finding("error", "log folder", f"{nearest} is not a folder: use another --log-dir")
    if not os.access(nearest, os.W_OK | os.X_OK):
        words = f"{nearest} cannot be written to: check its permissions, or use another --log-dir"
        return Finding("error", "log folder", words)
    return Finding("ok", "log folder", f"{folder} can be written to")
