"""Binds threads and processes to CPUs (`sched_setaffinity(2)`); a child inherits those of the thread that starts it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from aelastic.workers.numa import ranges


@contextmanager
def bound_to(cpus: frozenset[int]) -> Iterator[None]:
    """Keeps this thread, and the processes that it starts meanwhile, on these CPUs.

    Raises:
        OSError: the kernel lets us run on none of them.
    """
    usual = os.sched_getaffinity(0)
    _bind(cpus)
    try:
        yield
    finally:
        try:
            os.sched_setaffinity(0, usual)
        except OSError:
            pass  # all of them were taken from us meanwhile, and the kernel has chosen others (`cpuset(7)`)


def bind_process(cpus: frozenset[int]) -> None:
    """Keeps this process on these CPUs, with all threads except those that have chosen their own.

    An imported library may have started threads (OpenMP, OpenBLAS).

    Raises:
        OSError: the kernel lets us run on none of them.
    """
    usual = os.sched_getaffinity(0)
    _bind(cpus)
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            if os.sched_getaffinity(thread) == usual:
                os.sched_setaffinity(thread, cpus)
        except ProcessLookupError:
            pass  # it has ended


def _bind(cpus: frozenset[int]) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise OSError(error.errno, f"may not run on CPUs {ranges(cpus)}: {error.strerror}") from None
