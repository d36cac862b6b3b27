"""How the text of an option becomes its value.

A reader takes the text, wherever it came from, and gives the value; a `ValueError` says what is wrong with
it and what to do.  Nothing here looks at the machine, nor at other options.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from aelastic.output_patterns import HANG_TIMEOUT_MIN_S, HANG_TIMEOUT_REMEDY, pattern_problem, progress_problem
from aelastic.spec import (
    HANG_SIGNALS,
    HANG_STEPS_REMEDY,
    LOCAL_WORLD_SIZE_MAX,
    LOG_BYTES_MIN,
    TEXTFILE_SUFFIX,
    HangSignal,
    run_id_problem,
)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
PORT_MAX = 65535  # ports have 16 bits: tcp(7)
# What the agent cannot (signal(7)) or must not take over: SIGCHLD tells of exits.
_UNHANDLED = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})

# What `--rdzv-conf` cannot say: torch takes these from elsewhere, too.
_OPTIONS_OF_THEIR_OWN = {
    "backend": "--rdzv-backend",
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}


def read_text(text: str) -> str:
    return text


def read_textfile(text: str) -> Path:
    if not text.endswith(TEXTFILE_SUFFIX):
        raise ValueError(f"use a name that ends in {TEXTFILE_SUFFIX}: node_exporter reads no others")
    return Path(text)


def read_path(text: str) -> Path:
    if not text:
        raise ValueError("name a folder")
    return Path(text)


def read_preload(text: str) -> tuple[str, ...] | Literal["auto"]:
    if text in {"auto", "off", ""}:
        return "auto" if text == "auto" else ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name in {"auto", "off"}:
            raise ValueError(f"{name} stands alone: leave the modules out, or name modules only")
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(
                f"{name!r} is not the name of a module: use names such as torch,torch.distributed; or auto, or off"
            )
    return tuple(dict.fromkeys(names))


def read_stripped(text: str) -> str:
    return text.strip()


def read_flag(text: str) -> bool:
    try:
        return bool(int(text))
    except ValueError:
        raise ValueError("use 1 for yes, 0 or nothing for no") from None


def read_count(text: str) -> int:
    count = _int(text)
    if count < 0:
        raise ValueError("use 0 or more")
    return count


def read_port(text: str) -> int:
    port = _int(text)
    if not 0 <= port <= PORT_MAX:
        raise ValueError(f"use a port from 0 (a free one) to {PORT_MAX}")
    return port


def read_seconds(text: str) -> float:
    seconds = _float(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("use seconds, 0 or more")
    return seconds


def read_grace(text: str) -> float | Literal["shutdown-timeout"]:
    try:
        return "shutdown-timeout" if text == "shutdown-timeout" else read_seconds(text)
    except ValueError:
        raise ValueError("use seconds, 0 or more, or shutdown-timeout") from None


def read_size(text: str) -> int:
    number, unit = text[:-1], text[-1:].upper()
    if unit not in _UNITS:
        number, unit = text, ""
    if not (number.isascii() and number.isdigit() and int(number) * _UNITS[unit] >= LOG_BYTES_MIN):
        raise ValueError("use 1M or more, as in 500M or 2G")
    return int(number) * _UNITS[unit]


def read_interval(text: str) -> float:
    interval = _float(text)
    if not (math.isfinite(interval) and interval > 0):
        raise ValueError("use seconds above 0")
    return interval


class Steps(NamedTuple):
    """A time in steps of a job."""

    times: float


def read_hang_timeout(text: str) -> float | Steps:
    """Seconds; or times the median step, as in 5x."""
    number, times, rest = text.strip().partition("x")
    if not times:
        return read_silence(text)
    steps = Steps(_float(number))
    if rest or not 1 < steps.times < math.inf:
        raise ValueError(HANG_STEPS_REMEDY)
    return steps


def read_silence(text: str) -> float:
    timeout_s = _float(text)
    if not HANG_TIMEOUT_MIN_S <= timeout_s < math.inf:
        raise ValueError(HANG_TIMEOUT_REMEDY)
    return timeout_s


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("use a whole number") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("use a number of seconds") from None


def one_of(*choices: str) -> Callable[[str], str]:
    """A reader of one of some words, which it has as `args`."""
    return partial(_read_choice, choices)


def _read_choice(choices: Sequence[str], text: str) -> str:
    if text not in choices:
        raise ValueError(f"use one of {', '.join(choices)}")
    return text


def read_name(text: str) -> str:
    if not text:
        raise ValueError("use a name that is not empty")
    return text


def read_address(text: str) -> str:
    # torchrun takes an IPv6 address in brackets, and hands it to the workers without.
    address = text.strip().removeprefix("[").removesuffix("]")
    if not address:
        raise ValueError("use a host name or an address")
    return address


def read_run_id(text: str) -> str:
    if problem := run_id_problem(text):
        raise ValueError(problem)
    return text


def read_pairs(text: str) -> dict[str, str]:
    """`key=value` pairs, separated by commas; the last of a key wins."""
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


def read_ranks(text: str) -> frozenset[int] | None:
    """Ranks separated by commas; nothing at all is all of them."""
    if not text.strip():
        return None
    try:
        ranks = frozenset(int(rank) for rank in text.split(","))
    except ValueError:
        raise ValueError("use local ranks separated by commas, such as 0,1") from None
    if min(ranks) < 0:
        raise ValueError("use local ranks from 0 up")
    return ranks


def read_filters(text: str) -> tuple[str, ...]:
    """Texts separated by commas, of which two stand for a comma that is part of a text."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")) if text else ()


def read_signs(text: str) -> tuple[HangSignal, ...]:
    """Signs of life separated by commas, each once, in our order."""
    chosen = {part.strip() for part in text.split(",")}
    if not chosen <= set(HANG_SIGNALS):
        raise ValueError(f"use one or more of {', '.join(HANG_SIGNALS)}, separated by commas")
    return tuple(sign for sign in HANG_SIGNALS if sign in chosen)


def read_expected(text: str) -> tuple[str, float]:
    """A pattern and seconds; colons but the last are the pattern's."""
    pattern, colon, seconds = text.rpartition(":")
    if not colon or not seconds.strip():
        raise ValueError("the seconds are missing: use REGEX:SECONDS, as in 'loss=:120'")
    if problem := pattern_problem(pattern):
        raise ValueError(f"{problem}: use REGEX:SECONDS, as in 'loss=:120'")
    return pattern, read_silence(seconds)


def read_progress(text: str) -> str:
    if problem := progress_problem(text):
        raise ValueError(problem)
    return text


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
    """A number of workers, or the word for what to count."""
    if text in {"auto", "cpu", "gpu", "xpu"}:
        return text
    try:
        workers = int(text)
    except ValueError:
        raise ValueError("use a number of workers, or auto, cpu, gpu or xpu") from None
    if workers < 1:
        raise ValueError("at least 1 worker is needed")
    if workers > LOCAL_WORLD_SIZE_MAX:
        raise ValueError(f"use at most {LOCAL_WORLD_SIZE_MAX}")
    return workers


def read_signals(text: str) -> tuple[signal.Signals, ...]:
    """Signals by name, in the order given, each once; no name at all is no signal."""
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in signal.Signals.__members__:
            raise ValueError(f"{name} is not a signal of this system: use names such as SIGTERM,SIGUSR1")
        if signal.Signals[name] in _UNHANDLED:
            raise ValueError(f"{name} cannot be handled: leave it out")
    return tuple(dict.fromkeys(signal.Signals[name] for name in names))
