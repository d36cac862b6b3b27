"""The fork server's clone: what the C library and the kernel believe about the new process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from kit.launching import ran

from aelastic.workers import forkserver

# The first process reaps both others.  The last one prints what it finds.
CLONES = """
import ctypes, os, runpy, signal, sys, threading, time
first, c = os.getpid(), ctypes.CDLL(None)
clone = runpy.run_path(sys.argv[1])
names = clone["sibling"].__globals__
if "no address for debuggers" in sys.argv:
    names["_tid_address_for_debuggers"] = lambda: None
if os.fork() == 0:
    state = ctypes.c_int(2)
    if "another word" in sys.argv:
        ctypes.PyDLL(None).syscall(int(sys.argv[2]), ctypes.byref(state))
    try:
        pid = clone["sibling"]()
    except clone["CannotClone"] as error:
        pid = print(error, flush=True)
    if pid == 0:
        clock = time.pthread_getcpuclockid(threading.get_ident())  # made of the id that the C library keeps
        print(os.getpid() == ~(clock >> 3), os.getppid() == first, flush=True)
        clone["rename"](["renamed"], {})
        print(open("/proc/self/cmdline").read() == "renamed\\0", c.sbrk(1 << 16) != -1, flush=True)
        main = ctypes.c_ulong(threading.get_ident())
        signal.alarm(20)
        threading.Thread(target=lambda: (c.pthread_join(main, None), os.write(1, b"joined\\n"), os._exit(0))).start()
        c.pthread_exit(None)
    os._exit(0)
os.wait()
if "no address for debuggers" not in sys.argv or "another word" not in sys.argv:
    os.wait()
"""
SET_TID_ADDRESS = {"x86_64": "218", "aarch64": "96"}
WORKS = "True True\nTrue True\njoined\n"


@pytest.mark.parametrize(
    "how, told",
    [
        # The kernel's word does not hold the id, as in glibc 2.43: it is where a thread's state is kept.
        (["another word"], WORKS),
        (["no address for debuggers"], WORKS),  # as in glibc before 2.34
        (["no address for debuggers", "another word"], "the C library keeps its thread's id elsewhere\n"),
        ([], WORKS),
    ],
    ids=["as glibc 2.43", "as before 2.34", "as neither", "as here"],
)
def test_a_clone_is_a_process_like_any_other_to_the_c_library_and_the_kernel(how: list[str], told: str) -> None:
    clone = Path(forkserver.__file__).with_name("clone.py")
    done = ran(sys.executable, "-c", CLONES, str(clone), SET_TID_ADDRESS[os.uname().machine], *how)
    assert (done.stdout, done.stderr) == (told, "")
