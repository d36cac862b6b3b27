"""`aelastic status`, and the like: what people ask of a job that runs, by the door of an agent on this machine.

A verb stands first; a script of that name is `./status`.  Exit codes: 0 done; 1 refused, and the job is undisturbed; 2
usage; 3 no such job; 4 no answer, and it is not known what follows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from aelastic.cli.verbs import texts
from aelastic.errors import EXIT_FAILURE, EXIT_INPUT
from aelastic.host import doors

EXIT_NO_JOB, EXIT_NO_ANSWER = 3, 4
EXIT_CODES = {"ok": 0, "refused": EXIT_FAILURE, "not-allowed": EXIT_FAILURE, "no-answer": EXIT_NO_ANSWER}
# An agent waits 8 s for the stacks of others.
ANSWER_S = 12.0
WATCH_S = 1.0
Said = dict[str, Any]
NO_ANSWER: Said = {"code": "no-answer", "text": "the agent has not answered: it is not known what follows"}

ABOUT = {
    "ps": "lists the jobs of this user on this machine",
    "status": "says what each node of a job does",
    "why": "says why workers ended, the latest first; also of a job that has ended within the last hour",
    "stacks": "says where the workers of all nodes are in their Python code",
    "logs": "shows what a worker has written, on whatever node it runs",
    "drain": "has a node leave: all ranks save at one step, and the others go on",
    "restart": "ends the workers of all nodes, and starts them again; no restart is charged",
    "stop": "ends the job on all nodes",
}


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: use a number, at least 1")
    return int(text)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 1 <= (seconds := float(text)) <= 1e6:
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r}: use seconds from now on, at least 1")


_AT_SAVE = "--at-save", {"action": "store_true", "help": "once all ranks have saved at one step"}
OPTIONS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "status": (("-w --watch", {"action": "store_true", "help": "again each second"}),),
    "why": (("-n", {"type": _count, "default": 1, "help": "the last N ends (default: 1)"}),),
    "stacks": (("ranks", {"nargs": "*", "type": int, "metavar": "RANK", "help": "of these only"}),),
    "logs": (
        ("rank", {"type": int, "metavar": "RANK"}),
        ("-f --follow", {"action": "store_true", "help": "until the job is over"}),
        ("-n", {"type": _count, "default": 20, "help": "the last N lines (default: 20)"}),
        ("--stderr", {"action": "store_true", "help": "what it has written to stderr"}),
    ),
    "drain": (
        ("node", {"nargs": "?", "default": "", "help": "its host, or its id (default: this one)"}),
        ("--cancel", {"action": "store_true", "help": "it stays after all"}),
    ),
    "restart": (_AT_SAVE,),
    "stop": (_AT_SAVE, ("--now", {"action": "store_true", "help": "workers are killed, and cannot save"})),
}
SAVING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--deadline", {"type": _seconds, "default": 120.0, "metavar": "S", "help": "for saving (default: 120)"}),
    ("--reason", {"default": "", "metavar": "TEXT", "help": "said in logs"}),
    ("--wait", {"action": "store_true", "help": "until workers run again, or the job is over"}),
)


class NoAnswerError(Exception):
    """Nobody is asked: no job, or more than one, is meant, or the command is wrong; says what to do."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def run_verb(argv: Sequence[str], environ: Mapping[str, str], complain: Callable[[str], None]) -> int:
    """Asks, says what is answered, and gives the exit code.

    Args:
        argv: the verb, and what follows.
        environ: says where agents can be spoken to.
        complain: takes what is wrong.
    """
    if os.path.isfile(argv[0]) or os.path.exists(os.path.join(argv[0], "__main__.py")):
        complain(f"aelastic: {argv[0]} is a verb here; the file of that name is ./{argv[0]}")
    try:
        args = _parser(argv[0]).parse_args(argv[1:])
        return _Asking(argv[0], args, doors.folder_of(environ), complain).run()
    except NoAnswerError as error:
        complain(f"aelastic: {error}")
        if "--json" in argv:
            _write(json.dumps({"code": "no-such-job" if error.code == EXIT_NO_JOB else "usage", "text": str(error)}))
        return error.code
    except PermissionError as error:
        complain(f"aelastic: {error}")
        return EXIT_FAILURE
    except SystemExit:  # `--help` has said it
        return 0
    except BrokenPipeError:
        return 0  # who reads has seen enough
    except KeyboardInterrupt:
        return 128 + 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Says what is wrong in one line."""
        raise NoAnswerError(f"error: {self.prog.partition(' ')[2]}: {message} (see {self.prog} --help)", EXIT_INPUT)


def _parser(verb: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=f"aelastic {verb}", description=f"{verb}: {ABOUT[verb]}.", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object, with a code")
    if verb in {"status", "why"}:
        parser.add_argument("job", nargs="?", default="", help="its run id, or the beginning of it")
    elif verb != "ps":
        parser.add_argument("--job", default="", help="its run id, or the beginning of it")
    asks_for_save = SAVING if verb in {"drain", "restart", "stop"} else ()
    for names, options in (*OPTIONS.get(verb, ()), *asks_for_save):
        parser.add_argument(*names.split(), **options)
    return parser


class _Asking:
    """One command."""

    def __init__(self, verb: str, args: argparse.Namespace, folder: Path, complain: Callable[[str], None]) -> None:
        self._verb, self._args, self._folder, self._complain = verb, args, folder, complain

    def run(self) -> int:
        match self._verb:
            case "ps":
                return self._list()
            case "status" if self._args.watch:
                while (code := self._show()) == 0:
                    time.sleep(WATCH_S)  # noqa: TID251  nothing else runs in this process
                return code
            case "why":
                return self._why()
            case "logs":
                return self._log()
            case "drain" | "restart" | "stop":
                return self._request()
            case _:
                return self._show()

    # Which job.

    def _agents(self) -> Iterator[tuple[str, Said]]:
        """The agents of this user here that answer: their doors, and what they are."""
        for name in doors.doors_in(self._folder):
            here = next(self._answers(name, verb="here"), {})
            if here.get("run") is not None and here["phase"] != "done":
                yield name, here

    def _agent(self) -> str:
        """The door of an agent of the job that is meant.

        Raises:
            NoAnswerError: there is none, or more than one.
        """
        job = self._args.job
        agents = [(name, here) for name, here in self._agents() if here["run"]["run_id"].startswith(job)]
        jobs = sorted({here["run"]["run_id"] for _, here in agents})
        if not jobs:
            what = f"no job {job} of yours" if job else "no job of yours"
            raise NoAnswerError(f"{what} runs on this machine{texts.ended(self._ended())}", EXIT_NO_JOB)
        if len(jobs) > 1:
            raise NoAnswerError(f"{len(jobs)} jobs run on this machine: say which: {', '.join(jobs)}", EXIT_INPUT)
        if len(agents) > 1 and self._verb == "drain" and not self._args.node:
            ids = ", ".join(here["run"]["node_id"] for _, here in agents)
            raise NoAnswerError(f"{len(agents)} agents of the job run on this machine: say which: {ids}", EXIT_INPUT)
        return agents[0][0]

    def _ended(self) -> list[Said]:
        return [said for said in map(json.loads, doors.ended(self._folder)) if said.get("run")]

    def _answers(self, name: str, **asked: Any) -> Iterator[Said]:
        """What an agent answers, one after the other."""
        conn = doors.connect(self._folder, name, ANSWER_S)
        if conn is None:
            return
        with conn, conn.makefile("r", encoding="utf-8") as lines:
            conn.sendall(json.dumps(asked).encode() + b"\n")
            if asked.get("follow") or asked.get("wait"):
                conn.settimeout(None)
            try:
                yield from map(json.loads, lines)
            except (OSError, ValueError):
                return

    def _answer(self, name: str, **asked: Any) -> Said:
        return next(self._answers(name, **asked), NO_ANSWER)

    def _conclude(self, said: Said, text: str | None = None) -> int:
        """Says the answer, as JSON or in words, and gives the exit code."""
        code = EXIT_CODES.get(said["code"], EXIT_NO_ANSWER)
        if self._args.json:
            _write(json.dumps(said, indent=2))
        elif code:
            self._complain(f"aelastic: {said.get('text') or said['code']}")
        elif text or said.get("text"):
            _write(text or said["text"])
        return code

    # The verbs.

    def _list(self) -> int:
        jobs = [here for _, here in self._agents()]
        if not jobs:
            raise NoAnswerError(f"no job of yours runs on this machine{texts.ended(self._ended())}", EXIT_NO_JOB)
        return self._conclude({"code": "ok", "jobs": jobs}, texts.jobs(jobs))

    def _show(self) -> int:
        said = self._answer(self._agent(), verb=self._verb)
        if said["code"] != "ok":
            return self._conclude(said)
        if self._verb == "status":
            return self._conclude(said, texts.status(said["nodes"], said["silent"]))
        ranks = {str(rank) for rank in self._args.ranks}
        if unknown := ranks - said["stacks"].keys():
            there = f"; there are {texts.ranks(said['stacks'])}" if said["stacks"] else ": no worker runs"
            return self._conclude({"code": "refused", "text": f"no rank {', '.join(sorted(unknown))}{there}"})
        said["stacks"] = {rank: text for rank, text in said["stacks"].items() if rank in (ranks or said["stacks"])}
        return self._conclude(said, texts.stacks(said["stacks"], said["compared"]))

    def _why(self) -> int:
        try:
            said = self._answer(self._agent(), verb="why")
        except NoAnswerError as error:
            ended = [each for each in self._ended() if each["run"]["run_id"].startswith(self._args.job)]
            if error.code != EXIT_NO_JOB or not ended:
                raise
            said = {"code": "ok", "why": ended[0]["why"]}
        said["why"] = said.get("why", [])[: self._args.n]
        return self._conclude(said, texts.why(said["why"]))

    def _log(self) -> int:
        asked = {"rank": self._args.rank, "stderr": self._args.stderr, "follow": self._args.follow}
        is_first, text = True, ""
        for said in self._answers(self._agent(), verb="logs", **asked):
            if "code" in said:
                return self._conclude({**said, "data": text} if self._args.json else said)
            data = said["data"].encode("latin-1")
            if is_first:
                data, is_first = b"".join(data.splitlines(keepends=True)[-self._args.n :]), False
            if self._args.json and not self._args.follow:
                text += data.decode(errors="replace")
                continue
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
        return 0 if self._args.follow else self._conclude(NO_ANSWER)

    def _request(self) -> int:
        args = self._args
        asked: Said = {"deadline_s": args.deadline, "reason": args.reason, "wait": args.wait}
        if self._verb == "drain":
            asked.update(verb="cancel" if args.cancel else "drain", node=args.node)
        else:
            asked.update(verb=self._verb, at_save=args.at_save, now=getattr(args, "now", False))
        for said in self._answers(self._agent(), **asked):
            if "code" in said:
                return self._conclude(said)
            if not args.json:
                _write(said["text"])
        return self._conclude({"code": "ok", "text": "the agent has ended"} if args.wait else NO_ANSWER)


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
