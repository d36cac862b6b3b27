"""Hostile input for the sockets and files of an agent, drawn by Hypothesis.

Bytes, invalid or meaningless JSON, and messages that are almost right.  `Sent` keeps the latest inputs, because the death
of an agent is noticed only a few inputs later.
"""

from __future__ import annotations

import copy
import json
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from aelastic.base.record import Record
from aelastic.rdzv.protocol.codec import FRAME_MAX, encode
from kit.effort import HOSTILE_INPUTS
from kit.waiting import DEADLINE_S

# An agent that died of one input would also fail on all smaller ones, so Hypothesis does not shrink them.
hostile = settings(
    max_examples=HOSTILE_INPUTS, deadline=None, phases=[p for p in settings().phases if p.name in {"explicit", "generate", "reuse"}],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip

# Hypothesis warns about an example that is long to print, and prints it anyway.
LONG_EXAMPLES = "ignore:Generating overly large repr"

NUMBERS = st.sampled_from(
    [-(2**63), -7, -1, 0, 1, 2, 3, 4, 65536, 2**31, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 10**400, -5.0, 0.0, 1e-300,
     1e300, float("inf"), -float("inf"), float("nan")]
)  # fmt: skip
TEXTS = st.text(max_size=20) | st.sampled_from(
    ["", " ", "a", "a\0b", "\x1b[2J", "a\nb", "\ud800", "é" * 300, "x" * 300, "x" * 41_000, "a..b", "." * 64, "n" * 64, "::1%9",
     "*", "-1", "1e999", "../..", "%s", "{0}", "$HOME", "failed", "busy", "ready", "\N{ARABIC-INDIC DIGIT THREE}", "²"]
)  # fmt: skip
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
DEEP = st.sampled_from([(b"[", b"]"), (b'{"a":', b"}")]).flatmap(
    lambda pair: st.integers(1, 60_000).map(lambda depth: pair[0] * depth + b"1" + pair[1] * depth)
)
GARBAGE = (
    st.binary(max_size=200)
    | DEEP
    | st.sampled_from([b"x" * 70_000, b"9" * 9_000, b"\xff\xfe{\0}\0", b"GET / HTTP/1.0\r\n\r\n"])
)


@st.composite
def mutated(draw: st.DrawFn, value: Any, most: int = 3) -> Any:
    """JSON in which some values or names are replaced."""
    value = {"": copy.deepcopy(value)}
    for _ in range(draw(st.integers(0, most))):
        where: Any = value
        while True:
            keys = [*where] if isinstance(where, dict) else [*range(len(where))]
            key = draw(st.sampled_from(keys))
            if isinstance(where[key], dict | list) and where[key] and draw(st.integers(0, 3)):
                where = where[key]
                continue
            if where is not value and isinstance(where, dict) and not draw(st.integers(0, 5)):
                where[draw(st.text(max_size=5))] = where.pop(key)
            elif where is not value and isinstance(where, dict) and not draw(st.integers(0, 9)):
                del where[key]
            else:
                where[key] = draw(VALUES)
            break
    return value[""]


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@st.composite
def frames(draw: st.DrawFn, words: Sequence[Record], begin: Sequence[Record] = ()) -> bytes:
    """The data sent on one connection: some messages, some that are almost messages, and some arbitrary bytes.

    Args:
        words: messages that are slightly changed.
        begin: messages that most connections send first.
    """
    data = b"".join(map(encode, begin)) if draw(st.integers(0, 3)) else b""  # type: ignore[arg-type]
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.integers(0, 7))
        if kind < 6:
            value = json.loads(encode(draw(st.sampled_from(list(words))))[4:])  # type: ignore[arg-type]
            data += frame(json.dumps(draw(mutated(value, most=draw(st.sampled_from([0, 1, 1, 3]))))).encode())
        elif kind == 6:
            data += frame(draw(GARBAGE))
        else:
            size = draw(st.sampled_from([0, 1, FRAME_MAX, FRAME_MAX + 1, 2**31, 2**32 - 1]))
            data += size.to_bytes(4, "big") + draw(GARBAGE)
    return data


class Sent:
    """The inputs sent to an agent that should survive them.

    Args:
        check: fails once the agent has not survived.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check, self._last, self.count = check, deque[bytes](maxlen=20), 0

    def add(self, data: bytes) -> None:
        self.count += 1
        self._last.append(data)
        try:
            self._check()
        except BaseException:
            print(f"after input {self.count}; the last were:", *(f"{each[:2000]!r}" for each in self._last), sep="\n")  # noqa: T201
            raise


def talk(sock: socket.socket, data: bytes, *, half_closes: bool = True) -> bytes:
    """Sends all data and receives until the other end closes, or until it has answered.

    Raises:
        TimeoutError: the other end does neither.
    """
    answer = b""
    with sock:
        sock.settimeout(DEADLINE_S)
        try:
            sock.sendall(data)
            if half_closes:
                sock.shutdown(socket.SHUT_WR)
            while received := sock.recv(1 << 16):
                answer += received
                if not half_closes:
                    break
        except TimeoutError:
            raise
        except OSError:
            pass  # the other end reset the connection
    return answer


def put(path: Path, data: bytes) -> None:
    """Writes a file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.rename(path)
