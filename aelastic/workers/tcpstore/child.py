"""The child process that holds torch's TCPStore for the agent: its start, its answers, its end.

The agent never imports torch: that takes a second, holds the interpreter's lock and would stall the loop.  So a
child does (`server.py`), which serves a store or is a client of one.  `StoreHost` and the cell on a
TCPStore each have their own.  It starts when it is first needed, in quick mode; one that dies before it has
carried out anything is started once more in careful mode.  It ends with the agent, by whatever death.

Commands and answers are numbered: an answer that no task waits for any more is dropped.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import anyio

from aelastic.base.host import proc_table
from aelastic.base.host.children import start_helper, wait_ended, waited_for
from aelastic.base.host.shortages import shortage_of
from aelastic.base.record import Record

_log = logging.getLogger(__name__)

# A killed process is gone at once, unless the kernel holds it (it may be importing torch from a dead network disk).
END_TIMEOUT_S = 5.0
# torch may come from a slow network disk, and that of many nodes at once.
START_TIMEOUT_S = 300.0
_SERVER = Path(__file__).with_name("server.py")
FORKED_CONTROL = 63  # the number of its socket in a forked child, where low ones are taken
READY = 0  # the number of the first answer, which is to no command
REPLACES = {"serve", "drop"}  # commands that make those before them void
# The kernel keeps some hundred commands for a child that reads none (it may be importing torch from a dead disk); as
# many more wait here.
UNSENT_MAX = 100
# As in `server.py`.
PIECE_BYTES = 64 * 1024
MORE, LAST = b"+", b"."


def pieces_of(message: bytes) -> list[bytes]:
    """As in `server.py`."""
    *firsts, last = [message[at : at + PIECE_BYTES] for at in range(0, len(message), PIECE_BYTES)]
    return [*(MORE + each for each in firsts), LAST + last]


class Answer(Record):
    """The child's answer to one command."""

    number: int
    value: Any = None
    error: str = ""


class Death(Exception):
    """The child has died, and with it the store.

    Args:
        code: its exit code, as in `subprocess`; `None` if it is not known.
        has_worked: it had carried out a command.
        is_hopeless: another one would die the same way.
        refused: why the host did not let it start; "" if it did.
    """

    def __init__(self, code: int | None, *, has_worked: bool, is_hopeless: bool, refused: str = "") -> None:
        super().__init__(code)
        self.code, self.has_worked, self.is_hopeless, self.refused = code, has_worked, is_hopeless, refused


class Refusal(Exception):
    """torch could not carry out the command; the text is torch's reason."""


class Unanswered(Exception):
    """The child has not answered in time, but still may.

    Args:
        number: of the command.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Program(Protocol):
    """What `subprocess.Popen` and a forked process share."""

    pid: int

    def kill(self) -> None: ...

    def poll(self) -> int | None: ...


# Starts a script with its arguments, and with descriptors by their numbers there, in an interpreter that has torch;
# returns `None` if there is none.
Fork: TypeAlias = Callable[[Sequence[str], Mapping[int, int]], Awaitable[Program | None]]


class StoreProcess:
    """One child at a time.

    One task at a time waits in `receive`, `ask` or `answer_to`, and may be cancelled at any moment.

    Args:
        env: the environment of the child.
        purpose: what it did, worded for a message: "served the workers' store".
        mode: of the program; "careful" once "quick" has failed.
        fork: starts a child, if that works; otherwise an exec does.
    """

    def __init__(self, env: Mapping[str, str], purpose: str, *, mode: str = "quick", fork: Fork | None = None) -> None:
        self._env = env
        self._purpose = purpose
        self._popen: Program | None = None
        self.fork = fork  # until a forked child has failed by itself
        self._is_forked = False
        self._control: socket.socket | None = None
        self._mode = mode
        self._is_ready = self._has_worked = False  # of the child that runs now
        self._sent = self._answered = READY  # the last numbers
        self._unsent: deque[tuple[deque[bytes], list[int]]] = deque()  # that the socket did not take
        self._is_amid_command = False  # the child has had some pieces of a command, and not the last one
        self._received = b""  # the first pieces of an answer

    @property
    def is_running(self) -> bool:
        """Whether there is a child, as far as we know."""
        return self._popen is not None

    @property
    def is_busy(self) -> bool:
        """Whether it is working for a caller that no longer waits."""
        return self._popen is not None and self._answered != self._sent

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen is not None else None

    async def start(self) -> None:
        """Starts a child; commands sent from then on wait until it has torch.

        Raises:
            OSError: the host refuses it.
        """
        assert self._popen is None
        # Each with a socket of its own: one that is forked late, when it is not waited for, finds its own closed.
        for begin in (self._forked, self._exec):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            try:
                with theirs:
                    self._popen = await begin(theirs.fileno())
            finally:
                if self._popen is None:
                    ours.close()
            if self._popen is not None:
                break
        self._control, self._answered = ours, self._sent
        self._is_ready, self._has_worked, self._is_forked = False, False, begin == self._forked

    async def _exec(self, control: int) -> Program | None:
        return start_helper(
            # -P: the program must not import our modules, which are in its folder.
            [sys.executable, "-P", str(_SERVER), str(control), self._mode],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(control,),
        )

    async def _forked(self, control: int) -> Program | None:
        words = [str(_SERVER), str(FORKED_CONTROL), self._mode]
        return None if self.fork is None else await self.fork(words, {FORKED_CONTROL: control})

    def send(self, do: str, *descriptors: int, **arguments: Any) -> int:
        """Sends a command to the child, if there is one, and returns its number.  Does not wait."""
        self._sent += 1
        if self._control is None:
            return self._sent
        if do in REPLACES:
            self._drop_unsent()  # the child would also drop them
        pieces = deque(pieces_of(json.dumps({"do": do, "number": self._sent, **arguments}).encode()))
        if self._unsent or not self._has_sent(pieces, descriptors):
            assert self._popen is not None
            try:
                self._unsent.append((pieces, [os.dup(each) for each in descriptors]))
            except OSError:  # no more files may be opened
                self._popen.kill()
            if len(self._unsent) > UNSENT_MAX:
                self._popen.kill()  # it no longer reads; the next child is sent everything that matters
        return self._sent

    def _has_sent(self, pieces: deque[bytes], descriptors: Sequence[int]) -> bool:
        """Returns False if the socket takes no more for now; pieces that it has taken are removed."""
        assert self._control is not None
        try:
            while pieces:
                is_first = not self._is_amid_command
                socket.send_fds(self._control, [pieces[0]], descriptors if is_first else [])
                self._is_amid_command = pieces.popleft().startswith(MORE)
        except BlockingIOError:
            return False
        except OSError:
            pass  # it has died: the wait for an answer finds that out
        return True

    def _send_unsent(self) -> None:
        while self._unsent and self._has_sent(*self._unsent[0]):
            self._drop_first_unsent()

    def _drop_unsent(self) -> None:
        """Drops the commands that the child has no piece of."""
        begun = self._unsent.popleft() if self._unsent and self._is_amid_command else None
        while self._unsent:
            self._drop_first_unsent()
        if begun is not None:
            self._unsent.append(begun)

    def _drop_first_unsent(self) -> None:
        for each in self._unsent.popleft()[1]:
            os.close(each)

    async def receive(self) -> Answer:
        """Waits for the child's next answer.

        Raises:
            Death: it has died; there is no child now.
        """
        assert self._control is not None
        while True:
            try:
                piece = self._control.recv(len(LAST) + PIECE_BYTES)
            except BlockingIOError:
                await self._wait_for_child()
                self._send_unsent()
                continue
            except ConnectionError:
                piece = b""
            if not piece:
                raise await self._bury()
            self._send_unsent()  # it has read a command: there is room
            self._received += piece[len(LAST) :]
            if piece.startswith(MORE):
                continue
            message, self._received = self._received, b""
            answer = Answer(**json.loads(message))
            self._is_ready = True
            if answer.number != READY:
                self._has_worked, self._answered = True, answer.number
            return answer

    async def _wait_for_child(self) -> None:
        """Waits until the child sends something, or can take more commands."""
        control = self._control
        assert control is not None
        if not self._unsent:
            await anyio.wait_readable(control)
            return
        async with anyio.create_task_group() as tasks:

            async def wait(ready: Callable[[socket.socket], Awaitable[None]]) -> None:
                await ready(control)
                tasks.cancel_scope.cancel()

            tasks.start_soon(wait, anyio.wait_readable)
            tasks.start_soon(wait, anyio.wait_writable)

    async def ask(self, do: str, *descriptors: int, timeout_s: float, **arguments: Any) -> Any:
        """Makes the child carry out a command, and starts one if need be.

        Args:
            do: the command.
            descriptors: handed over with it.
            timeout_s: for the answer, once the child has torch.
            arguments: of the command.

        Raises:
            Refusal: torch could not do it.
            Unanswered: not within this time; the child is still working on it.
            Death: of the child.
        """
        while True:
            try:
                await self.make_ready()
                return await self.answer_to(self.send(do, *descriptors, **arguments), timeout_s)
            except Death as death:
                # Commands that need no earlier one are tried again, by a child that imports torch the careful way.
                if death.has_worked or death.is_hopeless or do not in {"serve", "connect"}:
                    raise

    async def answer_to(self, number: int, timeout_s: float) -> Any:
        """Waits for the answer to an earlier command; raises as `ask` does."""
        for limit_s in (timeout_s, 0.0):  # an answer that came while this process had no CPU is in time
            with anyio.move_on_after(limit_s):
                while True:
                    answer = await self.receive()
                    if answer.number == number:  # others are late: their callers were cancelled
                        if answer.error:
                            raise Refusal(answer.error)
                        return answer.value
        raise Unanswered(number)

    async def make_ready(self) -> None:
        """Returns when a child has torch; raises `Death` and `Unanswered` as `ask` does."""
        if self._popen is None:
            try:
                await self.start()
            except OSError as error:
                refused = shortage_of(error) or str(error)
                raise Death(None, has_worked=False, is_hopeless=True, refused=refused) from None
        with anyio.move_on_after(START_TIMEOUT_S):
            while not self._is_ready:
                await self.receive()
        if not self._is_ready:
            raise Unanswered(READY)

    async def _bury(self) -> Death:
        """Waits for the end of a child that has closed its end of the socket, and lets go of it."""
        code = await self._end()
        is_hopeless = self._mode == "careful" and not self._has_worked and not self._is_forked
        death = Death(code, has_worked=self._has_worked, is_hopeless=is_hopeless)
        if not self._has_worked and not self._is_forked:
            self._mode = "careful"
        elif not self._has_worked and code != -signal.SIGKILL:  # out of memory, or killed by hand
            self.fork = None
        return death

    async def aclose(self) -> None:
        """Kills the child, if there is one, and waits until it is gone."""
        if self._popen is not None:
            self._popen.kill()
            await self._end()

    async def _end(self) -> int | None:
        if self._popen is None:
            return None
        popen, control = self._popen, self._control
        self._popen = self._control = None
        self._is_amid_command, self._received = False, b""
        self._drop_unsent()
        if control is not None:
            control.close()
        # Shielded: a process that is not waited for would stay a zombie.
        with anyio.move_on_after(END_TIMEOUT_S, shield=True):
            await wait_ended(popen.pid)
        if proc_table.is_alive(popen.pid):
            popen.kill()  # it need not have been killed before
            _log.warning(
                "process %d, which %s, survived SIGKILL",
                popen.pid,
                self._purpose,
                extra={"topic": "a-process-survived-sigkill"},
            )
        waited_for.discard(popen.pid)
        return popen.poll()
