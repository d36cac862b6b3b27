"""Posts progress to Kubeflow's Trainer, which shows it as `status.trainerStatus` of the TrainJob (KEP-2779, 2.2).

The Trainer names its status server in the pod's environment: a URL, the certificate of its authority, and a file with
a token, which the kubelet renews.  At most one request runs at a time, in a thread: a server that is slow, unreachable
or refuses costs the run only one warning.  The first and the last node of a round post, because a script's progress
comes from its first or its last rank; so a job of any size makes two requests in 5 s.
"""

from __future__ import annotations

import http.client
import json
import logging
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import anyio

from aelastic.base.loop.threads import run_sync
from aelastic.base.record import Record
from aelastic.observe import run_events as ev
from aelastic.observe.observer import Observer
from aelastic.workers.states import WorkerState

_log = logging.getLogger(__name__)

URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
# The Trainer requires at least 5 s between two requests; for a server that fails, the interval grows.
INTERVAL_S = 5.0
INTERVAL_MAX_S = 60.0
REQUEST_TIMEOUT_S = 5.0
LAST_TIMEOUT_S, LAST_TIMEOUT_OF_FAILING_S = 3.0, 1.0
# How much of a refusal is read.
ANSWER_BYTES_MAX = 4096
INT32_MAX = (1 << 31) - 1


class StatusServer(Record):
    """Where to post, and the credentials."""

    url: str
    ca_cert: Path
    token: Path


def status_server(env: Mapping[str, str]) -> StatusServer | None:
    """Returns the Trainer's status server; `None` if none is named, or it cannot be used, which is logged."""
    if not (url := env.get(URL, "")):
        return None
    missing = next((name for name in (CA_CERT, TOKEN) if not env.get(name)), None)
    if missing is not None:
        _log.warning(
            "%s is set, but %s is not: progress is not posted", URL, missing, extra={"topic": "progress-is-not-posted"}
        )
        return None
    if urlsplit(url).scheme != "https" or not urlsplit(url).hostname:
        _log.warning(
            "%s=%s is not an https URL: progress is not posted", URL, url, extra={"topic": "progress-is-not-posted"}
        )
        return None
    return StatusServer(url, Path(env[CA_CERT]), Path(env[TOKEN]))


class TrainerStatus(Observer):
    """Posts the progress of one run.

    Args:
        server: the Trainer's status server.
    """

    def __init__(self, server: StatusServer) -> None:
        self._server = server
        self._news = anyio.Event()
        self._interval_s = INTERVAL_S
        self._limiter = anyio.CapacityLimiter(1)  # a thread that hangs keeps it

    def tell(self, event: ev.RunEvent, now: float) -> None:  # noqa: ARG002  the server has its own clock
        if isinstance(event, ev.Progressed):
            self._news.set()

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            await self._try_to_post(REQUEST_TIMEOUT_S)
            await anyio.sleep(self._interval_s)

    async def aclose(self) -> None:
        timeout_s = LAST_TIMEOUT_S if self._interval_s == INTERVAL_S else LAST_TIMEOUT_OF_FAILING_S
        with anyio.move_on_after(timeout_s):
            await self._try_to_post(timeout_s)

    async def _try_to_post(self, timeout_s: float) -> None:
        formed = self.run_state.formed
        is_spokesman = formed is not None and formed.group_rank in {0, formed.group_world_size - 1}
        if not is_spokesman or self.run_state.last_progress is None:
            return
        ended = None if self.run_state.ended is None else self.run_state.ended.state
        body = json.dumps({"trainerStatus": described(self.run_state.last_progress, ended, datetime.now(UTC))}).encode()
        send = partial(post_status, self._server, body, timeout_s)
        try:
            await run_sync(send, abandon_on_cancel=True, limiter=self._limiter)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self._interval_s == INTERVAL_S:  # the first failure since a success
                _log.warning(
                    "progress cannot be posted to the Trainer (%s); the job continues: check the "
                    "KUBEFLOW_TRAINER_SERVER_ variables", error, extra={"topic": "progress-is-not-posted"},
                )  # fmt: skip
            self._interval_s = min(2 * self._interval_s, INTERVAL_MAX_S)
            self._news.set()  # progress that was not accepted is posted later
        else:
            self._interval_s = INTERVAL_S


def described(progress: ev.Progressed, state: WorkerState | None, now: datetime) -> dict[str, Any]:
    """Returns a `trainerStatus`, without fields that are unknown.

    Args:
        state: the final state of a run that is over.
    """
    names = "step", "total_steps", "steps_per_second"
    metrics = zip(names, (progress.step, progress.total, progress.steps_per_s), strict=True)
    share, left = progress.share, progress.remaining_s
    if state is WorkerState.SUCCEEDED:
        share, left = 1.0, 0.0
    status: dict[str, Any] = {
        "metrics": [{"name": name, "value": str(round(value, 3))} for name, value in metrics if value is not None],
        "lastUpdatedTime": now.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }
    if share is not None:
        status["progressPercentage"] = int(share * 100)
    if left is not None:
        status["estimatedRemainingSeconds"] = min(int(left), INT32_MAX)
    return status


def post_status(server: StatusServer, body: bytes, timeout_s: float) -> None:
    """Sends one status.  Blocks; reads token and certificate again, because both are renewed while the job runs.

    Raises:
        OSError: the server is unreachable, does not match the certificate, or refused the status.
        HTTPException: the server does not speak HTTP.
    """
    url = urlsplit(server.url)
    assert url.hostname is not None  # checked by `status_server`
    token = server.token.read_text().strip()
    context = ssl.create_default_context(cafile=str(server.ca_cert))
    connection = http.client.HTTPSConnection(url.hostname, url.port, timeout=timeout_s, context=context)
    try:
        target = urlunsplit(("", "", url.path or "/", url.query, ""))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request("POST", target, body, headers)
        answer = connection.getresponse()
        received = answer.read(ANSWER_BYTES_MAX)
        if answer.status != http.client.OK:
            raise OSError(f"{url.netloc} answered {answer.status} {answer.reason}{_why(received)}")
    finally:
        connection.close()


def _why(received: bytes) -> str:
    """Returns the message of a Kubernetes `Status`, on one line."""
    try:
        message = json.loads(received)["message"]
    except (ValueError, TypeError, KeyError):
        return ""
    return f": {''.join(each if each.isprintable() else ' ' for each in str(message)[:200])}"
