"""The fork server of `interpreters.py`: it imports once what its forks need, and each fork becomes the requested program.

    python -m kit.warm.server SOCKET PRELOAD

`PRELOAD` is `torch` or `store`.  Each connection is one program: the client sends arguments, environment, folder and
descriptors, then a byte for each signal to the program; the answer is its wait status.  Closing the connection ends the
program, and closing standard input ends all of them.  Single-threaded, because it forks.
"""

from __future__ import annotations

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from typing import Any

from kit.warm import fork


def preload(what: str) -> None:
    if what == "store":
        from aelastic.workers.tcpstore import server

        server.import_store("quick")
        extension: Any = sys.modules["torch._C"]
        extension._c10d_init = lambda: None  # it fails when called twice
        return
    for name in (
        "torch", "torch.distributed", "torch.distributed.run", "torch.distributed.elastic.agent.server.local_elastic_agent",
        "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch._dynamo", "torch.optim", "aiohttp",
        "numpy", "multiprocessing.spawn", "multiprocessing.resource_tracker",
    ):  # fmt: skip
        try:
            importlib.import_module(name)
        except ImportError:
            pass


class Server:
    """Forks for each connection."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(128)
        self._events = selectors.DefaultSelector()
        self._children: dict[int, socket.socket] = {}
        self._events.register(self._listener, selectors.EVENT_READ)
        self._events.register(0, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any]:
        """Returns in a fork, with the program to become."""
        os.write(1, b"ready\n")
        while True:
            for key, _ in self._events.select():
                if key.fileobj is self._listener:
                    request = self._fork()
                    if request is not None:
                        return request
                elif key.fileobj == 0:
                    for pid in self._children:
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                elif isinstance(key.fileobj, int):
                    self._reap(key.fileobj, key.data)
                elif key.data in self._children:  # otherwise it has just ended
                    self._pass_signals_on(key.data)

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self._listener.accept()
        request = fork.read_request(connection)
        if request is None:
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            # Closed now, because if freed later they would close whatever has their numbers then.
            self._events.close()
            for each in (self._listener, connection, *self._children.values()):
                each.close()
            return request
        for fd in request["received"]:
            os.close(fd)
        self._children[pid] = connection
        self._events.register(connection, selectors.EVENT_READ, pid)
        self._events.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        return None

    def _reap(self, pidfd: int, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        self._events.unregister(pidfd)
        os.close(pidfd)
        connection = self._children.pop(pid)
        if connection in self._events.get_map():
            self._events.unregister(connection)
        try:
            connection.send(status.to_bytes(4, "big"))
        except OSError:
            pass  # its sender was killed
        connection.close()

    def _pass_signals_on(self, pid: int) -> None:
        connection = self._children[pid]
        try:
            signals = connection.recv(64)
        except OSError:
            signals = b""
        for signum in signals:
            os.kill(pid, signum)
        if not signals:  # its sender was killed
            self._events.unregister(connection)
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    fork.die_with_parent()
    path, what = sys.argv[1:]
    sys.path.pop(0)  # the folder where `-m` found this module
    preload(what)
    gc.collect()
    gc.freeze()
    request = Server(path).serve()
    sys.modules["warm_server"] = sys.modules["__main__"]  # keeps the module alive when its name is reused
    fork.die_with_parent()
    fork.become(request)
    fork.run_and_exit(request["argv"])


if __name__ == "__main__":
    main()
