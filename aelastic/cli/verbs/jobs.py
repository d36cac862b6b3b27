"""Finds the job of a command: agents answer at their control sockets, and leave records of ended jobs there."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import filterfalse
from pathlib import Path
from typing import Any

from aelastic.base.host import control_sockets
from aelastic.cli.verbs import texts
from aelastic.errors import EXIT_INPUT

EXIT_NO_JOB, EXIT_NO_ANSWER = 3, 4
# An agent waits 8 s for stacks from other nodes, 5 s for everything else.
ANSWER_S = 10.0
JsonObject = dict[str, Any]
_UNANSWERED = "no answer from the agent; the request may or may not have been carried out (check: aelastic status)"
NO_ANSWER: JsonObject = {"code": "no-answer", "text": _UNANSWERED}

# Commands whose first argument is not the job.
OF_RANKS, OF_NODES = ("stacks", "logs"), ("drain", "cordon", "uncordon")
# Commands that change a job take the beginning of an id only if nobody chose the id: a job `exp` may have ended.
OF_THE_JOB = (*OF_NODES, "restart", "stop")


class NoAnswerError(Exception):
    """No agent can be asked: no job has the name, or several could be meant.  The message names the remedy."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Jobs:
    """The jobs of this user on this machine, as one command sees them.

    Args:
        folder: the folder of the agents' control sockets.
        argv: the command and its arguments.
        job: the job that it names; empty without one.
    """

    def __init__(self, folder: Path, argv: Sequence[str], job: str) -> None:
        self._folder, self._argv, self._job = folder, argv, job
        self._verb = argv[0]
        self._is_silent = False  # a live agent has not answered

    def answers(self, socket_name: str, **asked: Any) -> Iterator[JsonObject]:
        """Yields the messages of an agent's answer; the last one is `NO_ANSWER` if the agent stops before the end."""
        if (conn := control_sockets.connect(self._folder, socket_name, ANSWER_S)) is not None:
            with conn, conn.makefile("r", encoding="utf-8") as lines, suppress(OSError, ValueError):
                conn.sendall(json.dumps(asked).encode() + b"\n")
                if asked.get("follow") or asked.get("wait"):
                    conn.settimeout(None)
                for line in lines:
                    yield (message := json.loads(line))
                    if "code" in message:
                        return
            self._is_silent = True
        yield NO_ANSWER

    def answer(self, socket_name: str, **asked: Any) -> JsonObject:
        return next(self.answers(socket_name, **asked))

    def agents(self) -> list[tuple[str, JsonObject]]:
        """Returns all agents that answer, with the names of their control sockets."""
        answers = [
            (socket_name, self.answer(socket_name, verb="here"))
            for socket_name in control_sockets.names_in(self._folder)
        ]
        return [
            (socket_name, here) for socket_name, here in answers if here["code"] == "ok" and here["phase"] != "done"
        ]

    def named(self) -> list[tuple[str, JsonObject]]:
        """Returns the agents of the named job, or all if the command names none.

        Raises:
            NoAnswerError: there is no such agent.
        """
        job = self._job
        found = [each for each in self.agents() if each[1]["run"]["run_id"].startswith(job)]
        ids = {here["run"]["run_id"] for _, here in found}
        if job in ids:
            found = [each for each in found if each[1]["run"]["run_id"] == job]
        elif job and self._verb in OF_THE_JOB and (chosen := sorted(filterfalse(texts.GENERATED.fullmatch, ids))):
            text = f"no job {job} of yours runs on this machine; give the whole id of {' or '.join(chosen)}"
            raise NoAnswerError(text, EXIT_NO_JOB)
        if not found and self._is_silent:
            raise NoAnswerError(str(NO_ANSWER["text"]), EXIT_NO_ANSWER)
        if not found and (ended := self.ended_as(job)):
            raise NoAnswerError(texts.has_ended(ended[0]), EXIT_NO_JOB)
        if not found:
            what = f"no job {job} of yours" if job else "no job of yours"
            raise NoAnswerError(f"{what} runs on this machine{texts.ended(self.ended())}", EXIT_NO_JOB)
        return found

    def meant(self) -> list[tuple[str, JsonObject]]:
        """Returns the agents of the one job that the command is about.

        Raises:
            NoAnswerError: there is no such job, there are several, or it may be somebody else's.
        """
        agents = self.named()
        here = [agent["run"]["run_id"] for _, agent in agents if _is_this_folder(agent.get("folder", ""))]
        jobs = {agent["run"]["run_id"]: texts.briefly(agent) for _, agent in agents}
        if len(jobs) > 1:
            example = self._command(here[0] if here else min(jobs))
            listed = ", ".join(jobs[job] for job in sorted(jobs))
            text = f"{len(jobs)} jobs run on this machine; name one, as in {example}: {listed}"
            raise NoAnswerError(text, EXIT_INPUT)
        (job,) = jobs
        if self._verb in OF_THE_JOB and not self._job and not here:  # it may be the job of another user of this account
            folder = agents[0][1].get("folder") or "a folder that is gone"
            text = f"job {job} was started in {folder}, not in this folder; to act on it anyway: {self._command(job)}"
            raise NoAnswerError(text, EXIT_INPUT)
        return agents

    def _command(self, job: str) -> str:
        """Returns this command with the job's name, which replaces a name it may already have."""
        name = [texts.short(job)]
        if self._verb in {*OF_RANKS, *OF_NODES}:
            name = ["--job", *name]
        return shlex.join(["aelastic", self._verb, *name, *self._words_without_a_job()])

    def _words_without_a_job(self) -> Iterator[str]:
        words, may_be_first = iter(self._argv[1:]), self._verb not in {*OF_RANKS, *OF_NODES}
        for word in words:
            if word == "--job":
                next(words, None)  # its value
            elif not word.startswith("--job=") and not (may_be_first and word == self._job):
                yield word

    # Jobs that have ended.

    def ended(self) -> list[JsonObject]:
        """Returns the records that ended agents left, the latest first; only those that this version can read."""
        return [record for record in map(_left, control_sockets.left_in(self._folder)) if record is not None]

    def ended_as(self, job: str) -> list[JsonObject]:
        """Returns the records of ended jobs of that name, or else of names that begin with it."""
        ended = self.ended() if job else []
        same = [each for each in ended if each["run"]["run_id"] == job]
        return same or [each for each in ended if each["run"]["run_id"].startswith(job)]


def _is_this_folder(folder: str) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:
        return False


def _left(data: bytes) -> JsonObject | None:
    """Returns the record that an agent left; `None` if another version wrote it and it cannot be shown."""
    try:
        record: JsonObject = json.loads(data)
        if not record.get("run"):
            return None
        texts.has_ended(record)
        texts.why(record["why"])
        names = record["run"]["run_id"], record["run"]["entrypoint"], record["state"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    are_texts = all(isinstance(each, str) for each in names)
    return record if are_texts and isinstance(record["why"], list) else None
