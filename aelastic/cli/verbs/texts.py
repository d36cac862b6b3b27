"""Makes the text of answers: tables and sentences for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from aelastic.base.host.kernel_states import sentence_of
from aelastic.diagnose.failures.failure import printable
from aelastic.observe.status_text import counted, duration
from aelastic.observe.ui.commands import Colour, Paint, plain

JsonObject = Mapping[str, Any]
# Run ids that aelastic chose.
GENERATED = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

# Colours of states; transient states have none.
COLOURS = {"running": Colour.GOOD, "held": Colour.BAD, "silent": Colour.BAD, "closed": Colour.BAD}


def jobs(agents: Sequence[JsonObject], paint: Paint = plain) -> str:
    rows = [
        (
            each["run"]["run_id"], each["phase"], _since(each, each["run"]["began"]), str(each["run"]["pid"]),
            each["run"]["entrypoint"], each["folder"],
        )
        for each in agents
    ]  # fmt: skip
    return _table([("JOB", "STATE", "SINCE", "AGENT", "SCRIPT", "FOLDER"), *rows], paint)


def program(agent: JsonObject) -> str:
    """Returns what a job runs and where, which identifies a job without a name to people."""
    folder = agent.get("folder") or "a folder that is gone"
    return f"{agent['run']['entrypoint']} in {folder}"


def briefly(agent: JsonObject) -> str:
    """Returns a job's text in a list: its name, and what it runs."""
    return f"{short(agent['run']['run_id'])} ({program(agent)})"


def ended(agents: Sequence[JsonObject]) -> str:
    """Returns a text about the jobs that ended within the last hour."""
    names = [
        *dict.fromkeys(
            f"{short(each['run']['run_id'])} ({each['run']['entrypoint']}), {each['state']}" for each in agents
        )
    ]
    more = f", and {len(names) - 3} more" * (len(names) > 3)
    return f" (ended in the last hour: {'; '.join(names[:3])}{more}; see aelastic why)" if names else ""


def short(run_id: str) -> str:
    """Returns as much of a generated id as commands need."""
    return run_id[:8] if GENERATED.fullmatch(run_id) else run_id


def has_ended(agent: JsonObject) -> str:
    """Returns a sentence that tells when and how a job ended."""
    ago = duration((datetime.now(UTC) - datetime.fromisoformat(agent["time"])).total_seconds())
    run_id, how = agent["run"]["run_id"], agent["reason"] or agent["state"]
    return f"{run_id} ended {ago} ago: {how}" + (f"; see aelastic why {run_id}" if agent["why"] else "")


def status(
    nodes: Sequence[JsonObject],
    silent: Iterable[str],
    refused: Mapping[str, str],
    agent: JsonObject,
    paint: Paint = plain,
) -> str:
    """Returns two lines about the job, and one for each node; `*` marks the leader's.

    Args:
        agent: the agent that was queried; other nodes may have other folders.
    """
    first = max(nodes, key=lambda each: (each["leads"], each["phase"] == "running"), default=None)
    if first is None:
        return "no node has answered"
    restarts, drains = first["restarts"]["failure"], first["drains"]
    counts = f"{counted(restarts, 'restart')} after failures, {counted(drains, 'drain')}"
    # Nodes that joined later have seen fewer, and nodes of older versions report none.
    if recoveries := max(each.get("recoveries", 0) for each in nodes):
        counts += f", {recoveries} recover{'y' if recoveries == 1 else 'ies'} in place"
    phases = {each["phase"] for each in nodes}  # the leader's node may take no part
    phase = next((each for each in ("held", "running") if each in phases), first["phase"])
    head = [_since(first, first["run"]["began"]), counts]
    if whole := sum(first["spent"].values()):
        head.append(f"trained {100 * first['spent']['trained'] / whole:.0f} %")
    # In most scripts one rank prints steps, on whatever node it runs.
    reported = [each["progress"] for each in nodes if each["progress"] is not None]
    if reported:
        progress = max(reported, key=lambda each: int(each["step"]))
        head.append(f"step {progress['step']}" + (f" of {progress['total']}" if progress.get("total") else ""))
    is_one_host = len({each["run"]["host"] for each in nodes}) < len(nodes)
    rows = []
    for each in sorted(nodes, key=lambda one: (one["round"] or {}).get("first_rank", 1 << 30)):
        round_, run = each["round"], each["run"]
        running = round_ is not None and bool(each["workers"]) and each["phase"] not in {"joining", "init"}
        at = _ranks(round_["first_rank"], len(each["workers"])) if running else "-"
        name = run["node_id"] if is_one_host else run["host"]
        note = each["announced"] or each["waiting"] or (each["reason"] if each["phase"] != "running" else "")
        halted = sentence_of({one["rank"]: one["kernel"] for one in each["workers"] if one["kernel"]})
        note = "; ".join(filter(None, [halted, note]))
        rows.append((name + " *" * each["leads"], each["phase"], at, _since(each, each["since"]), note))
    rows += [(each, "silent", "-", "-", "no answer") for each in silent]
    rows += [(each, "closed", "-", "-", text) for each, text in refused.items()]
    state = paint(printable(phase), COLOURS.get(phase))
    title = f"{printable(first['run']['run_id'])}  {state}  {printable('  '.join(head))}"
    table = _table([("NODE", "STATE", "RANKS", "SINCE", "NOTE"), *rows], paint)
    lines = [title, printable(program(agent)), table]
    if first["leads"]:
        lines.append(f"* the leader: its agent decides for the job{_agreed(first)}")
    return "\n".join(lines)


def _agreed(leader: JsonObject) -> str:
    known = leader.get("rendezvous")  # missing from agents of older versions
    return f" in term {known['term']}\n{known['text']}" if known else ""


def why(ends: Sequence[JsonObject], earlier: int = 0, held: str = "") -> str:
    """Returns why workers ended; `earlier` is how many ends came before these."""
    more = f"{counted(earlier, 'earlier end')} not shown: add -n {earlier + len(ends)}" if earlier else ""
    return "\n".join(filter(None, [held, *map(_end, ends), more])) or "no workers have ended so far"


def _end(end: JsonObject) -> str:
    after = "" if end["after_s"] is None else f" after {duration(end['after_s'])}"
    step = "" if end["step"] is None else f", at step {end['step']}"
    in_place = end.get("in_place", False)  # missing from agents of older versions
    what = f"round {end['round']}" if in_place else f"generation {end['generation']}"
    lines = [f"{what} ended {end['at'][11:19]} UTC{after}{step}"]
    failure = end["failure"]
    if end["symptom"]:
        lines.append(f"  symptom  {end['symptom']}")
    if failure is not None:
        message = failure["message"].strip().splitlines() or ["no message"]
        lines.append(f"  cause    rank {failure['rank']} on {failure['host']}: {message[-1]}")
    lines.append(f"  decided  {end['reason']}")
    if end["blame"]:
        lines.append(f"  host     {end['blame']}")
    if end["otherwise"]:
        lines.append(f"  changed  by {end['otherwise']}")
    if in_place and (recovered := end["recovered"]) is not None:
        lines.append(f"  done     round {recovered['round']} continues in place: {recovered['text']}")
    elif end["again_s"] is not None:
        lines.append(f"  done     workers ran again after {end['again_s']:.2f} s")
    chain = end.get("chain", ())  # from event logs only
    for place, link in enumerate(chain if failure is not None else ()):
        lines.append(f"  {'' if place else 'steps':8} {_moment(link['after_s']):<9} {link['text']} ({link['where']})")
    return "\n".join(lines)


def _moment(after_s: float) -> str:
    return f"+{after_s * 1e3:.0f} ms" if after_s < 1 else f"+{after_s:.2f} s"


def stacks(found: Mapping[str, str], compared: str) -> str:
    if not found:
        return "no worker is running"
    parts = [f"--- rank {rank}\n{found[rank].rstrip()}" for rank in sorted(found, key=int)]
    return "\n\n".join([*filter(None, [compared]), *parts])


def ranks(known: Iterable[str]) -> str:
    numbers = sorted(map(int, known))
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _ranks(first: int, count: int) -> str:
    return f"{first}" if count == 1 else f"{first}-{first + count - 1}"


def _since(status: JsonObject, moment: str) -> str:
    return duration((datetime.fromisoformat(status["time"]) - datetime.fromisoformat(moment)).total_seconds())


def _table(rows: Sequence[Sequence[str]], paint: Paint) -> str:
    """Returns columns as wide as their widest cell; the second one holds states, in colour."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        name, state, *rest = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        padding = " " * (len(state) - len(row[1]))
        lines.append("  ".join([name, paint(row[1], COLOURS.get(row[1])) + padding, *rest]).rstrip())
    return "\n".join(lines)
