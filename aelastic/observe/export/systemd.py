"""Notifies systemd of the job's state (`sd_notify(3)`), for a unit of `Type=notify`: `docs/how-to/systemd.md` has one.

systemd is notified once that the workers run; once that the agent leaves, and how long this may take; of the job's
state, on change; and, as often as its watchdog requires, that the loop runs.  Nothing here blocks: if the socket has no
room, the newest message of each kind is sent soon after.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

import anyio

from aelastic.observe import run_events as ev
from aelastic.observe.observer import Observer
from aelastic.observe.status_text import SEPARATOR, WORDS_MAX, StatusText, cut
from aelastic.workers.states import KILL_COUNT_MAX, KILL_WAIT_S

_log = logging.getLogger(__name__)

# A full socket has ten datagrams waiting (`net.unix.max_dgram_qlen`), which are read in no time.
RETRY_INTERVAL_S = 0.05
# Between the last worker's end and the agent's: a console that stalls has 30 s (`logs`), observers have 5 s.
LEAVE_S = 40.0
USEC_DIGITS_MAX = 20  # 64 bits, as in systemd


class SdNotify(Observer):
    """systemd's notifications of one run.

    Args:
        env: the agent's environment: `NOTIFY_SOCKET`, `WATCHDOG_USEC`, `WATCHDOG_PID`.
        shutdown_timeout_s: how long workers may take to end when they are asked to.
    """

    def __init__(self, env: Mapping[str, str], shutdown_timeout_s: float) -> None:
        name = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._socket: socket.socket | None = None  # until the first message
        self._stop_us = round(1e6 * (shutdown_timeout_s + KILL_COUNT_MAX * KILL_WAIT_S + LEAVE_S))
        # As systemd recommends: twice within the time after which its watchdog kills us.
        text, is_ours = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "") in {"", str(os.getpid())}
        is_number = text.isascii() and text.isdigit() and len(text) <= USEC_DIGITS_MAX
        self._interval_s = int(text) / 2e6 if is_number and is_ours else 0.0  # 0: off
        self._status = ""
        self._is_ready = False
        self._heartbeat = {"WATCHDOG": "1"} if self._interval_s else {}
        self._unsent: dict[str, str] = {}
        self._has_warned = False
        self._is_full = anyio.Event()

    def tell(self, event: ev.RunEvent, now: float) -> None:
        # Not the first part, elapsed time, which changes without an event.
        text = SEPARATOR.join(StatusText(self.run_state).parts(now)[1:])
        fields: dict[str, str] = {}
        match event:
            case ev.WorkersStarted() if not self._is_ready:
                self._is_ready = True
                fields["READY"] = "1"
            case ev.StopAsked():
                fields = {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": str(self._stop_us)}
            case ev.RunEnded(state, reason):
                text = f"{state.value}: {reason}"
                fields = {"STOPPING": "1", **self._heartbeat}  # `run` is over
            case _:
                pass
        if (status := cut(text, WORDS_MAX)) != self._status:
            self._status = fields["STATUS"] = status
        self._send(fields)

    async def run(self) -> None:
        while True:
            self._send(self._heartbeat)
            with anyio.move_on_after(self._interval_s or None):
                await self._is_full.wait()
                await anyio.sleep(RETRY_INTERVAL_S)

    async def aclose(self) -> None:
        try:
            while self._is_full.is_set():  # at most until an observer's time to close is over
                await anyio.sleep(RETRY_INTERVAL_S)
                self._send({})
        finally:
            if self._socket is not None:
                self._socket.close()

    def _send(self, fields: Mapping[str, str]) -> None:
        self._unsent.update(fields)
        if not self._unsent:
            return
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        lines = "\n".join(f"{name}={value}" for name, value in self._unsent.items())
        try:
            self._socket.sendto(lines.encode(errors="replace"), os.fsencode(self._address))
        except BlockingIOError:
            self._is_full.set()
            return
        except OSError as error:  # systemd may be back for the next message
            if not self._has_warned:
                _log.warning("cannot notify systemd (%s); the job continues", error)
            self._has_warned = True
        else:
            self._unsent = {}
        if self._is_full.is_set():
            self._is_full = anyio.Event()
