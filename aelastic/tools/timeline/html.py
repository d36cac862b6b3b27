"""The page: the picture, how the run spent its time, and what each restart cost.

Pure.  One file that needs nothing else: no network, no fonts, no library.  Its content security policy lets only its
own script run, so nothing in a log can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from aelastic.observe.time_spent import WORDS
from aelastic.tools.timeline.assets import PAGE, SCRIPT, SCRIPT_HASH, STYLE
from aelastic.tools.timeline.chart import chart_of, recovery_words
from aelastic.tools.timeline.model import CLOSING_WORDS, RESTART_PHASES, Restart, Share, Timeline
from aelastic.tools.timeline.text import counted, duration, safe

# Restarts that get a table of their own, the most expensive ones: some screens full.
CARDS_MAX = 20
# Restarts in the short list of all of them.
LISTED_MAX = 500
# Nodes in the table of a restart, the slowest ones.
SHARES_MAX = 16
NOTES_MAX = 20
TEXT_CHARS_MAX = 600

_MADE_UP = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def page(story: Timeline) -> str:
    """Returns the whole page, as HTML."""
    chart = chart_of(story)
    title = f"{_name(story)}: timeline"
    # In a script element that holds no script, `<` alone could end it.
    data = json.dumps(chart.data, separators=(",", ":")).replace("<", "\\u003c")
    known = {each.kind for node in story.nodes for each in node.incarnations if each.is_up_at is not None}
    kinds = "".join(f'<span><i class="dot {kind}"></i>{kind}</span>' for kind in ("warm", "cold") if kind in known)
    starts = f'<div class="legend"><em>Start until the first output</em>{kinds}</div>' if kinds else ""
    signs = "".join(f"<span><b>{sign}</b>{words}</span>" for sign, words in chart.marks)
    return PAGE.substitute(
        script_hash=SCRIPT_HASH,
        title=safe(title),
        style=STYLE,
        head=_head(story),
        spent=_spent(story),
        starts=starts,
        marks=f'<div class="legend marks"><em>Marks</em>{signs}</div>' if signs else "",
        data=data,
        restarts=_restarts(story),
        notes=_notes([*chart.notes, *story.notes]),
        script=SCRIPT,
    )


def summary(story: Timeline) -> str:
    """Says in one line how a run spent its time."""
    length, is_known = story.length_s, story.is_training_known
    parts = [f"{WORDS.get(name, name)} {_percent(part, length)}" for name, part in story.spent.items() if part]
    parts = [f"{duration(length)}: {', '.join(parts)}" if is_known else _unknown(story)]
    if story.restarts:
        took_s = sum(restart.took_s for restart in story.restarts)
        parts.append(f"{_counted(story.restarts)} ({duration(took_s)} until workers ran)")
    return ", ".join(parts)


def _counted(restarts: Sequence[Restart]) -> str:
    in_place, words = sum(restart.in_place for restart in restarts), counted(len(restarts), "restart")
    if not in_place:
        return words
    return f"{words} in place" if in_place == len(restarts) else f"{words}, {in_place} in place"


def _unknown(story: Timeline) -> str:
    return f"training: unknown, the log ends at {duration(story.length_s)}, when the workers had just started"


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole > 0 else 0.0
    if part <= 0 or part >= whole:
        return f"{share:.0f} %"
    if 1 <= share < 99:
        return f"{share:.1f} %"
    # "100 %" only of the whole, "0 %" only of nothing.
    return f"{min(share, 99.99):.2f} %" if share >= 0.01 else "< 0.01 %"


def _head(story: Timeline) -> str:
    state = {"SUCCEEDED": "succeeded", "FAILED": "failed", "STOPPED": "stopped"}.get(story.state, story.state.lower())
    words, rounds = state or _closing(story), {number for node in story.nodes for number in node.formed}
    workers = max((sum(node.workers for node in story.nodes if number in node.formed) for number in rounds), default=0)
    facts = [
        counted(len(story.nodes), "agent"),
        f"up to {counted(workers, 'worker')} at a time" if workers else "no round was completed",
        f"began {story.began:%Y-%m-%d %H:%M:%S} UTC",
        f"<b>{duration(story.length_s)}</b>" if story.is_training_known else f"at least {duration(story.length_s)}",
        _counted(story.restarts),
        *([_cut(other)] if (other := _script(story) if _name(story) == story.run_id else story.run_id) else []),
    ]
    reason = "".join(f'<p class="facts">{_cut(words)}</p>' for words in (story.reason, story.culprit) if words)
    return (
        f'<h1>{_cut(_name(story))}<span class="badge {safe(state)}">{safe(words)}</span></h1>'
        f'{reason}<p class="facts">{" · ".join(facts)}</p>'
    )


def _script(story: Timeline) -> str:
    return story.entrypoint.rpartition("/")[2]


def _name(story: Timeline) -> str:
    """Returns the run's name for people: its id, or the script if the agent made up the id."""
    return (_MADE_UP.fullmatch(story.run_id) and _script(story)) or story.run_id


def _closing(story: Timeline) -> str:
    """Says what is known about a run whose end is in no log."""
    closings = {node.closing for node in story.nodes} - {"ended"}
    if "running" in closings:
        return CLOSING_WORDS["running"]  # with one agent the run lives
    return CLOSING_WORDS[closings.pop() if len(closings) == 1 else "unknown"]


def _spent(story: Timeline) -> str:
    if not story.is_training_known:
        return f'<p class="facts">{safe(_unknown(story).capitalize())}.</p>'
    bars, items = [], []
    for name, seconds in story.spent.items():
        if not seconds:
            continue
        words = WORDS.get(name, name)
        # Shares that add up to less than 1 would leave the rest of the bar empty.
        share = seconds / story.length_s * 100
        bars.append(f'<span class="{name}" style="flex:{share:.4f} 0 0" title="{words}: {duration(seconds)}"></span>')
        items.append(
            f'<div><dt><i class="dot {name}"></i>{words}</dt>'
            f'<dd data-spent="{name}"><b>{_percent(seconds, story.length_s)}</b>{duration(seconds)}</dd></div>'
        )
    return f'<div class="spent"><div class="bar">{"".join(bars)}</div><dl>{"".join(items)}</dl></div>'


# Restarts.


def _restarts(story: Timeline) -> str:
    if not story.restarts:
        return ""
    dearest = sorted(story.restarts, key=lambda restart: -restart.took_s)[:CARDS_MAX]
    cards = [_card(restart, story) for restart in sorted(dearest, key=lambda restart: restart.number)]
    parts = ["<h2>What the restarts cost</h2>"]
    if len(story.restarts) > len(dearest):
        parts.append(
            f'<p class="facts">The {len(dearest)} longest of {len(story.restarts)}; below is a list of all.</p>'
        )
    parts += cards
    if len(story.restarts) > len(dearest):
        parts.append(_list(story.restarts))
    return "\n".join(parts)


def _card(restart: Restart, story: Timeline) -> str:
    kind = "a worker failed" if restart.cause == "failure" else "nodes joined or left"
    to = f"round {restart.round} → {restart.next_round}" if restart.next_round is not None else f"round {restart.round}"
    unfinished = "" if restart.is_over else " · not all workers ran again"
    shares = sorted(restart.shares, key=lambda share: -share.total)[:SHARES_MAX]
    rows = "".join(_share(share, restart, story) for share in sorted(shares, key=lambda share: share.node))
    if len(restart.shares) > len(shares):
        left_out = len(restart.shares) - len(shares)
        rows += f'<tr><td class="left nothing" colspan="9">{left_out} nodes that took less are left out</td></tr>'
    heads = "".join(f'<th><i class="dot {name}"></i>{name}</th>' for name in RESTART_PHASES)
    heads += "<th>sum</th><th>first output</th>"
    first, since = restart.first_output, "crash" if restart.cause == "failure" else "change"
    took = "" if first is None else f"{duration(first.output_s or 0.0)} after the {since} ({first.kind} start)"
    output = took and f" · first output {took}"
    who = f"<p>{_cut(restart.culprit)}</p>" if restart.culprit else ""
    recovered = recovery_words(restart)
    who += f"<p>{_cut(recovered)}</p>" if recovered else ""
    name = f"Restart {restart.number}{' in place' * restart.in_place}"
    return (
        f'<section class="card" data-restart="{restart.number}"><h3>{name}'
        f'<span class="took">{duration(restart.took_s)}</span>'
        f'<button data-s="{restart.start:.6f}" data-e="{restart.end:.6f}">show above</button></h3>'
        f'{who}<p class="why">{kind}: {_cut(restart.reason)} · {to} · at {duration(restart.start)}{output}{unfinished}'
        "</p>"
        '<div class="scroll"><table><thead><tr><th>node</th>'
        f'<th class="falls">0<span>{duration(restart.took_s)}</span></th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{_chain(restart)}</section>"
    )


def _chain(restart: Restart) -> str:
    """Returns what happened, in order, over all nodes."""
    if not restart.chain:
        return ""
    links = "".join(
        f"<tr><td>+{duration(each.after_s)}</td><td class='left'>{_cut(each.text)}</td>"
        f"<td class='left'>{safe(each.where)}</td></tr>"
        for each in restart.chain
    )
    return f"<details><summary>What happened, step by step</summary><table><tbody>{links}</tbody></table></details>"


def _share(share: Share, restart: Restart, story: Timeline) -> str:
    whole = max(restart.took_s, 1e-9)
    bars = "".join(
        f'<i class="{block.name}" title="{block.name}: {duration(block.end - block.start)}" '
        f'style="left:{100 * (block.start - restart.start) / whole:.3f}%;'
        f'width:{100 * (block.end - block.start) / whole:.3f}%"></i>'
        for block in share.blocks
    )
    cells, output = "".join(_cell(share.spent(name)) for name in RESTART_PHASES), _cell(0.0)
    if share.output_s is not None:
        dot = f'<i class="dot {share.kind}"></i>' if share.kind in {"warm", "cold"} else ""
        output = f"<td>{dot}{duration(share.output_s)} {share.kind}</td>"
    return (
        f'<tr><td>{safe(story.nodes[share.node].name)}</td><td class="falls"><div>{bars}</div></td>'
        f"{cells}<td><b>{duration(share.total)}</b></td>{output}</tr>"
    )


def _cell(seconds: float) -> str:
    return f"<td>{duration(seconds)}</td>" if seconds > 0 else '<td class="nothing">–</td>'


def _list(restarts: Sequence[Restart]) -> str:
    rows = "".join(
        f"<tr><td>{restart.number}</td><td>{duration(restart.start)}</td><td>{duration(restart.took_s)}</td>"
        f'<td class="text">{_cut(restart.culprit or restart.reason)}</td></tr>'
        for restart in restarts[:LISTED_MAX]
    )
    rest = len(restarts) - LISTED_MAX
    left_out = f'<p class="facts">{rest} more are left out.</p>' if rest > 0 else ""
    head = '<tr><th>restart</th><th>at</th><th>took</th><th class="text">why</th></tr>'
    table = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
    return f'<h2>All restarts</h2><div class="scroll list">{table}</div>{left_out}'


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    lines = [f"<li>{_cut(note)}</li>" for note in notes[:NOTES_MAX]]
    if len(notes) > NOTES_MAX:
        lines.append(f"<li>{len(notes) - NOTES_MAX} more notes are left out.</li>")
    return f'<h2>Notes</h2><ul class="notes">{"".join(lines)}</ul>'


def _cut(text: str) -> str:
    return safe(text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}…")
