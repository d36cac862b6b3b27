"""Converts the text of an option to its value.

A reader takes the text, whatever its source, and returns the value; its `ValueError` names the remedy.  Whether a job
can have that value is a rule of `aelastic.settings`.  Nothing here depends on the machine, or on other options.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from aelastic import settings
from aelastic.diagnose.hangs.options import HANG_SIGNALS, ExpectedOutput, HangSignal
from aelastic.settings import RULES

T = TypeVar("T")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Signals that the agent cannot (signal(7)) or must not handle: SIGCHLD reports exits.
_UNHANDLED = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})

# Keys that `--rdzv-conf` does not take, as with torch: they have options.
_OPTIONS_OF_THEIR_OWN = {
    "backend": "--rdzv-backend",
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}


def read_path(text: str) -> Path:
    if not text:
        raise ValueError("name a file or folder")
    return Path(text)


def read_preload(text: str) -> tuple[str, ...] | Literal["auto"]:
    if text in {"auto", "off", ""}:
        return "auto" if text == "auto" else ()
    names = tuple(name.strip() for name in text.split(","))
    if alone := {"auto", "off"}.intersection(names):
        raise ValueError(f"{min(alone)} cannot be combined with modules: use it alone, or name only modules")
    return tuple(dict.fromkeys(names))


def _read_as(kind: Callable[[str], T], text: str, remedy: str) -> T:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(remedy) from None


def read_flag(text: str) -> bool:
    return bool(_read_as(int, text, "use 1 for yes, 0 or nothing for no"))


def read_int(text: str) -> int:
    return _read_as(int, text, "use a whole number")


def read_seconds(text: str) -> float:
    return _read_as(float, text, "use a number of seconds")


def read_grace(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # a word


def read_size(text: str) -> int:
    number, unit = text[:-1], text[-1:].upper()
    if unit not in _UNITS:
        number, unit = text, ""
    if not (number.isascii() and number.isdigit()):
        raise ValueError("use a size, as in 500M or 2G")
    return int(number) * _UNITS[unit]


class Steps(NamedTuple):
    """A time as a multiple of a job's median step."""

    times: float


def read_hang_timeout(text: str) -> float | Steps:
    """Reads seconds, or a multiple of the median step, as in 5x."""
    number, times, rest = text.strip().partition("x")
    seconds = read_seconds(number)
    _keep(RULES["hang_timeout_steps" if times else "hang_timeout_s"], float("nan") if rest else seconds)
    return Steps(seconds) if times else seconds


def _keep(rule: settings.Rule, value: object) -> None:
    if remedy := rule(value):
        raise ValueError(remedy)


def one_of(*choices: str) -> Callable[[str], str]:
    """Returns a reader of one of these words, which are its `args[0]`."""
    return partial(_read_choice, choices)


def _read_choice(choices: Sequence[str], text: str) -> str:
    _keep(settings.one_of(*choices), text)
    return text


def read_address(text: str) -> str:
    # torchrun accepts an IPv6 address in brackets, and passes it to the workers without them.
    address = text.strip().removeprefix("[").removesuffix("]")
    if not address:
        raise ValueError("use a host name or an address")
    return address


def read_pairs(text: str) -> dict[str, str]:
    """Reads `key=value` pairs, separated by commas; the last value of a key wins."""
    pairs = {}
    for pair in text.split(",") if text.strip() else ():
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key:
            raise ValueError("use key=value pairs, separated by commas")
        if not value:
            raise ValueError(f"{key} has no value: use {key}=value")
        if key in _OPTIONS_OF_THEIR_OWN:
            raise ValueError(f"{key} has an option of its own: use {_OPTIONS_OF_THEIR_OWN[key]}")
        pairs[key] = value
    return pairs


def repeated_keys(text: str) -> list[str]:
    """Returns the keys of `key=value` pairs that have several values."""
    values: dict[str, set[str]] = {}
    for pair in text.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        values.setdefault(key, set()).add(value)
    return [key for key, its in values.items() if len(its) > 1]


def read_ranks(text: str) -> frozenset[int] | None:
    """Reads ranks separated by commas; an empty text is `None`, which means all ranks."""
    if not text.strip():
        return None
    return frozenset(_read_as(int, rank, "use ranks separated by commas, such as 0,1") for rank in text.split(","))


def read_filters(text: str) -> tuple[str, ...]:
    """Reads texts separated by commas; two commas are a comma within a text."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")) if text else ()


def read_signs(text: str) -> tuple[HangSignal, ...]:
    """Reads signs of life separated by commas; returns each once, in our order; empty if one is unknown."""
    chosen = {part.strip() for part in text.split(",")}
    return tuple(sign for sign in HANG_SIGNALS if sign in chosen) if chosen <= {*HANG_SIGNALS} else ()


def read_expected(text: str) -> ExpectedOutput:
    """Reads a pattern and seconds; all colons except the last belong to the pattern."""
    pattern, colon, seconds = text.rpartition(":")
    if not colon or not seconds.strip():
        raise ValueError("the seconds are missing: use REGEX:SECONDS, as in 'loss=:120'")
    return ExpectedOutput(pattern, read_seconds(seconds))


def read_nodes(text: str) -> tuple[int, int]:
    try:
        fewest, *rest = (int(part) for part in text.split(":"))
        (most,) = rest or [fewest]
    except ValueError:
        raise ValueError("use a number of nodes, or a range MIN:MAX") from None
    if fewest < 1:
        raise ValueError("at least 1 node is needed")
    if fewest > most:
        raise ValueError(f"the minimum {fewest} is above the maximum {most}: use MIN:MAX")
    return fewest, most


def read_workers(text: str) -> int | str:
    """Reads a number of workers, or a word that names what to count, such as `gpu`."""
    if text in {"auto", "cpu", "gpu", "xpu"}:
        return text
    workers = _read_as(int, text, "use a number of workers, or auto, cpu, gpu or xpu")
    _keep(RULES["local_world_size"], workers)
    return workers


def read_signal(text: str) -> signal.Signals:
    """Reads one signal, with or without SIG."""
    short = text.strip().upper()
    signums = read_signals(f"SIG{short}" if hasattr(signal, f"SIG{short}") else text)
    if len(signums) != 1:
        raise ValueError("use the name of one signal, such as SIGTERM")
    return signums[0]


class OnSignal(NamedTuple):
    """The agent's action on a signal: drain within `drain_s` or, if that is `None`, pass it on to the workers."""

    signum: signal.Signals
    drain_s: float | None


def read_on_signal(text: str) -> tuple[OnSignal, ...]:
    """Reads the actions on signals: `USR1=drain:110,USR2=pass`."""
    found = []
    for part in text.split(",") if text.strip() else ():
        name, _, what = (piece.strip() for piece in part.partition("="))
        verb, _, seconds = what.partition(":")
        if verb not in {"drain", "pass"} or (verb == "pass" and seconds):
            raise ValueError("use SIGNAL=drain:SECONDS or SIGNAL=pass, separated by commas, as in USR1=drain:110")
        drain_s = None if verb == "pass" else read_seconds(seconds)
        if drain_s is not None and not 1 <= drain_s < float("inf"):
            raise ValueError("give at least 1 s to drain in, as in USR1=drain:110")
        found.append(OnSignal(read_signal(name if name.upper().startswith("SIG") else f"SIG{name}"), drain_s))
    if len({each.signum for each in found}) < len(found):
        raise ValueError("name each signal once")
    return tuple(found)


def read_hold(text: str) -> float | None:
    """Reads how long workers are left running after a failure: `hold`, `hold:SECONDS`; `None` for `stop`."""
    what, colon, seconds = text.partition(":")
    if what == "hold" and bool(seconds) == bool(colon):
        return read_seconds(seconds) if seconds else float("inf")
    if text == "stop":
        return None
    raise ValueError("use stop, hold, or hold:SECONDS")


def read_wrap(text: str) -> tuple[str, ...]:
    """Reads a command, split as a shell would."""
    if not text:
        return ()
    import shlex  # jobs without --wrap do not pay for these
    import shutil

    words = tuple(shlex.split(text))
    if words and shutil.which(words[0]) is None:
        raise ValueError(f"{words[0]} is not found: name a program that is on PATH")
    return words


def read_policy(text: str) -> str:
    """Reads rules, or those in the file named after `@`."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file cannot be read ({getattr(error, 'strerror', None) or error})") from None


def read_admit(text: str) -> float:
    """Reads how long a new node waits for all ranks to save: `saved`, `saved:SECONDS`; 0 for `at-once`."""
    when, _, seconds = text.partition(":")
    if text == "at-once":
        return 0.0
    within_s = read_seconds(seconds or "120") if when == "saved" else 0.0
    if not 1 <= within_s < float("inf"):
        raise ValueError("use at-once, saved, or saved:SECONDS, at least 1 s")
    return within_s


def read_signals(text: str) -> tuple[signal.Signals, ...]:
    """Reads signals by name; returns each once, in the given order; none if the text is empty."""
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in signal.Signals.__members__:
            raise ValueError(f"{name} is not a signal of this system: use names such as SIGTERM,SIGUSR1")
        if signal.Signals[name] in _UNHANDLED:
            raise ValueError(f"{name} cannot be handled: leave it out")
    return tuple(dict.fromkeys(signal.Signals[name] for name in names))
