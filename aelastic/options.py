"""The options of the command line: spellings, defaults and words, in one table.

`read_options` finds for each the text (command line, else `PET_<NAME>` or `AELASTIC_<NAME>`, else the
default) and reads it.  argparse does the grammar alone, so prefixes, `-r3`, `--` and the arguments of
the script mean what they mean to torchrun; values are read here, so that a bad one is named by where it
came from.

All of torchrun's options are in the table.  Those of a later version (`is_later`) are understood, so
that prefixes stay what they are, and refused unless they ask for what happens anyway.

Nothing here looks at the machine.
"""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from aelastic import __version__
from aelastic.errors import InputError
from aelastic.spec import SHUTDOWN_TIMEOUT_S, START_METHODS, Std

HELP_WIDTH = 100
_HELP_COLUMN = 30

PORT_MAX = 65535  # ports have 16 bits: tcp(7)
# What the agent cannot (signal(7)) or must not take over: SIGCHLD tells of exits.
_UNHANDLED = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})


# Readers: text in, value out; a ValueError says what is wrong and what to do.


def _text(text: str) -> str:
    return text


def _flag(text: str) -> bool:
    try:
        return bool(int(text))
    except ValueError:
        raise ValueError("use 1 for yes, 0 or nothing for no") from None


def _count(text: str) -> int:
    count = _int(text)
    if count < 0:
        raise ValueError("use 0 or more")
    return count


def _port(text: str) -> int:
    port = _int(text)
    if not 0 <= port <= PORT_MAX:
        raise ValueError(f"use a port from 0 (a free one) to {PORT_MAX}")
    return port


def _seconds(text: str) -> float:
    seconds = _float(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError("use seconds, 0 or more")
    return seconds


def _interval(text: str) -> float:
    interval = _float(text)
    if not (math.isfinite(interval) and interval > 0):
        raise ValueError("use seconds above 0")
    return interval


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("use a whole number") from None


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("use a number of seconds") from None


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"use one of {', '.join(choices)}")
        return text

    return read


def _name(text: str) -> str:
    if not text:
        raise ValueError("use a name that is not empty")
    return text


def _address(text: str) -> str:
    # torchrun takes an IPv6 address in brackets, and hands it to the workers without.
    address = text.strip().removeprefix("[").removesuffix("]")
    if not address:
        raise ValueError("use a host name or an address")
    return address


def _nodes(text: str) -> tuple[int, int]:
    try:
        fewest, *rest = (int(part) for part in text.split(":"))
        (most,) = rest or [fewest]
    except ValueError:
        raise ValueError("use a number of nodes, or a range MIN:MAX") from None
    if fewest < 1:
        raise ValueError("at least 1 node is needed")
    if fewest > most:
        raise ValueError(f"the minimum {fewest} is above the maximum {most}: use MIN:MAX")
    if most > 1:
        raise ValueError("several nodes are not in this version of aelastic: use 1")
    return fewest, most


def _workers(text: str) -> int | str:
    """A number of workers, or the word for what to count."""
    if text in {"auto", "cpu", "gpu", "xpu"}:
        return text
    try:
        workers = int(text)
    except ValueError:
        raise ValueError("use a number of workers, or auto, cpu, gpu or xpu") from None
    if workers < 1:
        raise ValueError("at least 1 worker is needed")
    return workers


def _signals(text: str) -> tuple[signal.Signals, ...]:
    """Signals by name, in the order given, each once; no name at all is no signal."""
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in signal.Signals.__members__:
            raise ValueError(f"{name} is not a signal of this system: use names such as SIGTERM,SIGUSR1")
        if signal.Signals[name] in _UNHANDLED:
            raise ValueError(f"{name} cannot be handled: leave it out")
    return tuple(dict.fromkeys(signal.Signals[name] for name in names))


# Named tuples, where dataclasses would do: each of those costs 0.5 ms to make, at every start.
class Option(NamedTuple):
    """One option.

    Args:
        names: with dashes; the long one last.
        default: what is read when nobody gives the option; `None` is not read.
        metavar: what the help calls the value; empty for a flag.
        text: the help, without the default.
        variables: where the default may come from instead, first come first served; an empty one counts as unset.
    """

    names: tuple[str, ...]
    read: Callable[[str], Any]
    default: str | None
    metavar: str
    text: str
    variables: tuple[str, ...]
    is_later: bool = False

    @property
    def name(self) -> str:
        return self.names[-1]

    @property
    def dest(self) -> str:
        return _dest(self.name)

    @property
    def spellings(self) -> tuple[str, ...]:
        """The names, and the long one with underscores where it has several words."""
        return tuple(dict.fromkeys([*self.names, "--" + self.dest]))


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _option(names: str, read: Callable[[str], Any], default: str | None, metavar: str, text: str, *more: str) -> Option:
    """An option of torchrun, with its `PET_` variable and `more` variables to look at after that."""
    spelled = tuple(names.split())
    return Option(spelled, read, default, metavar, text, (f"PET_{_dest(spelled[-1]).upper()}", *more))


def _own(name: str, read: Callable[[str], Any], default: str, metavar: str, text: str) -> Option:
    return Option((name,), read, default, metavar, text, (f"AELASTIC_{_dest(name).upper()}",))


def _later(name: str, default: str | None = None, *, is_flag: bool = False, has_variable: bool = True) -> Option:
    variables = (f"PET_{_dest(name).upper()}",) if has_variable else ()
    read: Callable[[str], Any] = _flag if is_flag else _text
    return Option((name,), read, default, "" if is_flag else "…", "", variables, is_later=True)


# Defaults are torchrun's, as text; titles and words are ours.
GROUPS: Mapping[str, tuple[Option, ...]] = {
    "what to run": (
        _option("-m --module", _flag, "0", "", "the script is a module, run as python -m does"),
        _option("--no-python", _flag, "0", "", "the script is a program, run without python"),
        _option(
            "--run-path", _flag, "0", "",
            "the script is a file, run inside a multiprocessing child; goes before the other two",
        ),
        _option(
            "--start-method", _one_of(*START_METHODS), "spawn", "METHOD",
            f"how multiprocessing starts that child: {', '.join(START_METHODS)}",
        ),
    ),
    "how many": (
        _option(
            "--nproc-per-node", _workers, "1", "N",
            "workers on this node: a number, cpu (one per usable CPU), gpu, xpu (one per device), "
            "or auto (one per accelerator, per CPU where there is none)",
        ),
        _option("--nnodes", _nodes, "1:1", "MIN:MAX", "nodes in the job; this version runs one"),
        _option("--role", _name, "default", "NAME", "what the workers are called, in their environment and in logs"),
    ),
    "where they meet": (
        _option("--standalone", _flag, "0", "", "one node on its own: address, port and run id are picked"),
        _option("--master-addr", _address, "127.0.0.1", "HOST", "MASTER_ADDR; used together with --master-port"),
        _option(
            "--master-port", _port, None, "PORT",
            "MASTER_PORT, and run id none; without it a free port and a random run id",
        ),
    ),
    "when they fail, or must stop": (
        _option("--max-restarts", _count, "0", "N", "how often all workers may be started again after a failure"),
        _option(
            "--shutdown-timeout", _seconds, f"{SHUTDOWN_TIMEOUT_S:g}", "SECONDS",
            "from the request to stop until workers are killed; also TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        ),
        _option(
            "--signals-to-handle", _signals, "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "NAMES",
            "signals that stop the job: passed on to the workers, which may then finish; a second one kills them",
        ),
        _option(
            "--monitor-interval", _interval, "0.1", "SECONDS",
            "how often to look at workers where the kernel cannot tell of their exit",
        ),
    ),
    "their output": (
        _option("--log-dir", _text, None, "DIR", "folder for log files; without it a temporary one"),
        _option(
            "-r --redirects", Std.from_str, "0", "STREAMS",
            "streams that go to files: 1 stdout, 2 stderr, 3 both, or by local rank, as in 0:3,1:2",
        ),
        _option("-t --tee", Std.from_str, "0", "STREAMS", "streams that go to files and to the console; likewise"),
    ),
    "of aelastic, not in torchrun": (
        _own("--loop", _one_of("uvloop", "asyncio"), "uvloop", "LOOP", "event loop of the agent: uvloop or asyncio"),
        _own(
            "--exit-codes", _one_of("cause", "torchrun"), "cause", "SCHEME",
            "cause: exit with the code of the worker that failed first; torchrun: with 1 for every failure",
        ),
    ),
    "later": (
        _later("--rdzv-backend", "static"),
        _later("--rdzv-endpoint", ""),
        _later("--rdzv-id", "none"),
        _later("--rdzv-conf", ""),
        _later("--node-rank", "0"),
        _later("--local-addr"),
        _later("--event-log-handler", "null"),
        _later("--logs-specs", has_variable=False),
        _later("--local-ranks-filter", ""),
        _later("--duplicate-stdout-filters", ""),
        _later("--duplicate-stderr-filters", ""),
        _later("--numa-binding", has_variable=False),
        _later("--virtual-local-rank", "0", is_flag=True),
    ),
}  # fmt: skip

OPTIONS: tuple[Option, ...] = tuple(option for group in GROUPS.values() for option in group)


class Setting(NamedTuple):
    """One option's value, the text it was read from, and what to call it in a complaint (`PET_ROLE=x`)."""

    value: Any
    text: str | None
    source: str
    is_default: bool


@dataclass(frozen=True, slots=True)
class Settings:
    """Every option's setting by `dest`, the script, and the script's arguments."""

    script: str
    script_args: tuple[str, ...]
    by_dest: Mapping[str, Setting]

    def __getitem__(self, dest: str) -> Any:
        return self.by_dest[dest].value

    def source(self, dest: str) -> str:
        return self.by_dest[dest].source


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Reads the command line.  `--help` and `--version` print and leave.

    Raises:
        InputError: an unknown option, a value that cannot be read, no script.
        SystemExit: after `--help` and `--version`.
    """
    found = _find(argv)
    by_dest = {option.dest: _read(option, found, environ) for option in OPTIONS}
    is_alone = by_dest["standalone"].value
    for option in OPTIONS:
        # `--standalone` wins over whatever the rendezvous options say, as in torchrun.
        if option.is_later and not (is_alone and option.dest.startswith("rdzv_")):
            _refuse_unless_default(option, by_dest[option.dest])
    return Settings(found["script"], tuple(found["script_args"]), by_dest)


def _read(option: Option, found: Mapping[str, Any], environ: Mapping[str, str]) -> Setting:
    text, source, is_default = _look_up(option, found, environ)
    try:
        value = None if text is None else option.read(text)
    except ValueError as reason:
        raise InputError(f"{source}: {reason}") from None
    return Setting(value, text, source, is_default)


def _look_up(option: Option, found: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str | None, str, bool]:
    """An option's text, what to call it, and whether nobody gave one."""
    if option.dest in found:
        text = found[option.dest]
        return text, f"{option.name} {text}" if option.metavar else option.name, False
    for variable in option.variables:
        if text := environ.get(variable, ""):
            return text, f"{variable}={text}", False
    return option.default, option.name, True


def _refuse_unless_default(option: Option, setting: Setting) -> None:
    default = None if option.default is None else option.read(option.default)
    if setting.value != default:
        raise InputError(f"{setting.source}: not in this version of aelastic: leave it out")


class _NoScriptError(InputError):
    """No script on the command line, though perhaps something else is wrong with it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            raise _NoScriptError("no script given: name what to run after the options")
        raise InputError(message)

    def format_help(self) -> str:
        return help_text()


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            print(f"aelastic {__version__}", flush=True)  # noqa: T201
        except OSError:
            pass  # nobody reads it
        parser.exit()


def _formatter(prog: str) -> argparse.HelpFormatter:
    # Unused, yet argparse makes one for each option; without a width it imports shutil to ask the terminal, 4 ms.
    return argparse.HelpFormatter(prog, width=HELP_WIDTH)


def _build_parser() -> _Parser:
    parser = _Parser(prog="aelastic", argument_default=argparse.SUPPRESS, formatter_class=_formatter)
    for option in OPTIONS:
        if option.metavar:
            parser.add_argument(*option.spellings, dest=option.dest)
        else:
            parser.add_argument(*option.spellings, dest=option.dest, action="store_const", const="1")
    parser.add_argument("--version", action=_ShowVersion, nargs=0)
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    return parser


def _find(argv: Sequence[str]) -> dict[str, Any]:
    """The texts given on the command line by `dest`, `script` and `script_args` among them."""
    parser = _build_parser()
    try:
        found, unknown = parser.parse_known_args(argv)
    except _NoScriptError:
        # argparse misses the script first, and what was wrong is more likely the option before it.
        _, unknown = parser.parse_known_args([*argv, "script"])
        if not unknown:
            raise
    if unknown:
        raise InputError(_unknown_option(unknown[0].partition("=")[0]))
    return vars(found)


def _unknown_option(name: str) -> str:
    import difflib  # only a misspelled command line pays for it

    known = [spelling for option in OPTIONS for spelling in option.spellings]
    close = difflib.get_close_matches(name, known, n=1)
    return f"unknown option {name}" + (f": did you mean {close[0]}?" if close else "")


def help_text() -> str:
    """What `--help` prints, at most `HELP_WIDTH` columns wide."""
    return "\n".join(_help_lines()) + "\n"


def _help_lines() -> Iterator[str]:
    yield "usage: aelastic [options] script [arguments of the script]"
    yield ""
    yield from _wrap("Starts training processes on this node, watches them, and says why when they fail.")
    for title, options in GROUPS.items():
        if title == "later":
            continue
        yield ""
        yield f"{title}:"
        for option in options:
            yield from _help_entry(option)
    yield from _entry("--version", "show the version and leave")
    yield ""
    yield from _entry("-h, --help", "show this and leave")
    yield ""
    yield from _wrap(
        "--like-this and --like_this are the same, and an unambiguous beginning is enough. Each option "
        "of torchrun can also be set by a variable, --nproc-per-node by PET_NPROC_PER_NODE, those of "
        "aelastic by AELASTIC_LOOP and AELASTIC_EXIT_CODES. An empty variable counts as unset, a flag is 1 or 0."
    )


def _help_entry(option: Option) -> Iterator[str]:
    has_default = option.default is not None and bool(option.metavar)
    default = f" (default: {option.default})" if has_default else ""
    yield from _entry(f"{', '.join(option.names)} {option.metavar}".rstrip(), option.text + default)


def _entry(left: str, right: str) -> Iterator[str]:
    first, *rest = _wrap(right, " " * _HELP_COLUMN)
    yield f"  {left}".ljust(_HELP_COLUMN) + first.lstrip()
    yield from rest


def _wrap(text: str, indent: str = "") -> list[str]:
    import textwrap  # only the help pays for it

    return textwrap.wrap(text, HELP_WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
