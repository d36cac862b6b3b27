"""A fork whose child is a sibling: its parent is the process that started this one.

This uses `clone(2)` with `CLONE_PARENT`.  For the agent the new process is a child like those that it started itself:
it waits for, reaps and signals it the same way, and nothing depends on the fork server any more.

This bypasses the C library, so three parts of its `fork()` are done here, and two are not possible.  The kernel updates
the thread's id that the C library keeps (`CLONE_CHILD_SETTID`, at the address that glibc's own `fork` passes).  The
kernel learns again where the C library lists the robust mutexes that the thread holds (`set_robust_list(2)`): it
unlocks them when the process is killed, and forgets the list in each child.  Python's own hooks run.  `pthread_atfork`
handlers do not run, and locks of the C library are not taken: so there may be only one thread, which `checks` ensures.

Part of the fork server's program: imports nothing of the package.
"""

import ctypes
import errno
import mmap
import os
import signal

_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_SET_ROBUST_LIST, _SYS_GET_ROBUST_LIST = {"x86_64": 273, "aarch64": 99}, {"x86_64": 274, "aarch64": 100}
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_SET_MM, _PR_SET_MM_MAP, _PR_GET_TID_ADDRESS = 35, 14, 40

_libc = ctypes.PyDLL(None, use_errno=True)  # calls hold the interpreter's lock, as `os.fork` does
_libc.syscall.restype = ctypes.c_long
_libc.pthread_self.restype = ctypes.c_ulong
_python = ctypes.pythonapi


class CannotClone(Exception):
    """This machine lacks something that `sibling` needs; the message names it."""


def sibling() -> int:
    """Forks; returns 0 in the child, the child's pid in this process.

    Raises:
        CannotClone: an unknown CPU, or a C library whose thread id is not found.
        OSError: the kernel refuses to fork (`EAGAIN`, `ENOMEM`).
    """
    address = _tid_address()
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    machine = os.uname().machine
    # The last two are the address of the id and the thread's storage, whose order depends on the CPU.
    last = (address, 0) if machine == "x86_64" else (0, address)
    robust, size = ctypes.c_void_p(), ctypes.c_size_t()
    _libc.syscall(
        ctypes.c_long(_SYS_GET_ROBUST_LIST[machine]), ctypes.c_long(0), ctypes.byref(robust), ctypes.byref(size)
    )
    _python.PyOS_BeforeFork()
    pid = int(
        _libc.syscall(ctypes.c_long(_SYS_CLONE[machine]), ctypes.c_ulong(flags), *map(ctypes.c_void_p, (0, 0, *last)))
    )
    error = ctypes.get_errno()
    if pid == 0 and robust.value:  # otherwise the kernel has none
        _libc.syscall(ctypes.c_long(_SYS_SET_ROBUST_LIST[machine]), robust, size)
    (_python.PyOS_AfterFork_Child if pid == 0 else _python.PyOS_AfterFork_Parent)()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def _tid_address() -> int:
    """Returns the address at which the C library keeps this thread's id."""
    if (machine := os.uname().machine) not in _SYS_CLONE:
        raise CannotClone(f"{machine} is not among the CPUs it knows ({', '.join(_SYS_CLONE)})")
    address = _tid_address_for_debuggers() or _tid_address_for_kernel()
    if ctypes.c_int.from_address(address).value != os.getpid():
        raise CannotClone("the C library keeps its thread's id elsewhere")
    return address


def _tid_address_for_debuggers() -> int | None:
    """Returns the address that glibc, since 2.34, gives to `libthread_db`; `None`: this C library gives none."""
    try:
        _bits, _count, offset = (ctypes.c_uint32 * 3).in_dll(_libc, "_thread_db_pthread_tid")
    except ValueError:
        return None
    return int(_libc.pthread_self()) + offset


def _tid_address_for_kernel() -> int:
    """Returns the address of the word that the kernel clears when the thread ends: in glibc before 2.43, the id."""
    found = ctypes.c_void_p()
    if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(found), 0, 0, 0) or not found.value:
        raise CannotClone(f"prctl(PR_GET_TID_ADDRESS): {os.strerror(ctypes.get_errno() or errno.EINVAL)}")
    return found.value


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map`: where the kernel looks for a process's command line and environment, among others."""

    _fields_ = (
        *[
            (name, ctypes.c_uint64)
            for name in (
                "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
                "arg_start", "arg_end", "env_start", "env_end", "auxv",
            )
        ],
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip


# The fields of `/proc/PID/stat` (`proc(5)`) that contain these addresses.
_STAT_FIELDS = {"start_code": 26, "end_code": 27, "start_data": 45, "end_data": 46, "start_brk": 47, "start_stack": 28}
_kept: list[mmap.mmap] = []  # memory that the kernel now points to


def rename(command: list[str], env: dict[str, str]) -> bool:
    """Makes `/proc/PID/cmdline` and `environ` of this process look as they would after an exec.

    Returns whether it worked: a kernel without checkpoint/restore refuses, and the process just keeps the old texts.
    """
    arguments = b"".join(os.fsencode(argument) + b"\0" for argument in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    with open("/proc/self/stat", "rb") as file:
        numbers = file.read().rpartition(b")")[2].split()
    texts = mmap.mmap(-1, len(arguments) + len(variables) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    texts.write(arguments + variables)
    start = ctypes.addressof(ctypes.c_char.from_buffer(texts))
    layout = _MemoryMap(
        **{name: int(numbers[field - 3]) for name, field in _STAT_FIELDS.items()},
        brk=_libc.syscall(ctypes.c_long({"x86_64": 12, "aarch64": 214}[os.uname().machine]), ctypes.c_void_p(0)),
        arg_start=start,
        arg_end=start + len(arguments),
        env_start=start + len(arguments),
        env_end=start + len(arguments) + len(variables),
        exe_fd=0xFFFFFFFF,  # the program stays
    )
    _kept.append(texts)
    return not _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), ctypes.c_long(ctypes.sizeof(layout)), 0)
