"""The final report on a failed job, for people and for log scrapers.

The layout is torch's (`ChildFailedError.format_msg`); the words are ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from aelastic.causes import last_line
from aelastic.failures import NOT_AVAILABLE, ProcessFailure

# What is beyond these is in the logs.
REPORT_TRACEBACK_CHARS = 32 * 1024
REPORT_FAILURES_MAX = 64
REPORT_WIDTH_MAX = 60


def report(
    name: str,
    failures: Mapping[int, ProcessFailure],
    first: tuple[int, ProcessFailure],
    victims: Iterable[int],
    boarder_delim: str,
    section_delim: str,
) -> str:
    """The root cause with its traceback, the other failures with a line each, and who was stopped for them."""
    root_rank, root = first
    index = {rank: at for at, rank in enumerate(failures)}
    others = [(rank, failure) for rank, failure in failures.items() if rank != root_rank]
    blocks = [_describe(index[rank], rank, failure) for rank, failure in others[:REPORT_FAILURES_MAX]]
    if unseen := [rank for rank, _ in others[REPORT_FAILURES_MAX:]]:
        blocks.append(f"  ... and {len(unseen)} more: ranks {_ranges(unseen)}")
    cause = _describe(index[root_rank], root_rank, root, is_root=True)
    title = f"{name} FAILED"
    width = max(len(line) for text in (title, cause, *blocks) for line in text.split("\n"))
    border, section = (delim * min(width, REPORT_WIDTH_MAX) for delim in (boarder_delim, section_delim))
    lines = ["", border, title, section, "Failures:", *(blocks or ["  <NO_OTHER_FAILURES>"]), section]
    lines += ["Root Cause (first observed failure):", cause]
    if victims:
        stopped = tuple(victims)
        lines += [section, f"Stopped by the agent: {'ranks' if len(stopped) > 1 else 'rank'} {_ranges(stopped)}"]
    return "\n".join([*lines, border])


def _describe(index: int, rank: int, failure: ProcessFailure, *, is_root: bool = False) -> str:
    name = failure.signal_name()
    lines = [
        f"[{index}]:",
        f"  time      : {failure.timestamp_isoformat()}",
        # The name this host calls itself; a look-up in DNS may take seconds, and fail.
        f"  host      : {failure.host or os.uname().nodename}",
        f"  rank      : {rank} (local_rank: {failure.local_rank})",
        f"  exitcode  : {failure.exitcode} (pid: {failure.pid}){f' ({name})' if name != NOT_AVAILABLE else ''}",
        f"  error_file: {failure.error_file}",
    ]
    if failure.note and failure.note not in failure.message:
        lines.append(f"  note      : {failure.note}")
    if failure.oom and failure.oom not in failure.message:
        lines.append(f"  memory    : {failure.oom}")
    if not is_root:
        return "\n".join([*lines, f"  traceback : {failure.headline}"])
    lines.append(f"  cause     : {failure.headline}")
    text = failure.traceback.strip("\n")
    if not text:
        if said := last_line(failure.stderr_tail):
            lines.append(f"  stderr    : {said}")
        text = NOT_AVAILABLE
    if len(text) > REPORT_TRACEBACK_CHARS:
        text = f"... (the beginning is cut off)\n{text[-REPORT_TRACEBACK_CHARS:]}"
    return "\n".join([*lines, "  traceback : " + text.replace("\n", "\n  ")])


def _ranges(ranks: Iterable[int]) -> str:
    """`0, 2-4, 9` for 0, 2, 3, 4, 9; two in a row are no range."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
