"""The fork server's clone: what the C library believes about itself in the new process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kit.launching import ran

from aelastic.workers import forkserver

# The first process reaps both others.  The second one passes the kernel a word that does not hold its id, as glibc 2.43
# does: the word is where a thread's state is kept.
CLONES = """
import ctypes, os, runpy, sys, threading, time
first = os.getpid()
if os.fork() == 0:
    state = ctypes.c_int(2)
    ctypes.PyDLL(None).syscall(int(sys.argv[2]), ctypes.byref(state))
    if runpy.run_path(sys.argv[1])["sibling"]() == 0:
        clock = time.pthread_getcpuclockid(threading.get_ident())  # made of the id that the C library keeps
        print(os.getpid() == ~(clock >> 3), os.getppid() == first, flush=True)
    os._exit(0)
os.wait(), os.wait()
"""
SET_TID_ADDRESS = {"x86_64": "218", "aarch64": "96"}


def test_a_clone_has_its_own_thread_id_whatever_word_the_kernel_clears() -> None:
    clone = Path(forkserver.__file__).with_name("clone.py")
    done = ran(sys.executable, "-c", CLONES, str(clone), SET_TID_ADDRESS[os.uname().machine])
    assert (done.stdout, done.stderr) == ("True True\n", "")
