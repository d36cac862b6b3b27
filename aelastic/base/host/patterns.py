"""Searches workers' output for users' patterns, in bounded time whatever these are.

Python's own search blocks all threads, and only the main thread can interrupt it.  So another process searches.
"""

from __future__ import annotations

import json
import logging
import socket
import subprocess
from collections.abc import Mapping, Sequence

import anyio

from aelastic.base.host import pattern_program, signals
from aelastic.base.host.children import start_program, wait_ended, waited_for
from aelastic.base.host.pattern_program import FOUND, LIMIT_S, TOO_LONG

_log = logging.getLogger(__name__)

# Limit for all patterns together: then the failure is reported with what is known.
ALL_S = 1.0
ANSWER_BYTES_MAX = 64
# A killed process is gone either at once or not soon.
_REAP_TIMEOUT_S = 0.1


class PatternSearch:
    """A process that searches one text at a time, restarted whenever it has ended.

    Args:
        env: its environment; `None`: this process's own.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = env
        self._turn = anyio.Lock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Starts the process, unless it runs.  Call it well before the first text, so that nothing waits for the start.

        Raises:
            OSError: the host refuses it.
        """
        if self._popen is not None and self._popen.poll() is None:
            return
        self._forget()
        # Messages arrive whole and in order: `SOCK_SEQPACKET` in unix(7).
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._popen = start_program(
                    [signals.__file__, pattern_program.__file__],
                    [str(theirs.fileno())],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=self._env,
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        self._socket = ours

    async def found(self, patterns: Sequence[str], text: str) -> frozenset[str]:
        """Returns the patterns that have a match in the text.

        A pattern is treated as not matching, with a warning, if it takes more than `LIMIT_S` of CPU time, or if it has
        not been searched for within `ALL_S`, which is for all of them together.
        """
        answers: list[bytes] = []
        trouble = f"not within {ALL_S:g} s"
        with anyio.move_on_after(ALL_S):
            async with self._turn:
                try:
                    self.start()
                    await self._ask(patterns, text, answers)
                except OSError as error:
                    trouble = str(error)
                finally:
                    if len(answers) < len(patterns):  # a late answer would be taken for one to the next text
                        await self.aclose()
        searched, unsearched = patterns[: len(answers)], patterns[len(answers) :]
        for pattern, answer in zip(searched, answers, strict=True):
            if answer == TOO_LONG:
                limit_ms = LIMIT_S * 1e3
                _log.warning(
                    "the pattern %r took more than %g ms on %.200r and is treated as not matching",
                    pattern,
                    limit_ms,
                    text,
                    extra={"topic": "a-pattern-of-a-rule-is-too-slow"},
                )
        for pattern in unsearched:
            _log.warning(
                "the pattern %r could not be searched for and is treated as not matching: %s",
                pattern,
                trouble,
                extra={"topic": "a-pattern-of-a-rule-is-too-slow"},
            )
        return frozenset(pattern for pattern, answer in zip(searched, answers, strict=True) if answer == FOUND)

    async def _ask(self, patterns: Sequence[str], text: str, answers: list[bytes]) -> None:
        assert self._socket is not None
        self._socket.send(json.dumps([text, *patterns]).encode())
        while len(answers) < len(patterns):
            await anyio.wait_readable(self._socket)
            answer = self._socket.recv(ANSWER_BYTES_MAX)
            if not answer:
                raise ConnectionResetError("the search process died")
            answers.append(answer)

    async def aclose(self) -> None:
        """Ends the process.  The next text starts another."""
        if self._popen is not None:
            self._popen.kill()
            with anyio.move_on_after(_REAP_TIMEOUT_S, shield=True):
                await wait_ended(self._popen.pid)
            self._popen.poll()
        self._forget()

    def _forget(self) -> None:
        if self._popen is not None:
            waited_for.discard(self._popen.pid)
        if self._socket is not None:
            self._socket.close()
        self._popen = self._socket = None
