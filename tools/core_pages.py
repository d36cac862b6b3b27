"""A page for each core: its theory, phases, events, the table of what happens, fields and invariants."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache

import log_page
from machines import Core, invariants_of, is_core, read_core
from markdown import code, lines, table
from sources import Source, fields_of, package
from ways import Way

NOTE = "<!-- Generated from {path} by `make docs`: change the code, not this page. -->"
FOLDER = "docs/development/cores"


def pages() -> dict[str, str]:
    """All pages, by their paths below the root of the repository."""
    cores = [read_core(module, cls.name) for module, cls in all_cores()]
    made = {f"{FOLDER}/{core_slug(core.name)}.md": page(core) for core in cores}
    log = log_page.page(NOTE.format(path=log_page.PACKAGE.replace(".", "/")))
    return {f"{FOLDER}/README.md": _index(cores), f"{FOLDER}/log.md": log, **made}


@cache
def all_cores() -> list[tuple[Source, ast.ClassDef]]:
    """Every class that derives from `Machine[Event, Action]`, with its module."""
    return [
        (module, stmt)
        for module in package()
        if "(Machine[" in module.text  # most modules need not be parsed
        for stmt in module.tree.body
        if isinstance(stmt, ast.ClassDef) and is_core(stmt)
    ]


def page(core: Core) -> str:
    phases = [(code(name), comment) for name, comment in core.phases.items()]
    actions = [(code(name), caption) for name, caption in core.actions]
    fields = [(code(each.name), code(each.type), each.comment) for each in fields_of(core.module, core.cls)]
    return lines(
        NOTE.format(path=core.module.file),
        f"# {core.name}",
        f"The page of a core: [`{core.module.file}`](../../../{core.module.file}).",
        core.module.docstring.strip(),
        "## Phases",
        table(("phase", ""), phases),
        "## What happens",
        LEGEND,
        _grid(core),
        *[_event(core, name, caption) for name, caption in core.events],
        "## Actions",
        table(("action", ""), actions),
        "## Fields",
        table(("field", "type", ""), fields),
        *_invariants(core),
    )


LEGEND = (
    "An arrow: the phase that the core is in afterwards, or several where that depends on more than the phase. "
    "*notes*: fields change, nothing is to be done. *ignores*: nothing changes. –: impossible, the core raises "
    "`InvalidTransition` and stays as it was."
)


def _grid(core: Core) -> str:
    rows = [
        (
            f"[{code(event)}](#{event.lower()})",
            *[_in_a_word(phase, _beyond_fences(core, event, core.ways[phase, event])) for phase in core.phases],
        )
        for event, _ in core.events
    ]
    return table(("event", *map(code, core.phases)), rows)


def _in_a_word(phase: str, ways: list[Way]) -> str:
    """A pair in a cell of the overview."""
    possible = [way for way in ways if not way.is_impossible]
    if not possible:
        return "–"
    targets = list(dict.fromkeys(way.phase for way in possible if way.phase != phase))
    if targets:
        return "→ " + ", ".join(targets)
    if any(way.actions for way in possible):
        return "acts"
    return "notes" if any(not way.is_ignored for way in possible) else "ignores"


def _fences(core: Core, event: str) -> list[Way]:
    """The ways that an event may go in each phase alike: what it is checked for before the phase is looked at."""
    first, *others = [[_without_phase(way, phase) for way in core.ways[phase, event]] for phase in core.phases]
    return [way for way in first if way.conditions and all(way in each for each in others)]


def _beyond_fences(core: Core, event: str, ways: list[Way]) -> list[Way]:
    fences = {(way.conditions, way.note) for way in _fences(core, event)}
    return [way for way in ways if (way.conditions, way.note) not in fences]


def _without_phase(way: Way, phase: str) -> Way:
    """The same for all phases, if the phase stays."""
    return replace(way, phase="") if way.phase == phase else way


def _event(core: Core, event: str, caption: str) -> str:
    fences = [f"In each phase: {condition}{text}." for condition, text in _sentences("", _fences(core, event))]
    rows = dict[str, list[str]]()
    for phase in core.phases:
        sentences = _sentences(phase, _beyond_fences(core, event, core.ways[phase, event]))
        rows.setdefault(_cell(sentences), []).append(code(phase))
    what = table(("phase", ""), [(", ".join(phases), text) for text, phases in rows.items()])
    return lines(f"### {event}", caption, *fences, what).rstrip()


def _sentences(phase: str, ways: list[Way]) -> list[tuple[str, str]]:
    """What happens in a pair: a condition, and what follows; ways that differ inside only are one."""
    found = list[tuple[str, str]]()
    elsewhere = list(dict.fromkeys(way.moved_to for way in ways if way.moved_to))
    ways = [way for way in ways if not way.moved_to]
    keys = list(dict.fromkeys((way.conditions, way.note, way.is_impossible) for way in ways))
    for conditions, note, is_impossible in keys:
        same = [
            way for way in ways if (way.conditions, way.note, way.is_impossible) == (conditions, note, is_impossible)
        ]
        condition = f"if {' and '.join(conditions)}: " if conditions else ""
        found.append((condition, _what(phase, same, note)))
    if elsewhere:
        found.append((f"if a first step leads to {_either(elsewhere)}: ", "as there"))
    return sorted(found, key=lambda sentence: not sentence[0])  # what is left comes last


def _what(phase: str, ways: list[Way], note: str) -> str:
    if ways[0].is_impossible:
        return "impossible"
    because = f": {note}" if note else ""
    if all(way.is_ignored for way in ways):
        return f"ignores it{because}"
    targets = list(dict.fromkeys(way.phase for way in ways if way.phase != phase))
    stays = [way for way in ways if way.phase == phase]
    where = f"→ {_either(targets)}" if targets else ""
    if targets and stays:
        where += f", or stays {phase}"
    named = list(dict.fromkeys(action.rstrip("?") for way in ways for action in way.actions))
    sure = [each for each in named if all(each in way.actions for way in ways)]
    perhaps = [each for each in named if each not in sure]
    parts = [where, ", ".join(map(code, sure)), "perhaps " + ", ".join(map(code, perhaps)) if perhaps else ""]
    parts = [part for part in parts if part]
    return ("; ".join(parts) or "notes it") + because


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _cell(sentences: list[tuple[str, str]]) -> str:
    has_conditions = any(condition for condition, _ in sentences)
    return "<br>".join((condition or ("otherwise: " if has_conditions else "")) + text for condition, text in sentences)


def _invariants(core: Core) -> list[str]:
    invariants = invariants_of(core.module, core.cls)
    listed = "\n".join(f"- {sentence + ': ' if sentence else ''}`{condition}`" for condition, sentence in invariants)
    what = "True after each event. The tests check them (`validate`); a job does not pay for it."
    return ["## Invariants", what, listed] if invariants else []


def _index(cores: list[Core]) -> str:
    rows = [
        (
            f"[{core.name}]({core_slug(core.name)}.md)",
            core.module.docstring.partition("\n\n")[0],
            str(len(core.phases)),
            str(len(core.events)),
            str(len(fields_of(core.module, core.cls))),
        )
        for core in cores
    ]
    return lines(
        NOTE.format(path="the cores in aelastic/"),
        "# The cores",
        "What decides, and waits for nothing. Each page shows a core's phases, and what each event does in each of "
        "them, as the code says it. [How cores are made](../design.md) says why.",
        table(("core", "", "phases", "events", "fields"), rows),
        f"The rules by which agents agree have no phases: they are functions. [The log](log.md): {log_page.caption()}",
    )


def core_slug(name: str) -> str:
    """`worker-group`, of `WorkerGroup`."""
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")
