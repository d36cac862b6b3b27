"""Effects of a module on the process that imported it: reasons not to fork workers from there.

Does not use a list of modules; compares the process before an import and after it.

Part of the fork server's program: imports nothing of the package.
"""

import os
import signal
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# Devices that any process may hold.  All others below /dev belong to hardware, whose driver expects one process.
_PLAIN_DEVICES = (
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/pts/",
    "/dev/shm/",  # noqa: S108  not written to
)

_GENERATORS = (
    ("random", "Random"),
    ("numpy.random", "Generator"),
    ("numpy.random", "RandomState"),
    ("torch", "Generator"),
)
_SEEDED_ANEW = (("random", "_inst"), ("numpy.random.mtrand", "_rand"), ("torch", "default_generator"))


class ProcessState:
    """The state of a process that would be wrong, or different, in a fork of it."""

    def __init__(self) -> None:
        self.threads = _threads()
        self.sockets = len([place for place in _descriptors() if place.startswith("socket:")])
        devices = [place for place in (*_descriptors(), *_mapped()) if place.startswith("/dev/")]
        self.devices = {place for place in devices if not place.startswith(_PLAIN_DEVICES)}
        self.children = _has_children()
        self.accelerator = _initialized_accelerator()
        self.handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self.cwd, self.umask = _cwd(), _umask()
        self.streams = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}

    def reasons_against(self, before: "ProcessState") -> list[str]:
        """Returns the effects of an import since then, one clause for each."""
        devices = sorted(self.devices - before.devices)
        changed = [number for number, handler in self.handlers.items() if before.handlers[number] != handler]
        names = [signal.Signals(number).name if number in set(signal.Signals) else "a signal" for number in changed]
        done = {
            "starts a thread": self.threads > before.threads,
            "opens a socket": self.sockets > before.sockets,
            f"opens {devices[0] if devices else ''}": bool(devices),
            "starts a process": self.children and not before.children,
            f"initializes {self.accelerator}": bool(self.accelerator) and not before.accelerator,
            f"handles {names[0] if names else ''}": bool(changed),
            "changes the working directory": self.cwd != before.cwd,
            "changes the umask": self.umask != before.umask,
        }
        found = [clause for clause, is_so in done.items() if is_so]
        found += [f"replaces sys.{name}" for name, stream in self.streams.items() if stream is not before.streams[name]]
        return found


def _threads() -> int:
    """Returns how many threads there are, including those that a fork would lose.

    A library may stop its threads for a fork, and start them again when it needs them (as OpenBLAS does): those are
    gone after an ordinary fork, and do not count.
    """
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        count = len(os.listdir("/proc/self/task"))
    return count


def _descriptors() -> list[str]:
    places = []
    for number in os.listdir("/proc/self/fd"):
        try:
            places.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            pass  # the descriptor of the listing itself
    return places


def _mapped() -> set[str]:
    with open("/proc/self/maps") as file:
        return {line.split(maxsplit=5)[-1].strip() for line in file if "/dev/" in line}


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _cwd() -> tuple[int, int]:
    """Identifies the working folder, which may have been removed and have no path."""
    folder = os.stat(".")
    return folder.st_dev, folder.st_ino


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _initialized_accelerator() -> str:
    """Returns the accelerator, such as `CUDA`, on which torch has a context; otherwise ""."""
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu", "mtia"):
        module = getattr(torch, name, None)
        if module is not None and getattr(module, "is_initialized", bool)():
            return name.upper()
    return ""


def kept_generators() -> list[tuple[str, str]]:
    """Returns random generators that modules keep, as module and attribute: all workers get them in this state.

    The default generators of libraries are not included: a worker reseeds them.
    """
    kinds = {kind for place in _GENERATORS if (kind := _value_at(*place)) is not None}
    seen = {id(_value_at(*place)) for place in _SEEDED_ANEW}
    found = []
    modules: dict[str, Any] = dict(sorted(sys.modules.items()))  # a program may have put any object there
    for module_name, module in modules.items():
        if not isinstance(module, ModuleType) or kinds.isdisjoint(map(type, vars(module).values())):
            continue
        for name, value in vars(module).items():
            if type(value) in kinds and id(value) not in seen:
                seen.add(id(value))
                found.append((module_name, name))
    return found


def _value_at(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


class WatchedEnviron(os._Environ):  # type: ignore[type-arg]  # noqa: SLF001  its class is the only way to see reads of it
    """`os.environ` that remembers which variables were read.

    Copying the whole environment is not reading its variables.
    """

    read: set[str] = set()  # noqa: RUF012  one for the process
    _expected: tuple[str, ...] = ()  # the names that a copy looks up next, the last one first

    def __iter__(self) -> Iterator[str]:
        keys = tuple(super().__iter__())
        for key in keys:
            self._expected = (key,)
            yield key
        self._expected = keys[::-1]  # `dict` asks for the names first, then for each value

    def __getitem__(self, key: str) -> str:
        if self._expected[-1:] == (key,):
            self._expected = self._expected[:-1]
        else:
            self._expected = ()
            self.read.add(os.fsdecode(key))  # `os.environb` has bytes
        value: str = super().__getitem__(key)
        return value


def watch_environ() -> set[str]:
    """Returns a set that collects the names of variables that are read from now on."""
    os.environ.__class__ = os.environb.__class__ = WatchedEnviron
    return WatchedEnviron.read


def unwatch_environ() -> None:
    """Restores `os.environ`."""
    os.environ.__class__ = os.environb.__class__ = os._Environ  # noqa: SLF001
