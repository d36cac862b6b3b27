"""The program that serves torch's TCPStore; `store.py` starts it and tells how it is used.

Started as `python -P store_server.py CONTROL MODE`.  `serve` on the control socket brings a listening socket: a
new store is served on it, which is answered by `serving`.  `drop` ends the store there is.  The end of
the control socket is the end of the program.

The store is a C++ object, and 80 % of `import torch` is Python code that it does not need.  On a
machine whose workers are importing torch at that moment, that time is theirs.  So the quick mode loads torch's
extension module alone.  This leans on torch's inside: where it fails, by whatever death, the agent
starts the program again in careful mode, which imports torch as everybody does.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
import sys
import types
from datetime import timedelta
from typing import Any

# How long a store waits for a key if its client does not say; torch's default.
TIMEOUT = timedelta(seconds=300)


def import_store(mode: str) -> Any:
    """torch's `TCPStore` class."""
    if mode == "careful":
        return importlib.import_module("torch.distributed").TCPStore
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    stand_in: Any = types.ModuleType("torch")
    stand_in.__path__, stand_in.__spec__, stand_in.__file__ = list(spec.submodule_search_locations), spec, spec.origin
    stand_in.distributed = types.ModuleType("torch.distributed")
    sys.modules.update({"torch": stand_in, "torch.distributed": stand_in.distributed})
    _C: Any = importlib.import_module("torch._C")  # noqa: N806

    # Makes `torch._C._distributed_c10d`, and hangs some names on `torch.distributed`: the stand-in takes them.
    _C._c10d_init()  # noqa: SLF001
    return _C._distributed_c10d.TCPStore  # noqa: SLF001


def newest_command(control: socket.socket) -> tuple[bytes, int]:
    """Waits for a command and its listening socket, if it brings one; of several only the last is wanted."""
    command, listener = b"", -1
    control.setblocking(True)
    while True:
        try:
            said, listeners, *_ = socket.recv_fds(control, 64, 1)
        except BlockingIOError:
            return command, listener
        if listener >= 0:
            socket.close(listener)
        command, listener = said, listeners[0] if listeners else -1
        if not command:
            return command, listener
        control.setblocking(False)


def main(control: socket.socket, mode: str) -> None:
    store_class = import_store(mode)
    store = None
    while True:
        command, listener = newest_command(control)
        store = None  # before the next one: two would share the connections that come in
        if command == b"serve":
            store = serve(store_class, listener)  # noqa: F841  it serves as long as it lives
            control.send(b"serving")
        elif not command:
            return


def serve(store_class: Any, listener: int) -> Any:
    with socket.socket(fileno=socket.dup(listener)) as seen:
        port = seen.getsockname()[1]
    return store_class(
        host_name="127.0.0.1",
        port=port,
        world_size=None,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
