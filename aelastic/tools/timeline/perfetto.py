"""The trace for Perfetto and Chrome: nodes are processes, the agent and each worker a thread.

Pure.  The form is the Trace Event Format, as JSON: complete events (`X`) with microseconds, instants (`i`) for
moments, metadata (`M`) for names.  The first process is the job, with its restarts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from aelastic.diagnose.failures.failure import printable
from aelastic.tools.timeline.model import RESTART_PHASES, NodeTimeline, Timeline

Json: TypeAlias = dict[str, Any]

_JOB, _AGENT = 0, 0  # process and thread ids; nodes and workers are counted from 1


def trace(story: Timeline) -> Json:
    """Returns the contents of the file."""
    events = [*_job(story)]
    for place, node in enumerate(story.nodes):
        events += _node(node, place + 1)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "run_id": printable(story.run_id),
            "began": story.began.isoformat(),
            "notes": [printable(note) for note in story.notes],
        },
        "traceEvents": events,
    }


def _job(story: Timeline) -> Iterator[Json]:
    yield _name("process_name", _JOB, 0, f"job {story.run_id}")
    yield _name("thread_name", _JOB, 0, "restarts")
    for restart in story.restarts:
        spent = {
            story.nodes[share.node].name: {name: round(share.spent(name), 6) for name in RESTART_PHASES}
            for share in restart.shares
        }
        args = {
            "cause": restart.cause, "reason": printable(restart.reason), "who": printable(restart.culprit),
            "round": restart.round, "next_round": restart.next_round, "in_place": restart.in_place, "spent_s": spent,
        }  # fmt: skip
        yield _complete(f"restart {restart.number}", "restart", _JOB, 0, (restart.start, restart.end), args)


def _node(node: NodeTimeline, pid: int) -> Iterator[Json]:
    yield _name("process_name", pid, _AGENT, node.name)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": _AGENT, "args": {"sort_index": pid}}
    yield _name("thread_name", pid, _AGENT, f"agent {node.pid}")
    for local_rank in range(node.workers):
        ranks = ", ".join(map(str, node.ranks_of(local_rank)))
        name = f"local rank {local_rank} (rank {ranks})" if ranks else f"local rank {local_rank}"
        yield _name("thread_name", pid, local_rank + 1, name)
    for block in node.blocks:
        yield _complete(block.name, "phase", pid, _AGENT, (block.start, block.end), {"is_open": block.is_open})
    for process in node.incarnations:
        args = {
            "rank": process.rank, "round": process.round, "pid": process.pid, "outcome": process.outcome,
            "exitcode": process.exitcode, "failure": printable(process.headline),
        }  # fmt: skip
        name = f"generation {process.generation}: {'running' if process.outcome == 'open' else process.outcome}"
        yield _complete(name, process.outcome, pid, process.local_rank + 1, (process.start, process.end), args)
        if process.kind and process.is_up_at is not None:
            span = process.start, max(process.start, process.is_up_at)
            yield _complete(f"{process.kind} start", "start", pid, process.local_rank + 1, span, {})
        if process.outcome == "failed":
            yield _instant(
                f"rank {process.rank} failed: {process.headline}", "failure", pid, process.local_rank + 1, process.end
            )
    for mark in node.marks:
        thread = _AGENT if mark.local_rank is None else mark.local_rank + 1
        yield _instant(mark.text, mark.kind, pid, thread, mark.at)


def _name(what: str, pid: int, tid: int, name: str) -> Json:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": printable(name)}}


def _complete(name: str, category: str, pid: int, tid: int, span: tuple[float, float], args: Json) -> Json:
    # Both ends are rounded, not the length: what begins where another ends also does so in the file.
    start, end = (round(seconds * 1e6) for seconds in span)
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args,
    }  # fmt: skip


def _instant(name: str, category: str, pid: int, tid: int, at: float) -> Json:
    return {
        "ph": "i", "s": "t", "name": printable(name), "cat": category, "pid": pid, "tid": tid, "ts": round(at * 1e6),
    }  # fmt: skip
