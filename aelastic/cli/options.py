"""The options of the command line, in the order of the help, in one table.

Most belong to a field: `spec` and `rdzv.settings` define these, with their words, default, rule and variable.  The rest
is here: what decides several fields, or none.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from typing import NamedTuple

from aelastic.base.setting import RANKS, Option, of_torchrun, options_of, own
from aelastic.base.texts import one_of, read_flag, read_ranks, read_seconds, read_signal, read_signals
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.spec import WorkerSpec

# Among the shells that shtab knows; torchrun has the first three if shtab is not installed.
COMPLETION_SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")


class OnSignal(NamedTuple):
    """The agent's action on a signal: drain within `drain_s` or, if that is `None`, pass it on to the workers."""

    signum: signal.Signals
    drain_s: float | None


def read_on_signal(text: str) -> tuple[OnSignal, ...]:
    """Reads the actions on signals: `USR1=drain:110,USR2=pass`."""
    found = []
    for part in text.split(",") if text.strip() else ():
        name, _, what = (piece.strip() for piece in part.partition("="))
        verb, _, seconds = what.partition(":")
        if verb not in {"drain", "pass"} or (verb == "pass" and seconds):
            raise ValueError("use SIGNAL=drain:SECONDS or SIGNAL=pass, separated by commas, as in USR1=drain:110")
        drain_s = None if verb == "pass" else read_seconds(seconds)
        if drain_s is not None and not 1 <= drain_s < math.inf:
            raise ValueError("give at least 1 s to drain in, as in USR1=drain:110")
        found.append(OnSignal(read_signal(name if name.upper().startswith("SIG") else f"SIG{name}"), drain_s))
    if len({each.signum for each in found}) < len(found):
        raise ValueError("name each signal once")
    return tuple(found)


_OF_FIELDS = options_of(WorkerSpec, RendezvousSettings)


def _fields(*names: str) -> tuple[Option, ...]:
    """Returns options of fields, by their names."""
    return tuple(_OF_FIELDS[name] for name in names)


# Defaults are torchrun's; titles and words are ours.
GROUPS: Mapping[str, tuple[Option, ...]] = {
    "what to run": (
        of_torchrun("-m --module", read_flag, "", "run SCRIPT as a module, as python -m does", default="0"),
        of_torchrun("--no-python", read_flag, "", "run SCRIPT as a program, without python", default="0"),
        of_torchrun("--run-path", read_flag, "",
            "run SCRIPT inside a multiprocessing child; takes precedence over the other two", default="0"),
        *_fields("--start-method"),
    ),
    "workers and nodes": _fields("--nproc-per-node", "--numa-binding", "--virtual-local-rank", "--nnodes", "--role"),
    "rendezvous": (
        of_torchrun("--standalone", read_flag, "",
            "run on this node only, and choose address and port automatically", default="0"),
        *_fields("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--node-rank", "--local-addr",
            "--master-addr", "--master-port"),
    ),
    "failures and stopping": (
        *_fields("--max-restarts", "--shutdown-timeout"),
        of_torchrun("--signals-to-handle", read_signals, "NAMES",
            "signals that stop the job: the workers also get them, and may finish; a second signal kills them",
            default="SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
        *_fields("--monitor-interval"),
    ),
    "output": _fields("--log-dir", "--redirects", "--tee", "--log-line-prefix-template", "--local-ranks-filter",
        "--duplicate-stdout-filters", "--duplicate-stderr-filters", "--event-log-handler", "--logs-specs"),
    "shell completion": (
        Option(("--print-completion",), one_of(*COMPLETION_SHELLS), "SHELL",
            f"print a completion script for a shell ({', '.join(COMPLETION_SHELLS)}) and exit; needs shtab"),
    ),
    "several nodes (aelastic only)": _fields("--secret-file", "--bind-all", "--admit", "--no-remote-requests"),
    "restart decisions (aelastic only)": _fields("--restart-policy", "--restart-grace", "--on-failure", "--recovery",
        "--health-check"),
    "announced interruptions (aelastic only)": (
        own("--on-signal", read_on_signal, "SIGNAL=WHAT",
            "USR1=drain:110: on SIGUSR1, drain this node within 110 s, once all ranks have saved at the same step; "
            "USR2=pass: pass SIGUSR2 on to the workers", default=""),
        *_fields("--notice-file", "--notice-command", "--drain-signal", "--drain-wait"),
    ),
    "hang detection (aelastic only)": (
        *_fields("--hang-timeout", "--hang-signals", "--hang-action", "--expect-output"),
        own("--expect-output-ranks", read_ranks, "RANKS",
            "global ranks that --expect-output applies to, e.g. 0 if only rank 0 prints (default: all)", rule=RANKS),
    ),
    "how workers start (aelastic only)": _fields("--preload", "--cache-dir", "--wrap", "--wrap-ranks"),
    "progress, logs and metrics (aelastic only)": (
        *_fields("--progress"),
        own("--ui", one_of("auto", "line", "view", "off"), "KIND",
            "what a terminal shows below the output: line, the state of the job; view, also its ranks (needs "
            "rich); off; auto, a line unless CI or NO_COLOR is set", default="auto"),
        *_fields("--keep-log-size", "--metrics-textfile", "--linger"),
    ),
    "the agent process (aelastic only)": (
        own("--exit-codes", one_of("cause", "torchrun"), "SCHEME",
            "cause: exit with the code of the worker that failed first; torchrun: exit with 1 for every failure",
            default="cause"),
        own("--loop", one_of("uvloop", "asyncio"), "LOOP", "event loop: uvloop or asyncio", default="uvloop"),
    ),
}  # fmt: skip

# `torch.distributed.launch` has all of them, and passes the local rank to the script as an argument, unless --use-env.
LAUNCH_GROUPS: Mapping[str, tuple[Option, ...]] = {
    "torch.distributed.launch": (
        Option(("--use-env",), read_flag, "",
            "the script reads LOCAL_RANK from its environment, and gets no argument --local-rank=N", "0"),
    ),
    **GROUPS,
}  # fmt: skip

OPTIONS: tuple[Option, ...] = tuple(option for group in GROUPS.values() for option in group)
OWN: frozenset[str] = frozenset(
    option.dest for title, group in GROUPS.items() if "aelastic only" in title for option in group
)
