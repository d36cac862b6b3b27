"""What a process knows about itself, as JSON, to compare a warm with a cold worker."""

from __future__ import annotations

import gc
import json
import locale
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

STATUS = ("Umask", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Seccomp", "Cpus_allowed_list", "Threads", "Name")


def text(name: str) -> str:
    return Path("/proc/self", name).read_text()


def stream(file: Any) -> dict[str, Any]:
    names = ("encoding", "errors", "line_buffering", "write_through", "name", "mode", "newlines")
    return {
        **{name: getattr(file, name, None) for name in names},
        "buffer": type(file.buffer).__name__, "fd": file.fileno(), "tty": file.isatty(),
    }  # fmt: skip


def fds_of_a_program() -> list[int]:
    code = "import os; print(*sorted(map(int, os.listdir('/proc/self/fd')))[:-1])"  # the last one lists them
    numbers = subprocess.check_output([sys.executable, "-c", code], close_fds=False, text=True)
    return [int(number) for number in numbers.split()]


def description() -> dict[str, Any]:
    main = sys.modules["__main__"]
    status = dict(line.split(":", 1) for line in text("status").splitlines())
    fds = {
        fd: os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "executable": sys.executable,
        "prefix": [sys.prefix, sys.base_prefix], "warnoptions": sys.warnoptions, "xoptions": sys._xoptions,
        "main": {
            name: str(getattr(main, name, "none")) for name in ("__name__", "__file__", "__spec__", "__package__", "__cached__", "__doc__")
        },
        "main loader": str(main.__loader__),
        "main holds the script": "self_description" in vars(main),
        "main has": sorted(name for name in vars(main) if name.startswith("__") and sys.version_info < (3, 14)),
        "builtins": type(main.__builtins__).__name__,
        "cmdline": text("cmdline").split("\0"),
        "environ": sorted(text("environ").split("\0")[:-1]),
        "env": dict(os.environ),
        "environ is": [type(os.environ).__name__, type(os.environb).__name__],
        "cwd": os.getcwd(),
        "leads a session": os.getsid(0) == os.getpid() == os.getpgid(0),
        **{f"status: {name}": status[name].strip() for name in STATUS},
        "limits": [resource.getrlimit(number) for number in range(16)],
        "scheduling": [os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))],
        "oom": text("oom_score_adj"),
        "cgroup": text("cgroup"),
        "fds": sorted(int(fd) for fd in fds),
        "fds of what it executes": fds_of_a_program(),
        "stdin": stream(sys.stdin), "stdout": stream(sys.stdout), "stderr": stream(sys.stderr),
        "same streams": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin is sys.__stdin__],
        "handlers": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
        "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace() is None, sys.getprofile() is None],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "recursion": sys.getrecursionlimit(),
        "locale": [locale.getlocale(), sys.getfilesystemencoding(), sys.getdefaultencoding()],
        "threads": [thread.name for thread in threading.enumerate()],
        "main thread": [
            threading.current_thread() is threading.main_thread(),
            threading.main_thread().native_id == os.getpid(), threading.get_native_id() == os.getpid(),
        ],
        "process": [multiprocessing.current_process().name, multiprocessing.parent_process() is None],
        "warnings": [str(entry) for entry in warnings.filters],
        "children": multiprocessing.active_children() == [],
        "ours": sorted(name for name in sys.modules if "forkserver" in name),
        # These must differ between the two.
        "own": {
            "pid": os.getpid(), "parent": os.getppid(), "random": random.random(),
            "authkey": bytes(multiprocessing.current_process().authkey).hex(), "hash": hash("a"),
        },
    }  # fmt: skip


def print_description() -> None:
    """Prints one line on stdout."""
    os.write(1, (json.dumps(description(), default=str) + "\n").encode())
