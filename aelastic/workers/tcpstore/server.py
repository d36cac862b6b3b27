"""The program that holds torch's TCPStore for the agent; `child.py` starts it and sends it commands.

Started as `python -P server.py CONTROL MODE`.  Once it has torch, it sends the answer 0.  From then on
it carries out one command after the other: JSON on the control socket, each answered by its number and a value, or
the text of an error.  `serve` brings a listening socket: a new store is served on it, and holds the given keys at
once; connections of others are forwarded to it.  `connect` makes it a client of another's store, over as many
connections as it may open (`lines.py`).  `drop` ends the current store.  The other commands query the store.  The
end of the control socket is the end of the program, whatever it is doing.

The store is a C++ object, and 80 % of `import torch` is Python code that it does not need.  On a
machine whose workers are importing torch at that moment, that time is theirs.  So the quick mode loads torch's
extension module alone.  This relies on torch's internals: if it fails, however it dies, the
agent starts the program again in careful mode, which imports torch as every program does.

With `--preload` the fork server has torch: the program then runs in a process that was forked from that one, and is
ready at once.  Without it, a program in the mode `template` forks others of its kind: `fork` brings the control
socket of one, and is answered by its pid.
"""

from __future__ import annotations

import binascii
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import stat
import sys
import threading
import time
import types
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

# How long a served store waits for a key if its client sets no timeout; torch's default.
TIMEOUT = timedelta(seconds=300)
# Commands and answers travel in pieces that a socket takes at once; the first byte of each marks the last one.
PIECE_BYTES = 64 * 1024
MORE, LAST = b"+", b"."
# Only the beginning of a longer value, which no agent wrote, is sent.
VALUE_BYTES_MAX = 1 << 20
WORDS_MAX = 300
LISTENERS_MAX = 8  # addresses of one name, IPv4 and IPv6
FORWARD_BYTES = 64 * 1024
FORWARD_STACK_BYTES = 128 * 1024  # two threads for each connection
RETRY_INTERVAL_S = 0.1
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@cache
def import_store(mode: str) -> Any:
    """Returns torch's `TCPStore` class."""
    if mode == "careful" or hasattr(sys.modules.get("torch.distributed"), "TCPStore"):  # this process has torch
        return importlib.import_module("torch.distributed").TCPStore
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    stand_in: Any = types.ModuleType("torch")
    stand_in.__path__, stand_in.__spec__, stand_in.__file__ = list(spec.submodule_search_locations), spec, spec.origin
    stand_in.distributed = types.ModuleType("torch.distributed")
    sys.modules.update({"torch": stand_in, "torch.distributed": stand_in.distributed})
    # A store needs no arrays: torch does without numpy if that cannot be imported, which saves 8 MiB.
    modules: dict[str, Any] = sys.modules
    is_hidden = modules.setdefault("numpy", None) is None
    _C: Any = importlib.import_module("torch._C")  # noqa: N806
    if is_hidden:
        del modules["numpy"]

    # Makes `torch._C._distributed_c10d`, and hangs some names on `torch.distributed`: the stand-in takes them.
    _C._c10d_init()  # noqa: SLF001
    return _C._distributed_c10d.TCPStore  # noqa: SLF001


def newest_commands(control: socket.socket) -> list[tuple[dict[str, Any], list[int]]]:
    """Waits for commands, each with the listening sockets that it brings; empty at the end of the control socket.

    A store that was replaced or dropped before it was made is not made, nor asked: it would take the connections that
    are for the next one.
    """
    commands: list[tuple[dict[str, Any], list[int]]] = []
    control.setblocking(True)
    while True:
        try:
            message, listeners = next_command(control)
        except BlockingIOError:
            return commands
        if not message:
            return []
        command = json.loads(message)
        if command["do"] in {"serve", "drop"}:
            for listener in (each for _, unused in commands for each in unused):
                socket.close(listener)
            commands = []
        commands.append((command, listeners))
        control.setblocking(False)


def next_command(control: socket.socket) -> tuple[bytes, list[int]]:
    """Returns one command, and the sockets that it brings; empty at the end of the control socket.

    Raises:
        BlockingIOError: the socket does not block, and no command has arrived.
    """
    message, brought = b"", list[int]()
    while True:
        piece, descriptors, *_ = socket.recv_fds(control, len(LAST) + PIECE_BYTES, LISTENERS_MAX)
        if not piece:
            return b"", brought
        message, brought = message + piece[len(LAST) :], brought + descriptors
        if piece.startswith(LAST):
            return message, brought
        control.setblocking(True)  # the rest is on its way


def pieces_of(message: bytes) -> list[bytes]:
    *firsts, last = [message[at : at + PIECE_BYTES] for at in range(0, len(message), PIECE_BYTES)]
    return [*(MORE + each for each in firsts), LAST + last]


def main(control: socket.socket, mode: str) -> None:
    ask_no_name_server()
    if mode == "template":
        control, mode = forked(control), "quick"
    threading.Thread(target=end_with, args=(control.fileno(),), daemon=True).start()
    store_class = import_store(mode)
    answer(control, 0)
    store = None
    while commands := newest_commands(control):
        for command, listeners in commands:
            do, number, arguments = command.pop("do"), command.pop("number"), command
            if do in {"serve", "connect", "drop"}:
                if isinstance(store, lines_class()):
                    store.close()
                store = None  # before the next one: two would share the connections that come in
            try:
                if do == "serve":
                    store = serve(store_class, *listeners, **arguments)
                elif do == "connect":
                    store = connect(store_class, **arguments)
                answer(control, number, value=ask(store, do, **arguments) if do in QUESTIONS else None)
            except RuntimeError as error:  # torch raises it for all connection errors
                if do == "serve":
                    raise  # the agent tries the careful mode
                answer(control, number, error=str(error).partition("\n")[0][:WORDS_MAX] or type(error).__name__)


def forked(control: socket.socket) -> socket.socket:
    """Imports the store and forks; returns in each process that was forked, with its control socket."""
    if hasattr(libc := ctypes.CDLL(None), "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a thread that looks at the socket would be lost in a fork
    import_store("quick")
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("torch has started a thread")
    sibling = runpy.run_path(beside("workers/forkserver/clone.py"))["sibling"]
    gc.collect()
    gc.freeze()
    answer(control, 0)
    while commands := newest_commands(control):
        for command, (theirs,) in commands:
            pid = sibling()
            if not pid:
                control.close()
                return socket.socket(fileno=theirs)
            socket.close(theirs)
            answer(control, command["number"], value=pid)
    sys.exit()


def ask_no_name_server() -> None:
    """Limits this program to the hosts in `/etc/hosts`.

    torch looks up the name behind each connection's address, for its own log.  A name server that
    does not answer would hold up the store, and all its clients, for many seconds each time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "__nss_configure_lookup"):  # glibc, see its nss.h; other libraries have no such choice
        libc["__nss_configure_lookup"](b"hosts", b"files")


def end_with(control: int) -> None:
    """Ends the program with the control socket, even while torch waits for another machine, without a limit."""
    poll = select.poll()
    poll.register(control, 0)  # a hang-up is always reported
    poll.poll()
    os._exit(0)


def answer(control: socket.socket, number: int, **what: Any) -> None:
    try:
        control.setblocking(True)
        for piece in pieces_of(json.dumps({"number": number, **what}).encode()):
            control.send(piece)
    except ConnectionError:
        pass  # the agent is gone, and this process ends as well


def serve(store_class: Any, listener: int, *others: int, keys: dict[str, str]) -> Any:
    with socket.socket(fileno=socket.dup(listener)) as seen:
        host, port = seen.getsockname()[:2]
    host = loopback_address() if host in {"::", "0.0.0.0"} else host  # noqa: S104  compared only
    resend_soon()
    store = store_class(
        host_name=host,  # of its own client
        port=port,
        world_size=None,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    for key, value in keys.items():
        store.set(key, value)
    is_first = not forwarded  # else they have been since an earlier round
    for other in others:
        if is_first:
            forwarded.append(other)
            threading.Thread(target=forward, args=(other, host, port), daemon=True).start()
        else:
            socket.close(other)
    return store


forwarded: list[int] = []


def forward(listener: int, host: str, port: int) -> None:
    """Takes the connections of one socket to another, which is torch's: its store listens at one address only."""
    threading.stack_size(FORWARD_STACK_BYTES)
    with socket.socket(fileno=listener) as accepting:
        while True:
            try:
                connect_through(accepting.accept()[0], host, port)
            except OSError:  # the client is gone, or no more files can be opened for now
                time.sleep(RETRY_INTERVAL_S)  # noqa: TID251  a thread of its own


def connect_through(client: socket.socket, host: str, port: int) -> None:
    with client, socket.create_connection((host, port)) as store:
        for end in (client, store):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends = client.dup(), store.dup()
    for source, sink in (ends, ends[::-1]):
        threading.Thread(target=pump, args=(source, sink), daemon=True).start()


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Forwards one side's data, and then its end."""
    with suppress(OSError):
        while data := source.recv(FORWARD_BYTES):
            sink.sendall(data)
    for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with suppress(OSError):  # it is gone
            end.shutdown(how)


def loopback_address() -> str:
    """Returns IPv4's, unless this machine has none."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return "::1"
    return "127.0.0.1"


def connect(store_class: Any, host: str, port: int, limit_s: float, lines: int) -> Any:
    def connect_once() -> Any:
        store = store_class(
            host_name=host,
            port=port,
            world_size=None,
            is_master=False,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
        )
        resend_soon()
        return store

    return connect_once() if lines == 1 else lines_class()(connect_once, lines)


@cache
def lines_class() -> Any:
    return runpy.run_path(beside("workers/tcpstore/lines.py"))["Lines"]


def resend_soon() -> None:
    """Does what `base/host/resending.py` does, on all sockets here: torch does not tell which one is its own."""
    resend = runpy.run_path(beside("base/host/resending.py"))["resend_soon"]
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it is closed by now
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as conn:
                if conn.family != socket.AF_UNIX:
                    resend(conn)


# torch returns this as the value of a key that does not exist.
NEVER_WRITTEN = "aelastic reads"
QUESTIONS = {"get", "set", "compare_set"}


def ask(store: Any, do: str, key: str, **arguments: Any) -> str | None:
    """Returns a value in base64, since it may be any bytes, or `None`."""
    if store is None:
        raise RuntimeError("there is no store")
    if isinstance(store, lines_class()):
        answer: str | None = store.ask(lambda each: ask(each, do, key, **arguments))
        return answer
    if do == "get":
        # In one round trip: `get` would wait for a key that does not exist, and `check` takes another one.
        value = store.compare_set(key, NEVER_WRITTEN, NEVER_WRITTEN)
        return None if value == NEVER_WRITTEN.encode() else encoded(value)
    if do == "compare_set":
        expected, value = (binascii.a2b_base64(arguments[name]) for name in ("expected", "value"))
        return encoded(store.compare_set(key, expected, value))
    store.set(key, arguments["value"])
    return None


def encoded(value: bytes) -> str:
    return binascii.b2a_base64(value[:VALUE_BYTES_MAX], newline=False).decode()


def ignore_signals() -> None:
    """As in `host.signals`: workers need the store for what they save when all processes are asked to end."""
    runpy.run_path(beside("base/host/signals.py"))["ignore_signals"]()


def beside(path: str) -> str:
    """Returns the path of a file of the package, which this program does not import."""
    here = os.path.abspath(__file__)
    package = here.removesuffix("workers/tcpstore/server.py")
    return os.path.join(package, path)


if __name__ == "__main__":
    ignore_signals()
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
