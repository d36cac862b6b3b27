"""Why a process ended: finds the cause in the tail of its stderr, and describes its exit code.

Most training scripts are not decorated with `record`, so their last output is all there is.
Everything here is a pure function of text or of a number: nothing is read, nothing raises, and the
time is linear in the tail, whatever a worker printed.

The last traceback is the cause, except that an earlier one that ended the process takes precedence over one that did
not (announced by "Exception ignored in", "Exception in thread", ...), and one that begins in the program itself
(`in <module>`), like an uncaught exception, over one that does not.  Chained exceptions are one traceback, whose
headline is the last of them; a traceback that a message quotes is part of the message.

The text does not show whether the process ended because of it: `may_be_uncaught` judges the exit code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from aelastic.base.host.signals import signal_name

# Enough for a deep traceback with long messages; anything earlier is not the last one.
TAIL_CHARS = 64 * 1024
HEADLINE_CHARS = 400
# A message this long is a dump, not an explanation.
MESSAGE_LINES = 60
# Other threads may print between the frames of a traceback; with more lines than this it is not a traceback.
INTERLEAVED_LINES = 8
# "Task exception was never retrieved" and similar lines are this close above their traceback.
ANNOUNCED_LINES = 3

_HEADER = "Traceback (most recent call last)"
_CUT = "... (the beginning is cut off)"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# How torch introduces a child's traceback inside another message: `DataLoader`, and `multiprocessing.spawn`.
_NESTED = "Original " + _HEADER
_FROM_CHILD = re.compile(r"-- Process [0-9]{1,9} terminated with the following error:")
# Where an uncaught exception's traceback begins: in the script, or in the module that runs it for `-m`.
_TOP_FRAME = re.compile(r'.* in <module>|[ |+]*File "(<frozen runpy>|[^"]*[/\\]runpy\.py)", ')
# Python's exit codes after an uncaught exception; 120 if it then cannot flush stdout (`Py_FinalizeEx`).
_UNCAUGHT = (1, 120)
_FATAL = "Fatal Python error: "
_TERMINATE = re.compile(r"terminate called after throwing an instance of '([^']*)'")
_ANNOUNCED = (
    "Exception ignored ",
    "Exception in thread ",
    "Task exception was never retrieved",
    "--- Logging error ---",
)

ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?]*[A-Za-z]|\][^\x1b\x07]*(?:\x07|\x1b\\))")
# torch's excepthook puts this before every line that is not blank.
_RANK = re.compile(r"\[rank[0-9]{1,9}\]: ")
_MARGIN = re.compile(r" *[|+] ?")
_FRAME = re.compile(r' {0,8}File "(.+)", line ([0-9]{1,9})(, in |$)')
_BOXED_FRAME = re.compile(r"[│|] (\S.*):([0-9]{1,9}) in ")
_FAULT_FRAME = re.compile(r'  File "(.+)", line ([0-9]{1,9}) in ')
_FAULT_LINE = re.compile(r"$|(?:Current )?[Tt]hread|  File |  [<.]|Extension modules|Python runtime state|Stack ")
_EXCEPTION = re.compile(r"[^\W\d][\w.]*(?:<locals>[\w.]*)*(?::(?: |$)|$)")
_SYNTAX_ERROR = re.compile(r"[\w.]*Error: ")
_NOISE = re.compile(
    r"\[(?:rank[0-9]+\]:\[)?[IWEF][0-9]{3,}|[IWEF][0-9]{4} |frame #[0-9]|terminate called |Exception raised from "
    r"|Exception ignored |Exception in thread |Task exception was|--- Logging error|Fatal Python error: "
    r"|Extension modules: |\S+:[0-9]+: \w*Warning: "
)

_SIGNALS = {
    "SIGABRT": "the process aborted itself, usually a failed check in native code",
    "SIGALRM": "an alarm it had set went off",
    "SIGBUS": "it accessed memory that does not exist; a full /dev/shm can cause this",
    "SIGFPE": "an arithmetic error in native code",
    "SIGHUP": "its terminal or session closed",
    "SIGILL": "an instruction that this CPU does not have",
    "SIGINT": "it was interrupted, by Ctrl-C or a scheduler",
    "SIGKILL": "often the kernel's out-of-memory killer: see dmesg",
    "SIGPIPE": "it wrote to a pipe without a reader",
    "SIGQUIT": "it was asked to quit with a core dump",
    "SIGSEGV": "it accessed memory that it may not",
    "SIGSYS": "it made a system call that a sandbox forbids",
    "SIGTERM": "it was asked to end, by a scheduler or by hand",
    "SIGTRAP": "a breakpoint or a failed assertion in native code",
    "SIGXCPU": "it used up its CPU time limit",
    "SIGXFSZ": "it used up its file size limit",
}
_CODES = {
    2: "by convention, wrong command line arguments",
    126: "by convention, the command was found but cannot be executed",
    127: "by convention, the command was not found",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """The exception that ended a process.

    Args:
        headline: one line, as in `ValueError: batch is empty`.
        traceback: everything that was printed of it, without colours and rank prefixes.
        file: where it was raised (the last frame), or "".
        line: the line in `file`, from 1, or 0.
        is_from_top: its traceback begins at the program's top level, like that of an uncaught exception.
        is_dump: it is not an exception, but the stack of a process that crashed.
    """

    headline: str
    traceback: str
    file: str = ""
    line: int = 0
    is_from_top: bool = field(default=False, compare=False)
    is_dump: bool = field(default=False, compare=False)

    @property
    def is_uncaught(self) -> bool:
        """Whether the interpreter printed it while ending."""
        return self.is_from_top and not self.is_dump


def describe_exit(exitcode: int) -> str:
    """Describes the end of a process, from its `Popen.returncode`: `-n` is signal n."""
    if exitcode > 128 and (name := signal_name(exitcode - 128)):
        # This is how a shell, or a container runtime, passes on the death of its child.
        why = f"by convention, its child was killed by {name}"
    else:
        why = _SIGNALS.get(signal_name(-exitcode), "") if exitcode < 0 else _CODES.get(exitcode, "")
    return how_it_ended(exitcode) + (f": {why}" if why else "")


def how_it_ended(exitcode: int) -> str:
    """Describes the end of a process, without its possible meaning."""
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    name = signal_name(-exitcode)
    return f"killed by signal {-exitcode}{f' ({name})' if name else ''}"


def last_line(text: str) -> str:
    """Returns the last line that is not blank, cut to `HEADLINE_CHARS`."""
    lines = (line.strip() for line, _ in reversed(_clean(text)))
    return next((line for line in lines if line), "")[:HEADLINE_CHARS]


def last_exception(text: str) -> Cause | None:
    """Returns the exception that ended a process, from the tail of its output, or `None`.

    The tail may begin in the middle of a traceback, with noise before, between and after its lines.
    """
    best: _Block | None = None
    for block in _blocks(_clean(text)):
        if best is None or (block.weight, block.is_from_top) >= (best.weight, best.is_from_top):
            best = block
    if best is None:
        return None
    is_from_top = best.is_from_top is True
    traceback = "\n".join(best.lines)
    return Cause(best.headline[:HEADLINE_CHARS], traceback, best.file, best.line, is_from_top, best.is_dump)


def may_be_uncaught(exitcode: int) -> bool:
    """Whether a process with this exit code may have ended because of a Python exception that it printed.

    A process that catches it, prints it and calls `sys.exit(9)` has its own reason, which the code names.
    """
    return exitcode in _UNCAUGHT


@dataclass(slots=True)
class _Block:
    """One traceback and its weight: 2 ended the process, 1 did not, 0 has no Python frames."""

    lines: list[str]
    headline: str = ""
    file: str = ""
    line: int = 0
    weight: int = 2
    is_from_top: bool | None = None  # `None`: no frame was seen
    is_dump: bool = False

    def see_frame(self, match: re.Match[str]) -> None:
        if self.is_from_top is None:
            # If the beginning is cut off, it may have been the program's top level.
            self.is_from_top = self.lines[:1] == [_CUT] or _TOP_FRAME.match(match.string) is not None
        self.file, self.line = match[1], int(match[2])


_Line = tuple[str, bool]
_Lines = list[_Line]


def _clean(text: str) -> _Lines:
    """Returns the lines of the tail as a terminal would show them, and whether each had torch's rank prefix."""
    lines: _Lines = []
    for raw in ESCAPES.sub("", text[-TAIL_CHARS:]).split("\n"):
        # A progress bar redraws its line after every \r: only the last drawing remains visible.
        line = raw.rstrip("\r").rpartition("\r")[2]
        prefix = _RANK.match(line)
        lines.append((line[prefix.end() :], True) if prefix else (line, False))
    return lines


def _blocks(lines: _Lines) -> Iterator[_Block]:
    """Yields every traceback, first to last.  Reads each line a fixed number of times."""
    at, announced = 0, -ANNOUNCED_LINES - 1
    before: _Block | None = None  # the block that a chained one continues
    link = ""  # the last line with text between two blocks
    is_cut = True  # nothing but noise so far: frames may belong to a header that was cut off
    while at < len(lines):
        line = lines[at][0]
        block, end = _read_block(lines, at, is_cut)
        if line.startswith(_ANNOUNCED):
            announced = at
        if block:
            is_cut = False
            last = before.lines[-1].strip() if before else ""
            is_nested = line.startswith(_NESTED) or _FROM_CHILD.match(last) is not None
            if before and before.weight and block.weight and (link in _CHAINED or is_nested):
                block.weight = before.weight
                if is_nested:
                    block.is_from_top = before.is_from_top
                # Continues the same list: copying it for each link would cost quadratic time.
                before.lines += ["", link, "", *block.lines] if link else block.lines
                block.lines = before.lines
            elif before and before.lines[0].startswith("terminate called ") and line.startswith(_FATAL):
                block.headline = f"{block.headline} ({before.headline})"
                block.lines = [*before.lines, *block.lines]
            elif before and not link and _is_quoted(before, block, is_apart=not lines[at - 1][0].strip()):
                before.lines += block.lines
                at = end
                continue
            elif at - announced <= ANNOUNCED_LINES:
                block.weight = 1
            block.is_from_top = bool(block.is_from_top)
            yield block
            before, link = block, ""
        elif line.strip():
            link = line.strip()
        at = end


def _is_quoted(before: _Block, block: _Block, *, is_apart: bool) -> bool:
    """Whether a traceback that follows a message, without text between them, is part of the message.

    Args:
        is_apart: a blank line is between them.
    """
    if not before.is_from_top or before.weight != block.weight:
        return False
    return not block.is_from_top or is_apart or before.lines[-1].rstrip().endswith(":")


def _read_block(lines: _Lines, at: int, is_cut: bool) -> tuple[_Block | None, int]:
    """Returns the block that begins at a line, if any, and where to continue, which is always further."""
    line = lines[at][0]
    if "Exception Group " + _HEADER in line:
        return _read_group(lines, at)
    if _is_header(line):
        return _read_traceback(lines, at + 1, line)
    if line.startswith(_FATAL):
        return _read_fatal(lines, at)
    if terminate := _TERMINATE.match(line):
        return _read_terminate(lines, at, terminate[1])
    if frame := _FRAME.match(line):
        if not frame[3]:
            return _read_syntax_error(lines, at, frame)
        if is_cut:
            return _read_traceback(lines, at, "")
    elif is_cut and (margin := _MARGIN.match(line)) and _FRAME.match(line[margin.end() :]):
        return _read_group(lines, at)
    return None, at + 1


def _is_header(line: str) -> bool:
    found = line.find(_HEADER)
    # With text after it, it is a quote in a log line; rich draws the rest of a box.
    return found >= 0 and not line[found + len(_HEADER) :].strip(" :─-╮┐")


def _read_traceback(lines: _Lines, at: int, header: str) -> tuple[_Block | None, int]:
    """Reads frames up to the exception and its message; `header` is "" where it was cut off.

    Returns no block for a traceback that is incomplete, or that another one interrupts.
    """
    is_prefixed = lines[at - 1][1] if header else lines[at][1]
    start = header.find(_HEADER)
    margin = header[:start] if start > 0 and not header[:start].strip() else ""
    block = _Block([header[start:] if header and "╭" not in header else header or _CUT])
    noise = 0
    while at < len(lines) and noise <= INTERLEAVED_LINES:
        line, has_prefix = lines[at]
        if _is_header(line) or line.startswith(_FATAL):
            return None, at
        line = line.removeprefix(margin)
        if has_prefix != is_prefixed and line:
            noise += 1
        elif frame := _FRAME.match(line) or _BOXED_FRAME.match(line):
            block.see_frame(frame)
            block.lines.append(line)
        elif not line or line[0] in " \t│╭╰|+":
            block.lines.append(line)
        elif _EXCEPTION.match(line) and not _NOISE.match(line) and not _is_frame_next(lines, at, margin):
            return _read_message(lines, at, block, margin, is_prefixed)
        else:
            noise += 1
        at += 1
    return None, at


def _is_frame_next(lines: _Lines, at: int, margin: str) -> bool:
    """Whether the traceback continues after this line, which another thread must have printed."""
    if at + 1 >= len(lines):
        return False
    following = lines[at + 1][0].removeprefix(margin)
    frame = _FRAME.match(following)
    return frame is not None and frame[3] != "" and following.startswith("  File")


def _read_message(lines: _Lines, at: int, block: _Block, margin: str, is_prefixed: bool) -> tuple[_Block, int]:
    end = at + 1
    while end < len(lines) and end - at < MESSAGE_LINES:
        line, has_prefix = lines[end]
        if _is_header(line) or line in _CHAINED or _NOISE.match(line) or (line and has_prefix != is_prefixed):
            break
        end += 1
    message = [line.removeprefix(margin) for line, _ in lines[at:end]]
    while not message[-1].strip():
        message.pop()
    block.headline = message[0].strip()
    if block.headline.endswith(":"):
        block.headline = " ".join([block.headline, *[line.strip() for line in message[1:] if line.strip()][:1]])
    block.lines += message
    return block, end


def _read_group(lines: _Lines, at: int) -> tuple[_Block | None, int]:
    """Reads an exception group; its headline names the group and the first exception in it."""
    block = _Block([])
    inner = ""
    is_frozen = False
    end = at
    while end < len(lines) and (margin := _MARGIN.match(lines[end][0])):
        line = lines[end][0]
        text = line[margin.end() :]
        block.lines.append(line)
        end += 1
        if frame := _FRAME.match(text):
            if not is_frozen:
                block.see_frame(frame)
        elif _EXCEPTION.match(text) and not _is_header(text):
            if not block.headline:
                block.headline = text.strip()
            elif not inner and not text.rstrip().endswith(("sub-exception)", "sub-exceptions)")):
                inner, is_frozen = text.strip(), True
    if not block.headline:
        return None, max(end, at + 1)
    if inner:
        block.headline = f"{block.headline[: HEADLINE_CHARS // 2]}, first {inner}"
    return block, end


def _read_fatal(lines: _Lines, at: int) -> tuple[_Block, int]:
    """Reads a faulthandler dump, most recent call first; without a Python frame it explains little."""
    block = _Block([lines[at][0]], headline=lines[at][0].strip(), weight=0, is_dump=True)
    end = at + 1
    is_current = False
    while end < len(lines) and _FAULT_LINE.match(lines[end][0]):
        line = lines[end][0]
        if "most recent call first" in line:
            is_current = line.startswith("Current")
        elif is_current and not block.file and (frame := _FAULT_FRAME.match(line)):
            block.see_frame(frame)
            block.weight = 2
        block.lines.append(line)
        end += 1
    while not block.lines[-1].strip():
        block.lines.pop()
    return block, end


def _read_terminate(lines: _Lines, at: int, name: str) -> tuple[_Block, int]:
    """Reads the C++ runtime's message about an uncaught exception."""
    block = _Block([lines[at][0]], headline=name, weight=0, is_dump=True)
    if at + 1 < len(lines) and (what := lines[at + 1][0].strip()).startswith("what():"):
        block.headline = f"{name}: {what.removeprefix('what():').strip()}"
        block.lines.append(lines[at + 1][0])
    return block, at + len(block.lines)


def _read_syntax_error(lines: _Lines, at: int, frame: re.Match[str]) -> tuple[_Block | None, int]:
    """Reads a syntax error in the script itself, which Python prints without a header."""
    block = _Block([lines[at][0]])
    block.see_frame(frame)
    # The source line and the carets, each at most once.
    for end in range(at + 1, min(at + 4, len(lines))):
        line = lines[end][0]
        block.lines.append(line)
        if _SYNTAX_ERROR.match(line):
            block.headline = line.strip()
            return block, end + 1
    return None, at + 1
