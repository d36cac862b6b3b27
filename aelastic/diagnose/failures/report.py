"""The final report on a failed job, for people and for log scrapers.

The layout is torch's (`ChildFailedError.format_msg`); the wording is ours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from aelastic.diagnose.failures.exit_reason import last_line
from aelastic.diagnose.failures.failure import NOT_AVAILABLE, ProcessFailure, log, printable

# Anything beyond these limits is in the logs.
REPORT_TRACEBACK_CHARS = 32 * 1024
REPORT_LINE_CHARS = 2000
REPORT_FAILURES_MAX = 64
REPORT_PLACE_CHARS = 200
REPORT_SORTS_MAX = 16
REPORT_WIDTH_MAX = 60
# Workers that had to be killed are mostly in the same place, or wait in another for the one that is not there.
REPORT_STACKS_MAX = 4
# The peer of a connection, as gloo and NCCL name it: `[10.0.0.7]:18573`, `node1<43210>`.
_PEER = re.compile(r"\[?(?:\d+(?:\.\d+){3}|[\da-f]*:[\da-f:]+)\]?:\d+|<\d+>")
# Precedes the file that contains more than the quoted part of a stack.
ALL_THREADS = "\nall threads: "
# The beginning of the text for a stack that could not be taken; the reason follows.
NO_STACK = "not known ("


def report(
    name: str,
    failures: Mapping[int, ProcessFailure],
    first: tuple[int, ProcessFailure],
    victims: Iterable[int],
    boarder_delim: str,
    section_delim: str,
    stacks: Mapping[int, str] | None = None,
    raised: Mapping[int, ProcessFailure] | None = None,
    *,
    enrich: Callable[[str, str], str] = lambda message, _: message,
) -> str:
    """Returns the report: the root cause with its traceback, the other failures, and the workers stopped for them.

    Args:
        stacks: the stacks of workers that had to be killed.
        raised: exceptions that stopped workers had raised by themselves.
        enrich: returns the message to show for a worker that a signal ended, from its message and error file.
    """
    root_rank = first[0]
    failures = {rank: _enriched(failure, enrich) for rank, failure in failures.items()}
    root = failures.get(root_rank, first[1])
    index = {rank: at for at, rank in enumerate(failures)}
    others, alike = _split({rank: each for rank, each in failures.items() if rank != root_rank}, root, raised or {})
    blocks = [_describe(index[rank], rank, failure) for rank, failure in others[:REPORT_FAILURES_MAX]]
    if unseen := [rank for rank, _ in others[REPORT_FAILURES_MAX:]]:
        blocks.append(f"  ... and {len(unseen)} more: ranks {_ranges(unseen)}")
    cause = _describe(index[root_rank], root_rank, root, is_root=True)
    title = f"{name} FAILED"
    width = max(len(line) for text in (title, cause, *blocks) for line in text.split("\n"))
    border, section = (delim * min(width, REPORT_WIDTH_MAX) for delim in (boarder_delim, section_delim))
    lines = ["", border, title, section]
    if blocks:
        lines += ["Failures:", *blocks, section]
    lines += ["Root Cause (first observed failure):", cause]
    stopped = [rank for rank in victims if rank not in (stacks or {})]
    killed_lines = ["Killed by the agent:", *[f"  {line}" for line in killed(stacks)]] if stacks else []
    ends = [*alike, *([f"Stopped by the agent: {_named(stopped)}"] if stopped else []), *killed_lines]
    if ends:
        lines += [section, *ends]
    return printable("\n".join([*lines, border]))


def _split(
    others: Mapping[int, ProcessFailure], root: ProcessFailure, raised: Mapping[int, ProcessFailure]
) -> tuple[list[tuple[int, ProcessFailure]], list[str]]:
    """Returns the failures to describe, the first of each sort; and lines for the ranks that failed in the same way."""
    described = dict(others)
    sorts = {_sort_of(root)}
    alike: dict[tuple[str, str], dict[int, ProcessFailure]] = {}
    for rank, failure in [*others.items(), *raised.items()]:
        sort = _sort_of(failure)
        if rank in others and sort not in sorts:
            sorts.add(sort)
            continue
        described.pop(rank, None)
        alike.setdefault(sort, {})[rank] = failure
    lines = [_also(same) for same in list(alike.values())[:REPORT_SORTS_MAX]]
    if unseen := [rank for same in list(alike.values())[REPORT_SORTS_MAX:] for rank in same]:
        lines.append(f"Also failed: {_named(unseen)}")
    return list(described.items()), lines


def _sort_of(failure: ProcessFailure) -> tuple[str, str]:
    """Returns the sort of a failure: its words, without peer addresses, and its stack.  A sort is reported together."""
    return _PEER.sub("…", failure.message.strip().partition("\n")[0]), failure.stack.partition(ALL_THREADS)[0]


def _also(same: Mapping[int, ProcessFailure]) -> str:
    first = next(iter(same.values()))
    what = "raised" if first.traceback else "failed"
    rest = " (the same stack)" if first.stack and not first.stack.startswith(NO_STACK) else ""
    headline = (
        first.headline if len(first.headline) <= REPORT_PLACE_CHARS else f"{first.headline[:REPORT_PLACE_CHARS]}..."
    )
    line = f"Also {what}: {_named(same)}: {headline}{rest}"
    beside = " and beside it" if len(same) > 1 else ""
    return f"{line}\n  log       : {first.log_file}{beside}" if first.log_file else line


def _enriched(failure: ProcessFailure, enrich: Callable[[str, str], str]) -> ProcessFailure:
    if not failure.is_signal:
        return failure
    try:
        text = enrich(failure.message, failure.error_file)
    except Exception:  # noqa: BLE001  a user's handler: the report is more important
        log().warning("the error handler failed on the message of rank %d", failure.rank, exc_info=True)
        return failure
    return failure if text == failure.message else failure.replace(message=text)


def killed(stacks: Mapping[int, str]) -> list[str]:
    """Returns lines about workers that had to be killed, grouped by place."""
    groups, unseen = _grouped({rank: text.partition(ALL_THREADS)[0] for rank, text in stacks.items()})
    lines = []
    for body, ranks in groups:
        lines += f"{_named(ranks)} {body}".split("\n")
        if file := stacks[ranks[0]].partition(ALL_THREADS)[2]:
            lines.append(f"  all threads: {file}{' and beside it' if len(ranks) > 1 else ''}")
    return [*lines, f"... and {_named(unseen)}"] if unseen else lines


def raised_meanwhile(raised: Mapping[int, ProcessFailure]) -> list[str]:
    """Returns lines about workers that were asked to end and failed, grouped by how they failed."""
    groups, unseen = _grouped({rank: failure.headline for rank, failure in raised.items()})
    lines = [f"{_named(ranks)} ended by {headline}" for headline, ranks in groups]
    return [*lines, f"... and {_named(unseen)} in other ways"] if unseen else lines


def _grouped(texts: Mapping[int, str]) -> tuple[list[tuple[str, list[int]]], list[int]]:
    """Returns each text with its ranks, up to a limit; and the ranks of other texts."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    groups = list(ranks_of.items())
    return groups[:REPORT_STACKS_MAX], [rank for _, ranks in groups[REPORT_STACKS_MAX:] for rank in ranks]


def _named(ranks: Collection[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {_ranges(ranks)}"


def _describe(index: int, rank: int, failure: ProcessFailure, *, is_root: bool = False) -> str:
    name = failure.signal_name()
    world = f", world size: {failure.world_size}" if failure.world_size > 0 else ""
    lines = [
        f"[{index}]:",
        f"  time      : {failure.timestamp_isoformat()}",
        # The host's own name; a DNS lookup may take seconds, and fail.
        f"  host      : {failure.host or os.uname().nodename}",
        f"  rank      : {rank} (local_rank: {failure.local_rank}){world}",
        f"  exitcode  : {failure.exitcode} (pid: {failure.pid}){f' ({name})' if name != NOT_AVAILABLE else ''}",
    ]
    if failure.error_file != NOT_AVAILABLE:
        lines.append(f"  error_file: {failure.error_file}")
    if failure.log_file:
        lines.append(f"  log       : {failure.log_file}")
    if failure.note and failure.note not in failure.message:
        lines.append(f"  note      : {failure.note}")
    if failure.oom and failure.oom not in failure.message:
        lines.append(f"  memory    : {failure.oom}")
    where = ["  stack     : " + failure.stack.replace("\n", "\n  ")] if failure.stack else []
    what = _cause(failure) if is_root else [f"  traceback : {failure.headline}"]
    return "\n".join([*lines, *what, *where])


def _cause(failure: ProcessFailure) -> Iterator[str]:
    yield f"  cause     : {failure.headline}"
    if failure.is_signal and (more := failure.message.strip().partition("\n")[2]):  # added by a handler
        yield f"              {more}".replace("\n", "\n              ")
    text = "\n".join(map(_short_line, failure.traceback.strip("\n").split("\n")))
    if len(text) > REPORT_TRACEBACK_CHARS:
        text = f"... (the beginning is cut off)\n{text[-REPORT_TRACEBACK_CHARS:]}"
    if text:
        yield "  traceback : " + text.replace("\n", "\n  ")
    elif line := last_line(failure.stderr_tail):
        yield f"  stderr    : {line}"


def _short_line(line: str) -> str:
    """Returns the line, or its beginning if it is a long dump."""
    if len(line) <= REPORT_LINE_CHARS:
        return line
    return f"{line[:REPORT_LINE_CHARS]}... ({len(line) - REPORT_LINE_CHARS} more characters)"


def _ranges(ranks: Iterable[int]) -> str:
    """Returns `0, 2-4, 9` for 0, 2, 3, 4, 9; two in a row are not a range."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
