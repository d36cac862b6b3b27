"""Answers clients of an agent's control socket.

A client sends one JSON object on a line (`commands`) and receives answers, one per line; the last has a `code`: `ok`,
`refused`, `no-answer` or `not-allowed`.  Whatever a client sends, it can end no connection but its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio

from aelastic.agent.requests.commands import LINE_BYTES_MAX, Command, CommandError, command_of
from aelastic.agent.requests.queries import Queries, QueryResult
from aelastic.base.host import control_sockets
from aelastic.base.loop import clock
from aelastic.observe.observer import EventStream, Observers
from aelastic.observe.run_events import Announced, Restarting, RunEnded, WorkersStarted
from aelastic.rdzv.protocol import requests as r

LINE_S = 5.0
FOLLOW_S = 0.3  # between two reads of a log that is followed
FOLLOWED_S = 60.0  # how long the outcome of a request is awaited after its deadline
JsonObject = dict[str, Any]
NO_ANSWER = "no answer from the leader; the request may or may not be carried out (check: aelastic status)"


async def serve(conn: socket.socket, queries: Queries, observers: Observers) -> None:
    """Answers one connection.

    Raises:
        OSError: the client is gone, or has sent nothing in time.
    """
    answers = Answers(control_sockets.user_of(conn), queries, observers)
    reader, writer = await asyncio.open_unix_connection(sock=conn, limit=LINE_BYTES_MAX)
    try:
        await _answer(reader, writer, answers)
        writer.close()
    finally:
        writer.transport.abort()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: Answers) -> None:
    writer.transport.set_write_buffer_limits(0)  # so that drained data has been sent: an abort does not lose it

    async def send(message: JsonObject) -> None:
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()

    try:
        with anyio.fail_after(LINE_S):
            line = await _line_of(reader)
        if not line:
            return  # the client only checked that an agent is there
        command = command_of(line)
    except CommandError as error:
        await send({"code": "refused", "text": str(error)})
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_end_with, reader, tasks.cancel_scope)
        async for message in answers.to(command):
            await send(message)
        tasks.cancel_scope.cancel()


async def _line_of(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError:
        raise CommandError(f"a request has at most {LINE_BYTES_MAX:,} bytes") from None


async def _end_with(reader: asyncio.StreamReader, scope: anyio.CancelScope) -> None:
    """Cancels the scope once the client is gone: nobody needs the answer."""
    await reader.read(1)
    scope.cancel()


def _folder() -> str:
    """Returns the folder in which the job was started; empty if it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""


class Answers:
    """The answers to one client.

    Args:
        user: the client's user id.
        queries: those of this node.
        observers: those of its run, for clients that wait for the outcome.
    """

    def __init__(self, user: int, queries: Queries, observers: Observers) -> None:
        self._user, self._queries, self._observers = user, queries, observers

    async def to(self, command: Command) -> AsyncIterator[JsonObject]:
        verb = command.verb
        if verb == "here":
            yield {"code": "ok", "folder": _folder(), **self._queries.status()}
        elif verb == "status":
            yield await self.status()
        elif verb == "stacks":
            shown = await self._queries.fetch(r.What.STACKS)
            compared = self._observers.state.compared
            text = "" if compared is None else compared[0].text
            stacks = {key: stack for (_, key), stack in shown.found.items()}
            yield {**_code(shown), "stacks": stacks, "compared": text}
        elif verb == "why":
            yield {"code": "ok", "why": await self._why(), "held": self._observers.state.held}
        elif verb == "logs":
            async for message in self._log(command):
                yield message
        else:
            async for message in self._request(command):
                yield message

    async def status(self) -> JsonObject:
        shown = await self._queries.fetch(r.What.STATUS)
        whole = [text for (node_id, _), text in shown.found.items() if node_id not in shown.silent]
        nodes = [json.loads(text) for text in whole]
        absent = {"silent": [*shown.silent], "missing": shown.missing, "refused": {**shown.refused}}
        return {**_code(shown), "nodes": nodes, **absent}

    async def _why(self) -> list[JsonObject]:
        """Returns why each generation of workers ended; their failures and steps are requested from other nodes."""
        ends = await self._queries.own_ends()
        if ends and not any(each["failure"] is None for each in ends) and not self._queries.has_steps_elsewhere:
            return ends
        shown = await self._queries.fetch(r.What.WHY)
        of_node: dict[str, list[JsonObject]] = {}
        for (node_id, _), text in shown.found.items():
            if node_id not in shown.silent:  # else it may be incomplete
                of_node.setdefault(node_id, []).append(json.loads(text))
        known = [each for reported in of_node.values() for each in zip(_keys(reported), reported, strict=True)]
        if not ends:  # this node joined later
            return sorted(dict(known).values(), key=lambda each: each["at"], reverse=True)
        for key, end in zip(_keys(ends), ends, strict=True):
            for reported in (reported for of, reported in known if of == key):
                if end["failure"] is None and reported["failure"] is not None:
                    end.update({name: reported[name] for name in ("symptom", "failure", "blame")})
                end["step"] = max((each["step"] for each in (end, reported) if each["step"] is not None), default=None)
        return ends

    async def _log(self, command: Command) -> AsyncIterator[JsonObject]:
        """Yields the last piece of a worker's output; if it is followed, also later pieces while the job runs."""
        rank = command.rank
        status = await self.status()
        of_rank = {worker["rank"]: node["run"]["node_id"] for node in status["nodes"] for worker in node["workers"]}
        if rank not in of_rank:
            ranks = f"; there are {', '.join(map(str, sorted(of_rank)))}" if of_rank else ": no worker runs"
            closed = f" ({next(iter(status['refused'].values()))})" if status["refused"] else ""
            yield {"code": "refused", "text": f"no rank {rank}{ranks}{closed}"}
            return
        offset, generation = -1, ""
        while True:
            shown = await self._queries.fetch(
                r.What.LOG, target=of_rank[rank], rank=rank, is_stderr=command.stderr, offset=offset
            )
            if not shown.found and (shown.refused or not command.follow):
                yield {**_code(shown), "text": next(iter(shown.refused.values()), "no answer")}
                return
            for (_, key), text in shown.found.items():
                of, at = key.split("-")
                if generation not in {"", of}:  # new workers: from the beginning of their output
                    generation, offset = of, 0
                    continue
                generation, offset = of, int(at) + len(text)
                yield {"data": text}
            if not command.follow:
                yield {"code": "ok"}
                return
            await anyio.sleep(FOLLOW_S)

    async def _request(self, command: Command) -> AsyncIterator[JsonObject]:
        verb, stream, deadline_s = r.Verb(command.verb), EventStream(), command.deadline_s
        by = f"by {await self._queries.users.of(self._user)}"
        reason = f"{by}: {command.reason}" if command.reason else by
        spares_job = verb is r.Verb.DRAIN and not command.force
        self._observers.add(stream)
        try:
            answer = await self._queries.ask(
                verb,
                reason,
                target=command.node,
                deadline_s=deadline_s,
                at_save=command.at_save,
                spares_job=spares_job,
            )
            if answer is None:
                yield {"code": "no-answer", "text": NO_ANSWER}
                return
            if has_waited := answer.is_applied and command.wait:
                yield {"text": answer.text}
                async for follows in _followed(stream, deadline_s + FOLLOWED_S):
                    yield {"text": follows}
            yield {"code": "ok" if answer.is_applied else "refused", "text": "" if has_waited else answer.text}
        finally:
            self._observers.remove(stream)


async def _followed(stream: EventStream, within_s: float) -> AsyncIterator[str]:
    """Yields what happens after a request, until workers run again, or the run is over."""
    began, has_ended = clock.now(), False
    while (event := await stream.next(began + within_s)) is not None:
        match event:
            case Announced("saving", text) as saving:
                yield f"{text}: {saving.where} (agreed after {clock.now() - began:.3f} s)"
            case Announced("called off", text):
                yield text or "drain cancelled"
                return
            case Restarting():
                has_ended = True
                yield event.reason
            case WorkersStarted() if has_ended:
                yield f"running again after {clock.now() - began:.2f} s"
                return
            case RunEnded(_, reason):
                yield reason
                return
            case _:
                pass


def _keys(ends: Sequence[JsonObject]) -> list[tuple[int, int]]:
    """Returns keys that match the ends of one node, latest first, with those of others: (round, later ends in it)."""
    rounds = [each["round"] or 0 for each in ends]
    return [(round_, rounds[:number].count(round_)) for number, round_ in enumerate(rounds)]


def _code(shown: QueryResult) -> JsonObject:
    if shown.answer is None or not shown.answer.is_applied:
        text = NO_ANSWER if shown.answer is None else shown.answer.text
        return {"code": "no-answer" if shown.answer is None else "refused", "text": text}
    if not shown.found and shown.refused:
        return {"code": "not-allowed", "text": next(iter(shown.refused.values()))}
    return {"code": "ok"}
