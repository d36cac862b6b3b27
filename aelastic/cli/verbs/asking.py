"""`aelastic status`, and the like: what people ask of a job that runs, by the door of an agent on this machine.

A verb stands first; a script of that name is `./status`.  Exit codes: 0 done; 1 refused, and the job is undisturbed; 2
usage; 3 no such job; 4 no answer, and it is not known what follows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from aelastic.cli.verbs import texts
from aelastic.errors import EXIT_FAILURE, EXIT_INPUT, InputError
from aelastic.failures.failure import printable
from aelastic.host import sockets
from aelastic.ui.commands import seconds

EXIT_NO_JOB, EXIT_NO_ANSWER = 3, 4
EXIT_CODES = {"ok": 0, "refused": EXIT_FAILURE, "not-allowed": EXIT_FAILURE, "no-answer": EXIT_NO_ANSWER}
# An agent waits 8 s for the stacks of others, 5 s for all else.
ANSWER_S = 10.0
WATCH_S = 1.0
Said = dict[str, Any]
NO_ANSWER: Said = {"code": "no-answer", "text": "the agent has not answered: it is not known what follows"}


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: use a number, at least 1")
    return int(text)


def _reason(text: str) -> str:
    from aelastic.rdzv.protocol.requests import REASON_MAX

    if len(text) > REASON_MAX:
        raise argparse.ArgumentTypeError(f"use {REASON_MAX:,} characters at most")
    return text


_JOB: Any = {"default": "", "help": "its run id, or the beginning of it"}
_FLAG: Any = {"action": "store_true"}
_AT_SAVE = "--at-save", {**_FLAG, "help": "once all ranks have saved at one step"}
# Each verb: what it does, and its options.
_SAVES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--job", _JOB),
    ("--deadline", {"type": seconds, "default": 120.0, "metavar": "S", "help": "for saving (default: 120)"}),
    ("--reason", {"type": _reason, "default": "", "metavar": "TEXT", "help": "said in logs"}),
    ("--wait", {**_FLAG, "help": "until workers run again, or the job is over"}),
)
VERBS: dict[str, tuple[str, Sequence[tuple[str, dict[str, Any]]]]] = {
    "ps": ("lists the jobs of this user on this machine", ()),
    "status": ("says what each node of a job does",
               [("job", {"nargs": "?", **_JOB}), ("-w --watch", {**_FLAG, "help": "again each second"})]),
    "why": ("says why workers ended, the latest first; also of a job that has ended",
            [("job", {"nargs": "?", **_JOB, "help": f"{_JOB['help']}; or its event log, or the folder of its logs"}),
             ("-n", {"type": _count, "default": 1, "help": "the last N ends (default: 1)"})]),
    "stacks": ("says where the workers of all nodes are in their Python code",
               [("ranks", {"nargs": "*", "type": int, "metavar": "RANK", "help": "of these only"}), ("--job", _JOB)]),
    "logs": ("shows what a worker has written, on whatever node it runs",
             [("rank", {"type": int, "metavar": "RANK"}), ("--job", _JOB),
              ("-f --follow", {**_FLAG, "help": "until the job is over"}),
              ("-n", {"type": _count, "default": 20, "help": "the last N lines (default: 20)"}),
              ("--stderr", {**_FLAG, "help": "what it has written to stderr"})]),
    "drain": ("has a node leave: all ranks save at one step, and the others go on",
              [("node", {"nargs": "?", "default": "", "help": "its host, or its id (default: this one)"}),
               ("--cancel", {**_FLAG, "help": "it stays after all"}),
               ("--force", {**_FLAG, "help": "also where this ends the job"}), *_SAVES]),
    "exclude": ("has a host have no seat for an hour, as long as there are enough nodes without it",
                [("node", {"help": "its host, or its id"}), *_SAVES[:1], *_SAVES[2:3]]),
    "include": ("has it have a seat again", [("node", {"help": "its host, or its id"}), *_SAVES[:1]]),
    "restart": ("ends the workers of all nodes, and starts them again; no restart is charged", [_AT_SAVE, *_SAVES]),
    "stop": ("ends the job on all nodes",
             [_AT_SAVE, ("--now", {**_FLAG, "help": "workers are killed, and cannot save"}), *_SAVES]),
}  # fmt: skip


# What does something to a job takes the beginning of an id only if nobody chose it: a job `exp` may have ended.
_ACT = "drain", "exclude", "include", "restart", "stop"
_GENERATED = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


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
        if argv[0] not in VERBS:
            return _run_apart(argv[0], argv[1:], environ)
        args = _parser(argv[0]).parse_args(argv[1:])
        try:
            return _Asking(argv[0], args, sockets.doors_folder(environ), complain).run()
        except InputError as error:  # logs that cannot be read
            raise NoAnswerError(f"error: {error}", EXIT_INPUT) from None
    except NoAnswerError as error:
        return _refuse(argv, error.code, str(error), complain)
    except PermissionError as error:
        return _refuse(argv, EXIT_FAILURE, str(error), complain)
    except SystemExit:  # `--help` has said it
        return 0
    except BrokenPipeError:
        return 0  # who reads has seen enough
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


def _run_apart(verb: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Of a job that is over, or before it begins."""
    if verb == "policy":
        from aelastic.cli.verbs.explaining import run_policy

        return run_policy(argv)
    if verb == "spent":
        from aelastic.spent.command import run_spent

        return run_spent(argv)
    return _rehearse(argv, environ)


def _rehearse(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from aelastic.cli.arguments import parse
    from aelastic.cli.options import GROUPS
    from aelastic.cli.parser import read_options
    from aelastic.rehearse.command import run_rehearsal
    from aelastic.rehearse.play import Script

    def read(rest: Sequence[str]) -> Script:
        chosen, spec = read_options(rest, environ, GROUPS), parse(rest, environ).spec
        begins, rdzv = len(rest) - len(chosen.script_args) - 1, spec.rdzv
        nodes = (1, 1) if rdzv is None else (rdzv.min_nodes, rdzv.max_nodes)
        step = re.compile(chosen["progress"]) if chosen["progress"] else None
        # It has an endpoint of its own.
        options = [each for each in rest[:begins] if each not in {"--", "--standalone"}]
        return Script(options, rest[begins:], nodes, spec.local_world_size, step, environ)

    return run_rehearsal(argv, read)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Says what is wrong in one line."""
        raise NoAnswerError(f"error: {self.prog.partition(' ')[2]}: {message} (see {self.prog} --help)", EXIT_INPUT)


def _parser(verb: str) -> argparse.ArgumentParser:
    about, options = VERBS[verb]
    parser = _Parser(prog=f"aelastic {verb}", description=f"{verb}: {about}.", allow_abbrev=False)
    for names, how in (("--json", {**_FLAG, "help": "one JSON object, with a code"}), *options):
        parser.add_argument(*names.split(), **how)
    return parser


class _Asking:
    """One command; each verb that does nothing to the job is a method."""

    def __init__(self, verb: str, args: argparse.Namespace, folder: Path, complain: Callable[[str], None]) -> None:
        self._verb, self._args, self._folder, self._complain = verb, args, folder, complain
        self._is_silent = False  # an agent, that lives

    def run(self) -> int:
        code: int = self._request() if self._verb in _ACT else getattr(self, self._verb)()
        while code == 0 and getattr(self._args, "watch", False):
            time.sleep(WATCH_S)  # noqa: TID251  nothing else runs in this process
            code = self.status()
        return code

    # Which job.

    def _agents(self) -> list[tuple[str, Said]]:
        """The agents of this user here that answer: their doors, and what they are.

        Raises:
            NoAnswerError: there is none.
        """
        job, found = getattr(self._args, "job", ""), []
        for name in sockets.doors_in(self._folder):
            here = self._answer(name, verb="here")
            if here["code"] == "ok" and here["phase"] != "done" and here["run"]["run_id"].startswith(job):
                found.append((name, here))
        ids = {here["run"]["run_id"] for _, here in found}
        if job in ids:
            found = [each for each in found if each[1]["run"]["run_id"] == job]
        elif job and self._verb in _ACT and (named := sorted(each for each in ids if not _GENERATED.fullmatch(each))):
            text = f"no job {job} of yours runs on this machine: say the whole id of {', '.join(named)}"
            raise NoAnswerError(text, EXIT_NO_JOB)
        if not found and self._is_silent:
            raise NoAnswerError(str(NO_ANSWER["text"]), EXIT_NO_ANSWER)
        if not found:
            what = f"no job {job} of yours" if job else "no job of yours"
            raise NoAnswerError(f"{what} runs on this machine{texts.ended(self._ended())}", EXIT_NO_JOB)
        return found

    def _agent(self) -> str:
        """The door of an agent of the job that is meant.

        Raises:
            NoAnswerError: there is none, or more than one.
        """
        agents = self._agents()
        ids = {here["run"]["node_id"] for _, here in agents}
        if len(jobs := sorted({here["run"]["run_id"] for _, here in agents})) > 1:
            raise NoAnswerError(f"{len(jobs)} jobs run on this machine: say which: {', '.join(jobs)}", EXIT_INPUT)
        if len(agents) > 1 and getattr(self._args, "node", None) == "":
            text = f"{len(agents)} agents of the job run on this machine: say which: {', '.join(sorted(ids))}"
            raise NoAnswerError(text, EXIT_INPUT)
        return agents[0][0]

    def _ended(self) -> list[Said]:
        return [said for said in map(json.loads, sockets.left_at_doors(self._folder)) if said.get("run")]

    def _answers(self, name: str, **asked: Any) -> Iterator[Said]:
        """What an agent answers, one after the other; at the end, if it has said nothing that ends it, that."""
        if (conn := sockets.connect_to_door(self._folder, name, ANSWER_S)) is not None:
            with conn, conn.makefile("r", encoding="utf-8") as lines, suppress(OSError, ValueError):
                conn.sendall(json.dumps(asked).encode() + b"\n")
                if asked.get("follow") or asked.get("wait"):
                    conn.settimeout(None)
                for line in lines:
                    yield (said := json.loads(line))
                    if "code" in said:
                        return
            self._is_silent = True
        yield NO_ANSWER

    def _answer(self, name: str, **asked: Any) -> Said:
        return next(self._answers(name, **asked))

    def _conclude(self, said: Said, text: str | None = None) -> int:
        """Says the answer, as JSON or in words, and gives the exit code."""
        code = EXIT_CODES.get(said["code"], EXIT_NO_ANSWER)
        if self._args.json:
            _write(json.dumps(said, indent=None if getattr(self._args, "watch", False) else 2))
        elif code:
            self._complain(f"aelastic: {said.get('text') or said['code']}")
        elif text or said.get("text"):
            _write(printable(text or said["text"]))
        return code

    # The verbs.

    def ps(self) -> int:
        jobs = [here for _, here in self._agents()]
        return self._conclude({"code": "ok", "jobs": jobs}, texts.jobs(jobs))

    def status(self) -> int:
        said = self._answer(self._agent(), verb="status")
        nodes, silent, refused = said.get("nodes", ()), said.get("silent", ()), said.get("refused", {})
        return self._conclude(said, texts.status(nodes, silent, refused))

    def stacks(self) -> int:
        said = self._answer(self._agent(), verb="stacks")
        found, ranks = said.get("stacks", {}), {str(rank) for rank in self._args.ranks}
        if said["code"] == "ok" and (unknown := ranks - found.keys()):
            there = f"; there are {texts.ranks(found)}" if found else ": no worker runs"
            said = {"code": "refused", "text": f"no rank {', '.join(sorted(unknown))}{there}"}
        said["stacks"] = {rank: text for rank, text in found.items() if rank in (ranks or found)}
        return self._conclude(said, texts.stacks(said["stacks"], said.get("compared", "")))

    def why(self) -> int:
        try:
            said = self._answer(self._agent(), verb="why")
        except NoAnswerError as error:
            ids = {each["run"]["run_id"] for each in self._ended()}
            wanted = {self._args.job} & ids or {each for each in ids if each.startswith(self._args.job)}
            ended = [each["why"] for each in self._ended() if each["run"]["run_id"] in wanted]
            if error.code == EXIT_NO_JOB and not ended and os.path.exists(self._args.job):
                from aelastic.cli.verbs.explaining import read_ends

                ended = [read_ends(Path(self._args.job))]
            if error.code != EXIT_NO_JOB or not ended:
                raise
            if len(ids) > 1 and not self._args.job:
                last = next(each["run"]["run_id"] for each in self._ended())
                self._complain(f"aelastic: of {last}, the last of {len(ids)} jobs that have ended")
            said = {"code": "ok", "why": ended[0]}
        said["why"] = said.get("why", [])[: self._args.n]
        return self._conclude(said, texts.why(said["why"], said.get("held", "")))

    def logs(self) -> int:
        asked = {"rank": self._args.rank, "stderr": self._args.stderr, "follow": self._args.follow}
        is_first, text = True, ""
        for said in self._answers(self._agent(), verb="logs", **asked):
            if "code" in said:  # who follows has read to the end of the job
                is_over = self._args.follow and not is_first and said is NO_ANSWER
                return 0 if is_over else self._conclude({**said, "data": text} if self._args.json else said)
            data = said["data"].encode("latin-1")
            if is_first:
                data, is_first = b"".join(data.splitlines(keepends=True)[-self._args.n :]), False
            if self._args.json and not self._args.follow:
                text += data.decode(errors="replace")
                continue
            if sys.stdout is not None:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        raise AssertionError("the last answer ends it")

    def _request(self) -> int:
        """Has something done to the job."""
        args, has_said = vars(self._args), False
        if args.get("now") and args["at_save"]:
            raise NoAnswerError("error: stop: --at-save lets workers save, --now kills them: say one", EXIT_INPUT)
        asked: Said = {name: args[name] for name in ("node", "at_save", "force", "reason", "wait") if name in args}
        asked["verb"] = "cancel" if args.get("cancel") else "kill" if args.get("now") else self._verb
        if "deadline" in args:
            asked["deadline_s"] = args["deadline"]
        for said in self._answers(self._agent(), **asked):
            if "code" in said:
                is_over = said is NO_ANSWER and has_said
                return self._conclude({"code": "ok", "text": "the agent has ended"} if is_over else said)
            has_said = True
            if not self._args.json:
                _write(said["text"])
        raise AssertionError("the last answer ends it")


def _write(text: str) -> None:
    if sys.stdout is not None:  # else it is closed
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
