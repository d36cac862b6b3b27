"""Replaces an interpreter: passes everything to the fork server, and ends as its fork ends (`interpreters.py`).

`Warm` writes this file and adds its first lines: the interpreter, and where the server listens.  It starts with `-I -S`
and imports only modules written in C, in about 10 ms.
"""

import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import posix
import select
import sys

SERVER = ""  # filled in by `Warm`
PYTHON = ""
UNDERSTOOD = ("-u", "-P")


def is_understood(argv: list[str]) -> bool:
    """Whether a fork handles these arguments as an interpreter would."""
    while argv and argv[0] in UNDERSTOOD:
        argv = argv[1:]
    return bool(argv) and (argv[0] in {"-m", "-c"} or not argv[0].startswith("-"))


def descriptors() -> list[int]:
    found = []
    for name in posix.listdir("/proc/self/fd"):
        try:
            if posix.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            pass  # the descriptor that listed them
    return sorted(found)


def main() -> None:
    argv = sys.argv[1:]
    if not is_understood(argv):
        posix.execv(PYTHON, [PYTHON, *argv])
    ignored, wakes, woken = [], *_socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM, 0)
    wakes.setblocking(False)
    woken.setblocking(False)
    _signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    for signum in range(1, _signal.NSIG):
        if signum in {_signal.SIGKILL, _signal.SIGSTOP, _signal.SIGCHLD, 32, 33}:
            continue
        if _signal.getsignal(signum) == _signal.SIG_IGN and signum != _signal.SIGPIPE:
            ignored.append(signum)
        elif signum not in {_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGTSTP, _signal.SIGTTIN, _signal.SIGTTOU}:
            _signal.signal(signum, lambda *_: None)
    given = descriptors()
    request = {
        "argv": argv,
        "env": posix.environ,
        "cwd": posix.getcwd(),
        "umask": posix.umask(0o77),
        "ignored": ignored,
        "blocked": [int(each) for each in _signal.pthread_sigmask(_signal.SIG_BLOCK, [])],
        "session": posix.getsid(0) == posix.getpid(),
        "group": posix.getpgrp() == posix.getpid(),
        "cpus": list(posix.sched_getaffinity(0)),
        "descriptors": given,
    }
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.connect(SERVER)
    body = marshal.dumps(request)
    rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in given)
    server.sendmsg([len(body).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    server.sendall(body)
    for fd in given:
        posix.close(fd)  # the fork has them: waiting for their end means waiting for its end
    while True:
        readable, _, _ = select.select([server, woken], [], [])
        if woken in readable:
            server.sendall(woken.recv(64))
        if server in readable:
            end(server.recv(4))


def end(data: bytes) -> None:
    status = int.from_bytes(data, "big") if len(data) == 4 else _signal.SIGKILL
    if posix.WIFSIGNALED(status):
        signum = posix.WTERMSIG(status)
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if signum not in {_signal.SIGKILL, _signal.SIGSTOP}:
            _signal.signal(signum, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [signum])
        posix.kill(posix.getpid(), signum)
    posix._exit(posix.WEXITSTATUS(status))


main()
