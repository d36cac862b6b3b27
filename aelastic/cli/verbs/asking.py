"""Commands about a job, such as `aelastic status`: they connect to the control socket of an agent on this machine.

Exit codes: 0 done; 1 refused, and the job is undisturbed; 2 wrong usage; 3 no such job; 4 no answer, and the request
may or may not have been carried out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aelastic.base.host import control_sockets
from aelastic.cli.manual.parsing import parser_of
from aelastic.cli.verbs import texts
from aelastic.cli.verbs.jobs import (
    EXIT_NO_ANSWER,
    EXIT_NO_JOB,
    NO_ANSWER,
    OF_NODES,
    OF_RANKS,
    OF_THE_JOB,
    Jobs,
    JsonObject,
    NoAnswerError,
)
from aelastic.diagnose.failures.failure import printable
from aelastic.errors import EXIT_FAILURE, EXIT_INPUT, InputError
from aelastic.observe.status_text import counted
from aelastic.observe.ui.commands import WrongUsageError, paint_for

EXIT_CODES = {"ok": 0, "refused": EXIT_FAILURE, "not-allowed": EXIT_FAILURE, "no-answer": EXIT_NO_ANSWER}
WATCH_S = 1.0
RANK = re.compile("[0-9]{1,9}")


def run_verb(argv: Sequence[str], environ: Mapping[str, str], complain: Callable[[str], None]) -> int:
    """Sends a request to an agent, prints the answer, and returns the exit code.

    Args:
        argv: the command and its arguments.
        environ: names the folder of the control sockets.
        complain: called with each error.
    """
    try:
        return _Asking(argv, _read(argv), control_sockets.folder_of(environ), complain).run()
    except WrongUsageError as error:
        return _refuse(argv, EXIT_INPUT, f"error: {error} (see aelastic {argv[0]} --help)", complain)
    except InputError as error:
        return _refuse(argv, EXIT_INPUT, f"error: {error}", complain)
    except NoAnswerError as error:
        return _refuse(argv, error.code, str(error), complain)
    except PermissionError as error:
        return _refuse(argv, EXIT_FAILURE, str(error), complain)
    except SystemExit:  # after `--help`
        return 0
    except BrokenPipeError:
        return 0  # the reader has seen enough
    except OSError as error:
        complain(f"aelastic: stdout cannot be written: {error.strerror}")
        return EXIT_NO_ANSWER
    except KeyboardInterrupt:
        return 128 + 2


def _refuse(argv: Sequence[str], code: int, text: str, complain: Callable[[str], None]) -> int:
    complain(f"aelastic: {text}")
    if "--json" in argv:
        names = {EXIT_NO_JOB: "no-such-job", EXIT_NO_ANSWER: "no-answer", EXIT_FAILURE: "not-allowed"}
        _write(json.dumps({"code": names.get(code, "usage"), "text": text}))
    return code


def _read(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the options of a command; `job` is the named job, `more` the words that the command does not take.

    Raises:
        InputError: the options are invalid.
    """
    parser = parser_of(argv[0])
    args, more = parser.parse_known_args(argv[1:])
    args.more = more
    first = getattr(args, "first", "")
    args.job = getattr(args, "job", "")  # `ps` has none
    if args.job and first and args.job != first:
        parser.error(f"{first} and --job {args.job} are two jobs: name one")
    args.job = args.job or first
    if any(each.startswith("-") for each in more):
        parser.refuse(more)
    return args


class _Asking:
    """One command; each query is a method.

    Args:
        argv: the command and its arguments.
        args: the arguments, read.
        folder: has the control sockets of agents.
        complain: called with each error.
    """

    def __init__(
        self, argv: Sequence[str], args: argparse.Namespace, folder: Path, complain: Callable[[str], None]
    ) -> None:
        self._verb, self._args, self._complain = argv[0], args, complain
        self._jobs = Jobs(folder, argv, args.job)

    def run(self) -> int:
        self._check_words()
        code = self._request() if self._verb in OF_THE_JOB else self._query()
        while code == 0 and getattr(self._args, "watch", False):
            time.sleep(WATCH_S)  # noqa: TID251  nothing else runs in this process
            code = self.status()
        return code

    def _query(self) -> int:
        match self._verb:
            case "ps":
                return self.ps()
            case "status":
                return self.status()
            case "stacks":
                return self.stacks()
            case "why":
                return self.why()
            case "logs":
                return self.logs()
            case _:
                raise AssertionError(f"{self._verb} is not a query")

    def _check_words(self) -> None:
        """Refuses an invalid rank, a job's name given instead of a rank or a node, and extra words.

        Raises:
            InputError: there is one of these.
        """
        args, parser = self._args, parser_of(self._verb)
        ranks = [args.rank] if self._verb == "logs" else args.ranks if self._verb == "stacks" else []
        wrong = [each for each in ranks if not RANK.fullmatch(each)]
        nodes = [args.node] if self._verb in OF_NODES and args.node else []
        if self._verb in {*OF_RANKS, *OF_NODES} and not args.job and (words := [*wrong, *nodes, *args.more]):
            here = [here["run"] for _, here in self._jobs.agents()]
            jobs = {run["run_id"] for run in here} - {run[name] for run in here for name in ("host", "node_id")}
            for job in [each for each in words if each in jobs]:
                parser.error(f"{job} is a job; did you mean --job {job}?")
        if self._verb == "logs" and args.json and args.follow:
            parser.error("--follow prints output as it comes, --json prints one object: use one of the two")
        if wrong:
            parser.error(f"{wrong[0]!r} is not a rank: use a number")
        if args.more:
            parser.refuse(args.more)

    def _answer(self) -> tuple[JsonObject, JsonObject]:
        """Returns the answer of an agent of the job to this query, and the agent's description of itself."""
        socket_name, here = self._jobs.meant()[0]
        return self._jobs.answer(socket_name, verb=self._verb), here

    def _conclude(self, answer: JsonObject, text: str = "", *, painted: str = "", about: str = "") -> int:
        """Prints the answer, as JSON or as text, and returns the exit code.

        Args:
            text: replaces the answer's own text.
            painted: likewise, but already printable; it may have colours.
            about: how the text begins.
        """
        code = EXIT_CODES.get(answer["code"], EXIT_NO_ANSWER)
        if self._args.json:
            _write(json.dumps(answer, indent=None if getattr(self._args, "watch", False) else 2))
        elif code:
            self._complain(f"aelastic: {about}{answer.get('text') or answer['code']}")
        elif painted:
            _write(painted)
        elif text or answer.get("text"):
            _write(printable(f"{about}{text or answer['text']}"))
        return code

    # Queries.

    def ps(self) -> int:
        jobs = [here for _, here in self._jobs.named()]
        return self._conclude({"code": "ok", "jobs": jobs}, painted=texts.jobs(jobs, paint_for(sys.stdout)))

    def status(self) -> int:
        answer, here = self._answer()
        nodes, silent, refused = answer.get("nodes", ()), [*answer.get("silent", ())], answer.get("refused", {})
        if missing := answer.get("missing", 0):
            silent.append(counted(missing, "more node"))
        return self._conclude(answer, painted=texts.status(nodes, silent, refused, here, paint_for(sys.stdout)))

    def stacks(self) -> int:
        answer, _ = self._answer()
        found, ranks = answer.get("stacks", {}), {str(int(rank)) for rank in self._args.ranks}
        if answer["code"] == "ok" and (unknown := ranks - found.keys()):
            there = f"; there are {texts.ranks(found)}" if found else ": no worker is running"
            answer = {"code": "refused", "text": f"no rank {', '.join(sorted(unknown))}{there}"}
        answer["stacks"] = {rank: text for rank, text in found.items() if rank in (ranks or found)}
        return self._conclude(answer, texts.stacks(answer["stacks"], answer.get("compared", "")))

    def why(self) -> int:
        try:
            answer, _ = self._answer()
        except NoAnswerError as error:
            is_known_without = error.code == EXIT_NO_JOB or os.path.exists(self._args.job)  # another job may be silent
            found = self._why_ended() if is_known_without else None
            if found is None:
                raise
            answer = found
        ends = answer.get("why", [])
        answer |= {"why": ends[: self._args.n], "earlier": max(0, len(ends) - self._args.n)}
        if answer["code"] == "ok" and not answer["why"] and (ended := answer.get("ended")):
            return self._conclude(answer, ended)
        return self._conclude(answer, texts.why(answer["why"], answer["earlier"], answer.get("held", "")))

    def _why_ended(self) -> JsonObject | None:
        """Returns the answer about a job that has ended; `None` if nothing is known of it.

        Raises:
            InputError: the job's name is the path of a file that does not exist.
        """
        job, ended = self._args.job, self._jobs.ended()
        wanted = self._jobs.ended_as(job) if job else [each for each in ended if each["why"]] or ended
        if not wanted and os.path.exists(job):
            from aelastic.cli.verbs.explaining import read_ends

            return {"code": "ok", "why": read_ends(Path(job))}
        if not wanted and os.sep in job:
            raise InputError(f"{job}: no such file or folder")
        if not wanted:
            return None
        last, ids = wanted[0], {each["run"]["run_id"] for each in wanted}
        if len(ids) > 1 and not job:
            name = f"{last['run']['run_id']} ({last['run']['entrypoint']})"
            self._complain(f"aelastic: about {name}, the last of {len(ids)} jobs that have ended")
        return {"code": "ok", "why": last["why"], "ended": texts.has_ended(last)}

    def logs(self) -> int:
        asked = {"rank": int(self._args.rank), "stderr": self._args.stderr, "follow": self._args.follow}
        is_first, text = True, ""
        socket_name, _ = self._jobs.meant()[0]
        for message in self._jobs.answers(socket_name, verb="logs", **asked):
            if "code" in message:  # with --follow, the job may be over
                is_over = self._args.follow and not is_first and message is NO_ANSWER
                return 0 if is_over else self._conclude({**message, "data": text} if self._args.json else message)
            data = message["data"].encode("latin-1")
            if is_first:
                data, is_first = b"".join(data.splitlines(keepends=True)[-self._args.n :]), False
            if self._args.json:
                text += data.decode(errors="replace")
                continue
            if sys.stdout is not None:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        raise AssertionError("the last answer ends it")

    def _request(self) -> int:
        """Sends a request that changes the job."""
        args, has_answered = vars(self._args), False
        if args.get("now") and args["at_save"]:
            raise NoAnswerError(
                "error: stop: --at-save lets workers save, --now kills them: use one of the two", EXIT_INPUT
            )
        asked: JsonObject = {
            name: args[name] for name in ("node", "at_save", "force", "reason", "wait") if name in args
        }
        asked["verb"] = "cancel" if args.get("cancel") else "kill" if args.get("now") else self._verb
        if "deadline" in args:
            asked["deadline_s"] = args["deadline"]
        socket_name, here = self._agent_of(args)
        job = here["run"]["run_id"]
        for message in self._jobs.answers(socket_name, **asked):
            if "code" in message:
                is_over = message is NO_ANSWER and has_answered
                last = {"code": "ok", "text": "the agent has ended"} if is_over else message
                return self._conclude({**last, "job": job}, about=f"{job}: ")
            has_answered = True
            if not self._args.json:
                _write(printable(f"{job}: {message['text']}"))
        raise AssertionError("the last answer ends it")

    def _agent_of(self, args: Mapping[str, Any]) -> tuple[str, JsonObject]:
        """Returns an agent of the job; the only one, if the request is about its own node.

        Raises:
            NoAnswerError: there are several.
        """
        agents = self._jobs.meant()
        if len(agents) > 1 and args.get("node") == "":
            ids = ", ".join(sorted(here["run"]["node_id"] for _, here in agents))
            raise NoAnswerError(f"{len(agents)} agents of the job run on this machine; name one: {ids}", EXIT_INPUT)
        return agents[0]


def _write(text: str) -> None:
    if sys.stdout is not None:  # otherwise it is closed
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
