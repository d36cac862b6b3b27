r"""The table of commands: what each does, its arguments, two examples, and its exit codes.

The parsers of the commands, `aelastic --help`, `aelastic COMMAND --help` and `docs/reference/cli.md` are made from it;
a test reads every example as the program reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from aelastic.cli.manual.readers import read_budget, read_count, read_metric, read_node, read_price, read_reason
from aelastic.cli.manual.rows import Argument, Command, Example
from aelastic.observe.ui.commands import read_seconds

BEFORE, WHILE, AFTER, HELP = "Before a job runs", "While it runs", "When workers have ended", "Help"
GROUPS = (BEFORE, WHILE, AFTER, HELP)

# Exit codes.

_ASKING = (
    ("0", "done"),
    ("1", "refused; the job is undisturbed"),
    ("2", "wrong usage, or more than one job could be meant"),
    ("3", "no such job of yours runs on this machine"),
    ("4", "no answer; the request may or may not have been carried out"),
)
_SHOWING = (("0", "done"), ("1", "refused"), *_ASKING[2:4], ("4", "no answer"))
_READING = (("0", "done"), ("2", "wrong usage, or the event logs cannot be read"))

# Arguments.

_JSON = Argument(("--json",), "print one JSON object, with a code")
_JOB_FIRST = Argument(
    ("first",), "run id of the job, or how it begins (default: the only job)", "JOB", nargs="?", default=""
)
_JOB = Argument(("--job",), "run id of the job, or how it begins", "JOB", default="")
_NODE = Argument(
    ("node",), "host name or id of the node", "NODE", read_node, remedy="name a node that aelastic status lists"
)
_AT_SAVE = Argument(("--at-save",), "wait until all ranks have saved at the same step")
_DEADLINE = Argument(("--deadline",), "seconds to save in", "SECONDS", read_seconds, "120")
_REASON = Argument(("--reason",), "reason to log on all nodes, next to your user name", "TEXT", read_reason, "")
_WAIT = Argument(("--wait",), "wait until workers run again, or the job is over")
_WAIT_FOR_END = Argument(("--wait",), "wait until the job is over")
_EVENT_LOGS = "name the --log-dir that the job ran with, as in {}"
_ON_REQUEST = _JOB, _DEADLINE, _REASON

_COMMANDS = (
    Command(
        "doctor", BEFORE, "check this host and the rendezvous endpoints",
        (
            Example("check this host", "aelastic doctor"),
            Example(
                "check an endpoint before the first job",
                "aelastic doctor --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:29400",
            ),
        ),
        (("0", "no errors; there may be warnings"), ("1", "at least one error"), ("2", "wrong usage")),
        note=(
            "Starts nothing. Prints one line for each check: ok, warning or error, what was found, and what to do."
        ),
        arguments=(_JSON,),
        script="[SCRIPT]",
        job_options=(
            "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--local-addr", "--node-rank",
            "--master-addr", "--master-port", "--secret-file", "--log-dir",
        ),
        page="reference/rendezvous.md#before-the-first-job",
    ),
    Command(
        "rehearse", BEFORE, "kill, freeze and resize a script to see whether it resumes",
        (
            Example(
                "rehearse a script that prints its steps and saves in ckpt",
                r"aelastic rehearse --progress 'step (\d+)' --checkpoints ckpt train.py",
            ),
            Example(
                "rehearse only the kills, and compare the loss",
                r"aelastic rehearse --only killed --metric 'loss (\S+)' train.py",
            ),
            Example(
                "rehearse only recovery in place, with four ranks",
                "aelastic rehearse --only 'in place' --nproc-per-node 4 train.py",
            ),
        ),
        (
            ("0", "every case passed"),
            ("1", "at least one case failed"),
            ("2", "wrong usage"),
            ("3", "the script cannot be rehearsed"),
        ),
        (
            Argument(
                ("--metric",), r"number that must be the same in every run, e.g. 'loss (\S+)'", "REGEX", read_metric
            ),
            Argument(("--checkpoints",), "folder where the script saves (default: this folder)", "DIR", Path),
            Argument(("--for",), "limit the undisturbed run to this many seconds", "SECONDS", read_seconds, "600"),
            Argument(("--only",), "run only the cases whose name contains WORD", "WORD", default=""),
            Argument(
                ("--output",),
                "new folder for logs and the files of the script (default: one in aelastic_rehearsals)", "DIR", Path,
            ),
            Argument(("--json",), "print one JSON object at the end, and nothing before"),
        ),
        note=(
            "Runs the script undisturbed, then under one fault at a time. --progress tells which step it is at; "
            "without it, steps are those that the script commits (recovery in place), or calls of notice.due(). "
            "Options may come in any order before the script."
        ),
        script="SCRIPT [ARGS]...",
        job_options=("--nproc-per-node", "--nnodes", "--progress", "--max-restarts"),
        page="how-to/rehearse.md",
    ),
    Command(
        "ps", WHILE, "list your jobs on this machine",
        (Example("list your jobs", "aelastic ps"), Example("list them for a program", "aelastic ps --json")),
        (
            ("0", "done"),
            ("1", "refused"),
            ("2", "wrong usage"),
            ("3", "no job of yours runs on this machine"),
            ("4", "no answer"),
        ),
        (_JSON,),
        page="how-to/speak.md",
    ),
    Command(
        "status", WHILE, "show what each node of a job is doing",
        (
            Example("show the only job on this machine", "aelastic status"),
            Example("show a job again every second", "aelastic status resnet --watch"),
        ),
        _SHOWING,
        (_JOB_FIRST, _JOB, Argument(("-w", "--watch"), "repeat every second"), _JSON),
        page="how-to/speak.md",
    ),
    Command(
        "logs", WHILE, "print the output of a worker, on whatever node it runs",
        (
            Example("follow rank 3", "aelastic logs 3 --follow"),
            Example("print the last 200 lines of stderr of rank 0", "aelastic logs 0 -n 200 --stderr --job resnet"),
        ),
        _SHOWING,
        (
            Argument(
                ("rank",), "global rank of the worker", "RANK", remedy="name a worker, as in aelastic logs 0",
            ),
            _JOB,
            Argument(("-f", "--follow"), "keep printing until the job is over"),
            Argument(("-n",), "start with the last N lines", "N", read_count, "20"),
            Argument(("--stderr",), "print stderr instead of stdout"),
            _JSON,
        ),
        note=(
            "stdout is kept only if it goes to a file (--tee 3 or --redirects 3). Logs of other nodes are shown only "
            "in a job with a --secret-file."
        ),
        page="how-to/speak.md",
    ),
    Command(
        "stacks", WHILE, "show where each worker is in its Python code",
        (
            Example("compare all ranks, and name the one that the others wait for", "aelastic stacks"),
            Example("show two ranks only", "aelastic stacks 0 5 --job resnet"),
        ),
        _SHOWING,
        (Argument(("ranks",), "global ranks to show (default: all)", "RANK", nargs="*"), _JOB, _JSON),
        page="reference/stacks.md",
    ),
    Command(
        "drain", WHILE, "save on all ranks, then take a node out of the job",
        (
            Example("take n2 out of the job within 90 s", "aelastic drain n2 --deadline 90 --reason 'spot notice'"),
            Example("keep it after all", "aelastic drain n2 --cancel"),
        ),
        _ASKING,
        (
            Argument(
                ("node",), "host name or id of the node (default: this node)", "NODE", read_node, nargs="?", default=""
            ),
            Argument(("--cancel",), "cancel the drain"),
            Argument(("--force",), "drain the node even if this ends the job"),
            *_ON_REQUEST,
            _WAIT,
            _JSON,
        ),
        page="how-to/drain.md",
    ),
    Command(
        "cordon", WHILE, "keep a host out of the job for an hour",
        (
            Example("keep n2 out of the only job on this machine", "aelastic cordon n2 --reason 'faulty fan'"),
            Example("keep a host out of a job with a name", "aelastic cordon n2 --job resnet"),
        ),
        _ASKING,
        (_NODE, _JOB, _REASON, _JSON),
        note=(
            "The workers of all nodes restart without the host, as long as enough other nodes remain. "
            "aelastic uncordon lets it take part again."
        ),
        page="how-to/verdicts.md",
    ),
    Command(
        "uncordon", WHILE, "let a cordoned host take part again",
        (
            Example("let n2 take part again", "aelastic uncordon n2"),
            Example("in a job with a name", "aelastic uncordon n2 --job resnet"),
        ),
        _ASKING,
        (_NODE, _JOB, _JSON),
        page="how-to/verdicts.md",
    ),
    Command(
        "restart", WHILE, "restart the workers of all nodes",
        (
            Example("restart now, and wait until workers run again", "aelastic restart --wait"),
            Example("restart a job once all ranks have saved", "aelastic restart resnet --at-save"),
        ),
        _ASKING,
        (_JOB_FIRST, _AT_SAVE, *_ON_REQUEST, _WAIT, _JSON),
        note="Ends all workers, also those that could recover in place. Does not count against --max-restarts.",
        page="how-to/speak.md",
    ),
    Command(
        "stop", WHILE, "end the job on all nodes",
        (
            Example("end a job; workers get SIGTERM and the usual time to save", "aelastic stop resnet"),
            Example("save at one step first, so that the same command resumes", "aelastic stop resnet --at-save"),
        ),
        _ASKING,
        (
            _JOB_FIRST,
            _AT_SAVE,
            Argument(("--now",), "kill workers; they cannot save"),
            *_ON_REQUEST,
            _WAIT_FOR_END,
            _JSON,
        ),
        page="how-to/stop.md",
    ),
    Command(
        "why", AFTER, "explain why workers ended, and what was decided",
        (
            Example("explain the last end of the only job", "aelastic why"),
            Example("explain the last three ends, from the logs of a job that is over", "aelastic why logs -n 3"),
        ),
        _SHOWING,
        (
            Argument(
                ("first",),
                "run id of a job that runs or has ended within the hour, or how it begins; or an event log, or a "
                "folder of logs (default: the only job)",
                "JOB", nargs="?", default="",
            ),
            _JOB,
            Argument(("-n",), "explain the last N ends, the latest first", "N", read_count, "1"),
            _JSON,
        ),
        page="how-to/verdicts.md",
    ),
    Command(
        "timeline", AFTER, "draw a run from its event logs",
        (
            Example("write logs/timeline.html, and a trace for ui.perfetto.dev", "aelastic timeline logs"),
            Example("draw the logs of two nodes", "aelastic timeline node0/logs node1/logs -o run.html"),
        ),
        (("0", "done"), ("2", "wrong usage, or a file cannot be read or written")),
        (
            Argument(
                ("folders",), "folder of event logs (events.jsonl), or one of them", "LOGDIR", Path, nargs="+",
                remedy=_EVENT_LOGS.format("aelastic timeline logs"),
            ),
            Argument(("-o", "--output"), "file to draw into (default: LOGDIR/timeline.html)", "FILE", Path),
            Argument(("--trace",), "file for the trace (default: timeline.trace.json, next to it)", "FILE", Path),
            Argument(("--run-id",), "run to draw, if there are several (default: the one that began last)", "ID"),
            _JSON,
        ),
        note=(
            "Event logs are found up to three folders deep. Those that belong to one run make one picture: an HTML "
            "file that needs no network."
        ),
        page="how-to/timeline.md",
    ),
    Command(
        "spent", AFTER, "show what the time of a run was spent on, and its cost",
        (
            Example("show the shares of a run", "aelastic spent logs"),
            Example("and what they cost", "aelastic spent logs --cost 2.10/gpu-h --save 14"),
        ),
        _READING,
        (
            Argument(
                ("events",), "event log, or a folder of them; give those of all nodes", "EVENTS", Path, nargs="+",
                remedy=_EVENT_LOGS.format("aelastic spent logs"),
            ),
            Argument(("--cost",), "price of a worker, e.g. 2.10/gpu-h, or of the job, e.g. 12/h", "PRICE", read_price),
            Argument(
                ("--save",), "seconds that one save takes (default: as seen in drains)", "SECONDS",
                partial(read_seconds, least=0.001),
            ),
            _JSON,
        ),
        page="how-to/spent.md",
    ),
    Command(
        "policy", AFTER, "replay a run under other restart rules",
        (
            Example("show what the default rules decide", "aelastic policy explain logs"),
            Example("try other rules", "aelastic policy explain logs --restart-policy 'exit 1: stop'"),
        ),
        _READING,
        (
            Argument(
                ("events",), "event log of the run, or a folder of them", "EVENTS", Path, nargs="+",
                remedy=_EVENT_LOGS.format("aelastic policy explain logs"),
            ),
            Argument(
                ("--restart-policy",), "rules, or @FILE (default: those without --restart-policy)", "RULES", default=""
            ),
            Argument(("--max-restarts",), "budget of restarts (default: that of the run)", "N", read_budget),
            _JSON,
        ),
        subcommand="explain",
        note="Starts nothing.",
        page="how-to/verdicts.md#try-rules-on-a-run-that-is-over",
    ),
    Command(
        "help", HELP, "show this help, or the help of a command or message",
        (
            Example("list the commands and the options used most", "aelastic help"),
            Example("show the help of a command", "aelastic help drain"),
            Example("explain a message that ends in (help: TOPIC)", "aelastic help no-answer-from-the-endpoint"),
        ),
        (("0", "done"), ("2", "no such command or topic")),
        (Argument(("command",), "command, or topic of a message, to explain", "COMMAND", nargs="*"),),
    ),
    Command(
        "version", HELP, "show the versions of aelastic, torch and Python",
        (
            Example("show the versions", "aelastic version"),
            Example("show those of this environment", "python -m aelastic version"),
        ),
        (("0", "done"), ("2", "wrong usage")),
        (_JSON,),
    ),
)  # fmt: skip
COMMANDS: Mapping[str, Command] = {command.name: command for command in _COMMANDS}

# Running a job, which needs no command.
RUN = Command(
    "", "", "start, watch and restart distributed PyTorch workers. A drop-in for torchrun",
    (
        Example("8 workers on this node, 3 restarts", "aelastic --nproc-per-node 8 --max-restarts 3 train.py --lr 0.1"),
        Example(
            "2 to 4 nodes; run this on each of them",
            "aelastic --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint n0:29400 train.py",
        ),
    ),
    (
        ("0", "every worker exited with 0"),
        ("N", "code of the worker that failed first; 128+N if signal N killed it"),
        ("1", "the job failed for another reason"),
        ("2", "wrong usage, or something is missing; nothing was started"),
        ("70", "a bug in aelastic, or a process that survived SIGKILL"),
        ("75", "running the same command again may help: this node was drained, or too few nodes joined"),
        ("128+N", "stopped by signal N, after all workers had ended"),
    ),
    script="SCRIPT [ARGS]...",
    page="reference/exit-codes.md",
)  # fmt: skip
