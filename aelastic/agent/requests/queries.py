"""Sends this node's requests and queries to the job, and answers queries from other nodes.

The leader decides on a request (`Ask`), and passes a query (`Fetch`) on to the nodes that have the information; each
of them answers.  Both are repeated to a leader that takes over.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from aelastic.agent.requests.user_names import UserNames
from aelastic.base.host.process_states import SETTLED_S
from aelastic.base.host.usage import usage_of_leaders
from aelastic.base.loop import clock
from aelastic.base.loop.mailbox import Mailbox
from aelastic.base.loop.reports import described
from aelastic.base.loop.threads import run_sync
from aelastic.base.record import Record
from aelastic.observe.health.stacks_endpoint import texts_of
from aelastic.observe.run_events import StacksTaken
from aelastic.observe.run_state import RunState
from aelastic.observe.status import describe, describe_ends
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import TEXT_MAX

if TYPE_CHECKING:
    from aelastic.agent.resources import AgentSettings, Resources

# A leader answers in milliseconds, and another takes over within a few hundred.
ANSWER_S = 5.0
# Stacks take up to 6 s.
STACKS_S = 8.0
# The query is repeated, because the leader that passed it on may be gone.
AGAIN_S = 1.0
# Nodes find a leader that takes over within milliseconds; lost nodes never do.
COMING_S, COMING_AGAIN_S = 2.0, 0.05
PIECE_BYTES = 32 << 10  # of a log, at a time
NO_REMOTE = "this node does not answer requests from other nodes (--no-remote-requests)"
NOT_SHOWN = "logs of another node are shown only if the job has a secret (--secret-file)"


class QueryResult(Record):
    """The nodes' answers to a query."""

    found: Mapping[tuple[str, str], str]  # by node and key
    refused: Mapping[str, str]  # reasons, by node
    silent: tuple[str, ...] = ()  # nodes that have not answered in time
    answer: r.Answer | None = None  # the leader's; `None` if it has not answered
    missing: int = 0  # nodes of the round that have not connected to the leader, which may be new


class Queries:
    """Requests and queries of one node.

    Args:
        settings: the agent's settings.
        resources: those of its run.
        run_state: the state of the run; read, never changed.
        collect_stacks: takes the workers' stacks; its argument is the reason.
    """

    def __init__(
        self,
        settings: AgentSettings,
        resources: Resources,
        run_state: RunState,
        collect_stacks: Callable[[str], Awaitable[StacksTaken]],
    ) -> None:
        self._settings, self._resources, self._state, self._collect_stacks = (
            settings,
            resources,
            run_state,
            collect_stacks,
        )
        self._node_id, self._send = settings.node_id, resources.link.send
        self.users = UserNames()
        self._open: dict[str, Mailbox[r.Answer | r.Fetched]] = {}

    def on_received(self, message: r.Answer | r.Fetched) -> None:
        if message.ask_id in self._open:
            self._open[message.ask_id].post(message)

    async def ask(self, verb: r.Verb, reason: str, **fields: Any) -> r.Answer | None:
        """Sends a request; returns the leader's answer, or `None` if none arrives in time."""
        with self._opened() as (ask_id, mailbox):
            round_ = 0 if (formed := self._state.formed) is None else formed.round
            usual = {"target": "", "deadline_s": 0.0, "reason": reason[: r.REASON_MAX], "round": round_}
            ask = r.Ask(self._node_id, ask_id, verb, **{**usual, **fields})
            self._send(ask)
            answer = await mailbox.next(clock.now() + ANSWER_S)
            return answer if isinstance(answer, r.Answer) else None

    async def fetch(self, what: r.What, **fields: Any) -> QueryResult:
        """Sends a query; returns the answers that arrive in time."""
        answer: r.Answer | None = None
        found: dict[tuple[str, str], str] = {}
        refused: dict[str, str] = {}
        done: set[str] = set()
        with self._opened() as (ask_id, mailbox):
            fetch = r.Fetch(self._node_id, ask_id, what, **fields)
            began = clock.now()
            until = began + (STACKS_S if what is r.What.STACKS else ANSWER_S)
            self._send(fetch)
            while (now := clock.now()) < until:
                is_few = answer is not None and self._are_coming(answer, fetch.target) and now < began + COMING_S
                if answer is not None and not {*answer.nodes} - done and not is_few:
                    break
                match await mailbox.next(min(until, now + (COMING_AGAIN_S if is_few else AGAIN_S))):
                    case None if answer is not None and (is_few or what is not r.What.STACKS):
                        self._send(fetch)
                    case None:
                        pass  # the next leader receives it
                    case r.Answer() as answer:
                        pass
                    case r.Fetched(node_id, _, _, _, value, True, is_refused):
                        done.add(node_id)
                        refused |= {node_id: value} if is_refused else {}
                    case r.Fetched(node_id, _, _, key, value, is_continued=True):
                        found[node_id, key] = found.get((node_id, key), "") + value
                    case r.Fetched(node_id, _, _, key, value):
                        found[node_id, key] = value
        silent = () if answer is None else tuple(sorted({*answer.nodes} - done))
        missing = 0 if answer is None else self._missing(answer, fetch.target)
        return QueryResult(found, refused, silent, answer, missing)

    def _are_coming(self, answer: r.Answer, target: str) -> bool:
        """Returns whether, as far as is known, nodes of the round have yet to find the leader that answered."""
        return answer.text == r.STILL_COMING or self._missing(answer, target) > 0

    def _missing(self, answer: r.Answer, target: str) -> int:
        """Returns how many nodes of the round are not connected to the leader that answered."""
        formed = self._state.formed
        size = 1 if formed is None or target else formed.group_world_size
        return max(0, size - len(answer.nodes))

    @contextmanager
    def _opened(self) -> Iterator[tuple[str, Mailbox[r.Answer | r.Fetched]]]:
        ask_id = f"{self._node_id}-{os.urandom(4).hex()}"
        self._open[ask_id] = mailbox = Mailbox[r.Answer | r.Fetched]()
        try:
            yield ask_id, mailbox
        finally:
            del self._open[ask_id]

    # Answers to other nodes.

    async def show(self, fetch: r.Fetch) -> None:
        """Answers a node's query; a failure here never ends the job."""
        node_id, rdzv, refusal = self._node_id, self._settings.spec.rdzv, ""
        if rdzv is not None and fetch.node_id != node_id:
            is_closed = fetch.what is r.What.LOG and not rdzv.secret_path
            refusal = NO_REMOTE if not rdzv.remote_requests else NOT_SHOWN if is_closed else ""
        if not refusal:
            try:
                async for key, value in self._shown(fetch):
                    for begin in range(0, max(len(value), 1), TEXT_MAX):
                        piece = value[begin : begin + TEXT_MAX]
                        shown = r.Fetched(node_id, fetch.node_id, fetch.ask_id, key, piece, is_last=False)
                        self._send(shown.replace(is_continued=begin > 0))
            except (OSError, LookupError) as error:
                refusal = str(error) or type(error).__name__
            except Exception as error:  # noqa: BLE001  no other node may end this agent
                refusal = f"this node failed to answer: {described(error)}"
        self._send(r.Fetched(node_id, fetch.node_id, fetch.ask_id, "", refusal, is_refused=bool(refusal)))

    async def _shown(self, fetch: r.Fetch) -> AsyncIterator[tuple[str, str]]:
        match fetch.what:
            case r.What.STATUS:
                await self._resources.progress.look_now()
                status = self.status()
                if self._resources.process_states.may_be_new:
                    await anyio.sleep(SETTLED_S)
                    status = self.status()
                yield "", json.dumps(status)
            case r.What.STACKS:
                taken = await self._collect_stacks("asked")
                first = 0 if (formed := self._state.formed) is None else formed.first_rank
                texts = await run_sync(texts_of, taken, abandon_on_cancel=True)
                for local_rank, source in sorted(taken.source.items()):
                    yield str(first + local_rank), texts.get(local_rank, "") or source
            case r.What.WHY:
                for number, end in enumerate(await self.own_ends()):
                    if (failure := end["failure"]) is not None:
                        del failure["traceback"], failure["stack"]
                    if failure is not None or end["step"] is not None:
                        yield str(number), json.dumps(end)
            case r.What.LOG:
                formed = self._state.formed
                local_rank = -1 if formed is None else fetch.rank - formed.first_rank
                path = self._resources.logs.file_of(local_rank, is_stderr=fetch.is_stderr)
                offset, data = await run_sync(_piece, path, fetch.offset, abandon_on_cancel=True)
                yield f"{self._state.generation}-{offset}", data.decode("latin-1")

    def status(self) -> dict[str, Any]:
        """Returns this node's status as in `/status`, without the long fields."""
        used = usage_of_leaders(self._state.running) if self._settings.is_local else {}
        kernel = (
            self._resources.process_states.look(self._state.running, clock.now()) if self._settings.is_local else {}
        )
        status = describe(self._state, clock.now(), datetime.now(UTC), used, kernel)
        del status["phases"]
        if (failure := status["last_failure"]) is not None:
            del failure["traceback"], failure["stack"]
        agreed = self._resources.link.agreed
        rendezvous = None if agreed is None else agreed.given
        return {**status, "leads": self._resources.link.coordinates, "rendezvous": rendezvous}

    async def own_ends(self) -> list[dict[str, Any]]:
        """Like `why`, but first reads the steps that workers have written by now."""
        await self._resources.progress.look_now()
        return self.why()

    @property
    def has_steps_elsewhere(self) -> bool:
        """Whether workers of other nodes may be the only ones, or the first, to write a step."""
        formed, spec = self._state.formed, self._settings.spec
        return spec.progress is not None and formed is not None and formed.group_world_size > 1

    def why(self) -> list[dict[str, Any]]:
        """Returns why each generation of workers ended, the latest first."""
        return describe_ends(self._state.ends, clock.now(), datetime.now(UTC))


def _piece(path: Path, offset: int) -> tuple[int, bytes]:
    """Returns the offset and the bytes of a piece of a log; -1 as offset: the last piece."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        offset = max(0, size - PIECE_BYTES) if offset < 0 else offset
        file.seek(offset)
        return offset, file.read(PIECE_BYTES)
