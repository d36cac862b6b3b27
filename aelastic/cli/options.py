"""The options of the command line: spellings, defaults and help texts, in one table.

The table has all of torchrun's options, then our own.  `parser` uses the table; the readers of values are in
`converters`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from aelastic.cli.converters import (
    one_of,
    read_address,
    read_admit,
    read_expected,
    read_filters,
    read_flag,
    read_grace,
    read_hang_timeout,
    read_hold,
    read_int,
    read_nodes,
    read_on_signal,
    read_pairs,
    read_path,
    read_policy,
    read_preload,
    read_ranks,
    read_seconds,
    read_signal,
    read_signals,
    read_signs,
    read_size,
    read_workers,
    read_wrap,
)
from aelastic.diagnose.hangs.options import HANG_ACTIONS, HANG_SIGNALS
from aelastic.settings import (
    NAME,
    NOT_NEGATIVE,
    RANKS,
    REAL,
    RECOVERIES,
    RULES,
    SECONDS,
    SHUTDOWN_TIMEOUT_S,
    START_METHODS,
    Rule,
    Std,
    all_of,
    optional,
)
from aelastic.workers.options import NUMA_BINDINGS

# Among the shells that shtab knows; torchrun has the first three if shtab is not installed.
COMPLETION_SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")


# Named tuples rather than dataclasses, which cost 0.5 ms each at every start.
class Option(NamedTuple):
    """One option.

    Args:
        names: with dashes; the long one last.
        default: the text that is read if the option is not given; `None` is not read.
        metavar: what the help calls the value; empty for a flag.
        text: the help, without the default.
        variables: environment variables that replace the default, the first one that is not empty.
        field: the field of a `WorkerSpec` that gets the value; empty without one, or if several options decide it.
        rule: what the value must be; by default, what the field must be.
    """

    names: tuple[str, ...]
    read: Callable[[str], Any]
    default: str | None
    metavar: str
    text: str
    variables: tuple[str, ...]
    field: str = ""
    rule: Rule = all_of()

    @property
    def name(self) -> str:
        return self.names[-1]

    @property
    def dest(self) -> str:
        return _dest(self.name)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the option accepts; none if it accepts other texts."""
        return self.read.args[0] if isinstance(self.read, partial) else ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """The names, and the long one with underscores if it has several words."""
        return tuple(dict.fromkeys([*self.names, "--" + self.dest]))


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _option(
    names: str, read: Callable[[str], Any], default: str | None, metavar: str, text: str, *more: str, **ours: Any
) -> Option:
    """Makes an option of torchrun, with its `PET_` variable, and `more` variables after that."""
    spelled = tuple(names.split())
    return _row(spelled, read, default, metavar, text, (f"PET_{_dest(spelled[-1]).upper()}", *more), **ours)


def _own(name: str, read: Callable[[str], Any], default: str | None, metavar: str, text: str, **ours: Any) -> Option:
    """Makes an option that torchrun lacks, with its `AELASTIC_` variable."""
    return _row((name,), read, default, metavar, text, (f"AELASTIC_{_dest(name).upper()}",), **ours)


def _silent(name: str, read: Callable[[str], Any], metavar: str, text: str, **ours: Any) -> Option:
    """Makes an option of torchrun that has no variable."""
    return _row((name,), read, None, metavar, text, (), **ours)


def _row(*columns: Any, field: str | None = None, rule: Rule | None = None) -> Option:
    """Makes an option; by default it decides the field of its own name (with `_s` for seconds), if there is one."""
    if field is None:
        dest = _dest(columns[0][-1])
        field = next((name for name in (dest, f"{dest}_s") if name in RULES), "")
    return Option._make((*columns, field, rule or RULES.get(field, all_of())))


# Defaults are torchrun's, as text; titles and words are ours.
GROUPS: Mapping[str, tuple[Option, ...]] = {
    "what to run": (
        _option("-m --module", read_flag, "0", "", "run SCRIPT as a module, as python -m does"),
        _option("--no-python", read_flag, "0", "", "run SCRIPT as a program, without python"),
        _option("--run-path", read_flag, "0", "",
            "run SCRIPT inside a multiprocessing child; takes precedence over the other two"),
        _option("--start-method", one_of(*START_METHODS), "spawn", "METHOD",
            f"how multiprocessing starts that child: {', '.join(START_METHODS)}"),
    ),
    "workers and nodes": (
        _option("--nproc-per-node", read_workers, "1", "N",
            "workers on this node: a number, cpu (one per usable CPU), gpu or xpu (one per device), or auto (one per "
            "accelerator, or per CPU without accelerators)"),
        _silent("--numa-binding", one_of(*NUMA_BINDINGS), "MODE",
            f"bind each worker to CPUs near its GPU: {', '.join(NUMA_BINDINGS)}"),
        _option("--virtual-local-rank", read_flag, "0", "",
            "show each worker only its own device, and give it LOCAL_RANK 0"),
        _option("--nnodes", read_nodes, "1:1", "MIN:MAX",
            "nodes in the job: a number, or a range within which nodes may join and leave"),
        _option("--role", str, "default", "NAME",
            "role of the workers, in their environment and in logs"),
    ),
    "rendezvous": (
        _option("--standalone", read_flag, "0", "", "run on this node only, and choose address and port automatically"),
        _option("--rdzv-backend", str, "static", "NAME",
            "how the nodes find each other: static (at --master-addr; a fixed number of nodes, ranked by --node-rank), "
            "c10d (on one of the nodes; needs no other service), etcd, etcd-v2, etcd-v3, or torch:NAME for a handler "
            "of torch",
            rule=NAME),
        _option("--rdzv-endpoint", str.strip, "", "HOST:PORT",
            "where the nodes meet, the same on every node; separate several with commas"),
        _option("--rdzv-id", str, "none", "ID",
            "run id: the job's name, the same on every node and different from every other job's",
            field="run_id"),
        _option("--rdzv-conf", read_pairs, "", "K=V,K=V",
            "more settings: join_timeout, last_call_timeout, lease (seconds), and those of the back end"),
        _option("--node-rank", read_int, "0", "N",
            "rank of this node: binding with static, otherwise a preference and the node's identity when it reconnects",
            rule=NOT_NEGATIVE),
        _option("--local-addr", read_address, None, "HOST",
            "address where other nodes reach this one (default: detected)"),
        _option("--master-addr", read_address, "127.0.0.1", "HOST", "static: address of rank 0, and MASTER_ADDR"),
        _option("--master-port", read_int, None, "PORT",
            "static: port of rank 0, and MASTER_PORT (default: 29500; a single node picks a free port and a run id)"),
    ),
    "failures and stopping": (
        _option("--max-restarts", read_int, "0", "N", "how many times the workers may be restarted after a failure"),
        _option("--shutdown-timeout", read_seconds, f"{SHUTDOWN_TIMEOUT_S:g}", "SECONDS",
            "time from the stop request until workers are killed; also TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        _option("--signals-to-handle", read_signals, "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "NAMES",
            "signals that stop the job: the workers also get them, and may finish; a second signal kills them"),
        _option("--monitor-interval", read_seconds, "0.1", "SECONDS",
            "how often to check workers if the kernel cannot report their exit"),
    ),
    "output": (
        _option("--log-dir", str, None, "DIR", "folder for log files (default: a temporary folder)"),
        _option("-r --redirects", Std.from_str, "0", "STREAMS",
            "streams that go to files: 1 stdout, 2 stderr, 3 both; or by local rank, e.g. 0:3,1:2"),
        _option("-t --tee", Std.from_str, "0", "STREAMS",
            "streams that go to files and to the console; values as for --redirects"),
        _option("--log-line-prefix-template", str, "", "TEMPLATE",
            "prefix of each teed line on the console, made of ${role_name}, ${rank}, ${local_rank}, ${hostname} and "
            "${pid}; also TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE (default: [${role_name}${local_rank}]:)",
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        _option("--local-ranks-filter", read_ranks, "", "RANKS",
            "local ranks whose teed output is shown on the console, e.g. 0,1 (default: all)"),
        _option("--duplicate-stdout-filters", read_filters, "", "TEXTS",
            "copy lines of stdout that contain one of these texts to filtered_stdout.log; separate texts with commas "
            "(,, is a comma); stdout must go to files"),
        _option("--duplicate-stderr-filters", read_filters, "", "TEXTS", "the same for stderr, to filtered_stderr.log"),
        _option("--event-log-handler", str, "null", "NAME",
            "handler of torchelastic's events: null, console, or one that a program registers in torch's "
            "events.handlers"),
        _silent("--logs-specs", str, "NAME",
            "class in an installed package that decides where output goes (entry point group torchrun.logs_specs)",
            field="", rule=optional(NAME)),
    ),
    "shell completion": (
        _silent("--print-completion", one_of(*COMPLETION_SHELLS), "SHELL",
            f"print a completion script for a shell ({', '.join(COMPLETION_SHELLS)}) and exit; "
            "needs shtab"),
    ),
    "several nodes (aelastic only)": (
        _own("--secret-file", str, None, "PATH",
            "file with the job's shared secret (one line, 32 bytes or more); agents without it cannot join or end the "
            "job"),
        _own("--bind-all", read_flag, "0", "",
            "listen on all addresses of this host, not only on the one that other nodes use; for NAT and containers"),
        _own("--admit", read_admit, "at-once", "WHEN",
            "when a new node may join: at-once; saved, once all ranks have saved at the same step, or after 120 s; "
            "saved:SECONDS"),
        _own("--no-remote-requests", read_flag, "0", "",
            "ignore commands (such as aelastic restart) issued on other nodes, and report nothing to them"),
    ),
    "restart decisions (aelastic only)": (
        _own("--restart-policy", read_policy, None, "RULES",
            "rules for how to react to failures, e.g. 'exit 42: stop; *: restart 5/1h after 1s..5m', or @FILE "
            "(default: a failure that a restart cannot fix ends the job the second time it happens without progress)"),
        _own("--restart-grace", read_grace, None, "SECONDS",
            "time until workers that are stopped for a restart are killed, or shutdown-timeout, as for other stops "
            "(default: as long as they write, 5 s while they only compute, 2 s while they do neither)"),
        _own("--on-failure", read_hold, "stop", "WHAT",
            "stop: stop all workers at once; hold: leave them running until aelastic restart or stop; hold:SECONDS: "
            "for at most that long",
            field="hold_on_failure_s"),
        _own("--recovery", one_of(*RECOVERIES), RECOVERIES[0], "HOW",
            "in-place: when a worker is lost, the others keep their processes and their state, if every worker has "
            "opted in with aelastic.in_place; restart: all workers start again"),
        _own("--health-check", str, None, "COMMAND",
            "command to run before each join: exit code 2 keeps this node out, any other does not; builtin: check the "
            "kernel log and the free space of this host"),
    ),
    "announced interruptions (aelastic only)": (
        _own("--on-signal", read_on_signal, "", "SIGNAL=WHAT",
            "USR1=drain:110: on SIGUSR1, drain this node within 110 s, once all ranks have saved at the same step; "
            "USR2=pass: pass SIGUSR2 on to the workers"),
        _own("--notice-file", read_path, None, "PATH",
            "drain this node when PATH appears (it may hold the seconds that are left); deleting the file cancels "
            "the drain"),
        _own("--notice-command", str, None, "COMMAND",
            "program that announces interruptions, one per line on stdout: 'drain 110 spot' or 'cancel'"),
        _own("--drain-signal", read_signal, "SIGTERM", "SIGNAL",
            "signal sent on a drain to workers that have a handler for it, if no rank calls aelastic.notice.due"),
        _own("--drain-wait", read_seconds, "0", "SECONDS",
            "how long the remaining nodes wait for a replacement after a drain", rule=all_of(REAL, SECONDS)),
    ),
    "hang detection (aelastic only)": (
        _own("--hang-timeout", read_hang_timeout, None, "SECONDS",
            "a worker that shows no sign of life for this long hangs; 5x: five times the median step time, as found by "
            "--progress or told by workers that recover in place, from 30 to 900 s (default: no hang detection)",
            field=""),
        _own("--hang-signals", read_signs, ",".join(HANG_SIGNALS), "SIGNS",
            "signs of life: output, cpu (1 % of a core or more), io (bytes and calls); leave out cpu if workers spin "
            "while they wait for each other, as with NCCL"),
        _own("--hang-action", one_of(*HANG_ACTIONS), HANG_ACTIONS[0], "ACTION",
            "stop: treat a worker that hangs, or lacks expected output, as failed; report: only log it"),
        _own("--expect-output", read_expected, None, "REGEX:SECONDS",
            "each worker must write a matching line within this time after its start, and after each match",
            field="", rule=RULES["expect_output"]),
        _own("--expect-output-ranks", read_ranks, None, "RANKS",
            "global ranks that --expect-output applies to, e.g. 0 if only rank 0 prints (default: all)",
            rule=RANKS),
    ),
    "how workers start (aelastic only)": (
        _option("--preload", read_preload, "off", "MODULES",
            "modules to import once, in a template process that workers are forked from, e.g. torch,transformers; "
            "auto: those that the first workers imported; off"),
        _own("--cache-dir", read_path, None, "DIR",
            "folder on this node where workers keep what they compile: kernels, graphs, extensions, bytecode"),
        _own("--wrap", read_wrap, "", "COMMAND", "program that starts the workers, e.g. 'nsys profile'"),
        _own("--wrap-ranks", read_ranks, "", "RANKS", "global ranks that --wrap applies to, e.g. 0,1 (default: all)"),
    ),
    "progress, logs and metrics (aelastic only)": (
        _option("--progress", str, None, "REGEX",
            "how the workers' output shows the step: the first group is the step, the second the last step, "
            r"e.g. 'step (\d+)/(\d+)'"),
        _own("--ui", one_of("auto", "line", "view", "off"), "auto", "KIND",
            "what a terminal shows below the output: line, the state of the job; view, also its ranks (needs "
            "rich); off; auto, a line unless CI or NO_COLOR is set"),
        _own("--keep-log-size", read_size, None, "SIZE",
            "keep only about the last SIZE of each worker log file, e.g. 500M or 2G (default: everything)",
            field="log_max_bytes"),
        _own("--metrics-textfile", read_path, None, "PATH",
            "write the metrics to a file (*.prom) for node_exporter, every 15 s and at the end"),
        _own("--linger", read_seconds, "0", "SECONDS",
            "how long the health server stays after the run, until /metrics has been read"),
    ),
    "the agent process (aelastic only)": (
        _own("--exit-codes", one_of("cause", "torchrun"), "cause", "SCHEME",
            "cause: exit with the code of the worker that failed first; torchrun: exit with 1 for every failure"),
        _own("--loop", one_of("uvloop", "asyncio"), "uvloop", "LOOP", "event loop: uvloop or asyncio"),
    ),
}  # fmt: skip

# `torch.distributed.launch` has all of them, and passes the local rank to the script as an argument, unless --use-env.
LAUNCH_GROUPS: Mapping[str, tuple[Option, ...]] = {
    "torch.distributed.launch": (
        Option(("--use-env",), read_flag, "0", "",
            "the script reads LOCAL_RANK from its environment, and gets no argument --local-rank=N", ()),
    ),
    **GROUPS,
}  # fmt: skip

OPTIONS: tuple[Option, ...] = tuple(option for group in GROUPS.values() for option in group)
OWN: frozenset[str] = frozenset(
    option.dest for title, group in GROUPS.items() if "aelastic only" in title for option in group
)
