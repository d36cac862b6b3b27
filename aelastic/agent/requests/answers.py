"""What is answered at the door of an agent.

One JSON object comes in a line, and answers go out, one a line; the last has a `code`: `ok`, `refused`, `no-answer` or
`not-allowed`.  What is no request gets none.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import socket
from collections.abc import AsyncIterator
from typing import Any

import anyio

from aelastic import aio
from aelastic.agent.requests.enquiries import Enquiries, Shown
from aelastic.host import sockets
from aelastic.observe.observer import EventStream, Observers
from aelastic.observe.run_events import Announced, Restarting, RunEnded, WorkersStarted
from aelastic.rdzv.protocol import requests as r

LINE_BYTES_MAX = 1 << 16
LINE_S = 5.0
FOLLOW_S = 0.3  # between two looks at a log that is followed
SAVE_S = 120.0  # that ranks have to save in, where nobody says so
FOLLOWED_S = 60.0  # after that, for what follows
Said = dict[str, Any]
NO_ANSWER = "no coordinator has answered: it is not known what follows"


async def serve(conn: socket.socket, enquiries: Enquiries, observers: Observers) -> None:
    user, writer = sockets.user_of(conn), None
    try:
        reader, writer = await asyncio.open_unix_connection(sock=conn, limit=LINE_BYTES_MAX)
        with anyio.fail_after(LINE_S):
            asked = json.loads(await reader.readline())
        answers = Answers(asked, _name_of(user), enquiries, observers)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_end_with, reader, tasks.cancel_scope)
            async for said in answers.of_verb():
                writer.write(json.dumps(said).encode() + b"\n")
                await writer.drain()
            tasks.cancel_scope.cancel()
    except* (OSError, ValueError, TypeError, KeyError):
        pass  # who asked is gone, or asked for nothing that is known
    finally:
        if writer is not None:
            writer.close()
        conn.close()


async def _end_with(reader: asyncio.StreamReader, scope: anyio.CancelScope) -> None:
    """Who has asked and is gone needs no answer."""
    await reader.read(1)
    scope.cancel()


def _folder() -> str:
    """Where the job was started; empty if that is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


class Answers:
    """What is answered to one request.

    Args:
        asked: by the client.
        user: who asks.
        enquiries: of this node.
        observers: of its run, for who waits.
    """

    def __init__(self, asked: Said, user: str, enquiries: Enquiries, observers: Observers) -> None:
        self._asked, self._user, self._enquiries, self._observers = asked, user, enquiries, observers

    async def of_verb(self) -> AsyncIterator[Said]:
        verb = self._asked["verb"]
        if verb == "here":
            yield {"code": "ok", "folder": _folder(), **self._enquiries.status()}
        elif verb == "status":
            yield await self.status()
        elif verb == "stacks":
            shown = await self._enquiries.fetch(r.What.STACKS)
            compared = self._observers.state.compared
            text = "" if compared is None else compared[0].text
            stacks = {key: stack for (_, key), stack in shown.found.items()}
            yield {**_code(shown), "stacks": stacks, "compared": text}
        elif verb == "why":
            yield {"code": "ok", "why": await self._why(), "held": self._observers.state.held}
        elif verb == "logs":
            async for said in self._log():
                yield said
        else:
            async for said in self._request(verb):
                yield said

    async def status(self) -> Said:
        shown = await self._enquiries.fetch(r.What.STATUS)
        nodes = [json.loads(text) for text in shown.found.values()]
        return {**_code(shown), "nodes": nodes, "silent": [*shown.silent], "refused": {**shown.refused}}

    async def _why(self) -> list[Said]:
        """Why each generation of workers ended; of failures elsewhere, what those nodes know."""
        ends, known = self._enquiries.why(), dict[str, Said]()
        if not ends or any(each["failure"] is None for each in ends):
            shown = await self._enquiries.fetch(r.What.WHY)
            known = {each["reason"]: each for each in map(json.loads, shown.found.values())}
        ends = ends or sorted(known.values(), key=lambda each: each["at"], reverse=True)  # this node is younger
        for each in ends:
            if each["failure"] is None and (told := known.get(each["reason"])) is not None:
                each.update({name: told[name] for name in ("symptom", "failure", "blame")})
        return ends

    async def _log(self) -> AsyncIterator[Said]:
        """A worker's output, in pieces, from its end on; or for as long as the job runs, if it is followed."""
        rank, is_stderr = int(self._asked["rank"]), bool(self._asked.get("stderr"))
        status = await self.status()
        of_rank = {worker["rank"]: node["run"]["node_id"] for node in status["nodes"] for worker in node["workers"]}
        if rank not in of_rank:
            ranks = f"; there are {', '.join(map(str, sorted(of_rank)))}" if of_rank else ": no worker runs"
            closed = f" ({next(iter(status['refused'].values()))})" if status["refused"] else ""
            yield {"code": "refused", "text": f"no rank {rank}{ranks}{closed}"}
            return
        offset, generation = -1, ""
        while True:
            shown = await self._enquiries.fetch(
                r.What.LOG, target=of_rank[rank], rank=rank, is_stderr=is_stderr, offset=offset
            )
            if not shown.found and (shown.refused or not self._asked.get("follow")):
                yield {**_code(shown), "text": next(iter(shown.refused.values()), "no answer")}
                return
            for (_, key), text in shown.found.items():
                of, at = key.split("-")
                if generation not in {"", of}:  # other workers: from their beginning
                    generation, offset = of, 0
                    continue
                generation, offset = of, int(at) + len(text)
                yield {"data": text}
            if not self._asked.get("follow"):
                yield {"code": "ok"}
                return
            await anyio.sleep(FOLLOW_S)

    async def _request(self, verb: str) -> AsyncIterator[Said]:
        asked, stream = self._asked, EventStream()
        at_save = bool(asked.get("at_save"))
        reason = " ".join(filter(None, [f"by {self._user}:", str(asked.get("reason", ""))])).removesuffix(":")
        kind, deadline_s = r.Verb(verb), float(asked.get("deadline_s", SAVE_S))
        spares_job = kind is r.Verb.DRAIN and not asked.get("force")
        self._observers.add(stream)
        try:
            answer = await self._enquiries.ask(
                kind,
                reason,
                target=str(asked.get("node", "")),
                deadline_s=deadline_s,
                at_save=at_save,
                spares_job=spares_job,
            )
            if answer is None:
                yield {"code": "no-answer", "text": NO_ANSWER}
                return
            if has_waited := answer.is_applied and bool(asked.get("wait")):
                yield {"text": answer.text}
                async for follows in _followed(stream, deadline_s + FOLLOWED_S):
                    yield {"text": follows}
            yield {"code": "ok" if answer.is_applied else "refused", "text": "" if has_waited else answer.text}
        finally:
            self._observers.remove(stream)


async def _followed(stream: EventStream, within_s: float) -> AsyncIterator[str]:
    """What follows a request, until workers run again, or the run is over."""
    began, has_ended = aio.now(), False
    while (event := await stream.next(began + within_s)) is not None:
        match event:
            case Announced("saving", text) as saving:
                yield f"{text}: {saving.where}, agreed on after {aio.now() - began:.3f} s"
            case Announced("called off", text):
                yield text or "called off"
                return
            case Restarting(_, reason):
                has_ended = True
                yield reason
            case WorkersStarted() if has_ended:
                yield f"running again after {aio.now() - began:.2f} s"
                return
            case RunEnded(_, reason):
                yield reason
                return
            case _:
                pass


def _code(shown: Shown) -> Said:
    if shown.answer is None or not shown.answer.is_applied:
        text = NO_ANSWER if shown.answer is None else shown.answer.text
        return {"code": "no-answer" if shown.answer is None else "refused", "text": text}
    if not shown.found and shown.refused:
        return {"code": "not-allowed", "text": next(iter(shown.refused.values()))}
    return {"code": "ok"}
