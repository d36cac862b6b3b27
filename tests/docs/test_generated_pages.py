"""Pages generated from the code, and what is read from the text of cores."""

from __future__ import annotations

import ast
from pathlib import Path

import generate_docs
import metrics_page
from cores import all_cores, invariants_of
from sources import ROOT, Source, methods_of, own_method

LAMP = '''
"""A lamp."""

class Press: ...

class Break: ...

Event = Press | Break

class Light: ...

class Ring: ...

Action = Light | Ring

class Phase:
    OFF = auto()  # dark
    ON = auto()
    BROKEN = auto()

class Lamp(Machine[Event, Action]):
    phase: Phase = Phase.OFF
    count: int = 0  # of presses

    def validate(self):
        assert self.count >= 0, "presses are counted up"

    def _dispatch(self, event, now):
        match event:
            case Press():
                return self._on_press(event)
            case Break():
                return self._on_break(event)
            case _:
                assert_never(event)

    def _on_press(self, event):
        match self.phase:
            case Phase.OFF:  # the first press
                self.count += 1
                return self._light()
            case Phase.ON if self.count == 3:
                self.phase = Phase.OFF
                return []
            case Phase.ON:
                return []  # it shines already
            case Phase.BROKEN:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_break(self, event):
        if self.phase is Phase.BROKEN:
            return []  # once is enough
        self.phase = Phase.BROKEN
        return [Ring()]

    def _light(self):
        self.phase = Phase.ON
        return [Light()]
'''


def test_no_page_is_stale() -> None:
    assert [*generate_docs.stale_pages()] == [], "run `make docs`"


def test_a_duration_in_the_reference_of_metrics_is_not_called_a_point_in_time() -> None:
    (page,) = metrics_page.pages().values()
    assert "| `aelastic_time_seconds_total` | counter | s |" in page
    assert "| `aelastic_phase_start_time_seconds` | gauge | s since 1970 |" in page


def test_the_reader_imports_nothing_of_the_package() -> None:
    for path in Path(generate_docs.__file__).parent.glob("*.py"):
        if path.name in {
            "cli_page.py",
            "metrics_page.py",
            "rdzv_conf_page.py",
        }:  # tables of values, made without torch and without a loop
            continue
        assert "\nfrom aelastic" not in path.read_text() and "\nimport aelastic" not in path.read_text()


def unproven(cls: ast.ClassDef) -> list[str]:
    """Handlers that look at no phase, and matches on phase or event that the type checker does not prove complete.

    If `_dispatch` itself decides the phases in which all events are alike, handlers may ignore the other phases.
    """
    methods = methods_of(cls)
    matches = {
        name: [each for each in ast.walk(method) if isinstance(each, ast.Match)] for name, method in methods.items()
    }

    def looks_at_phase(name: str) -> bool:
        called = {own_method(node) or "" for node in ast.walk(methods[name])} & methods.keys() - {name}
        looks = any(ast.unparse(each.subject) == "self.phase" for each in matches[name])
        return looks or any(looks_at_phase(each) for each in called)

    handlers = {own_method(node) or "" for node in ast.walk(methods["_dispatch"])}
    is_decided = any(ast.unparse(each.subject) == "self.phase" for each in matches["_dispatch"])
    handlers = set() if is_decided else {name for name in handlers if name.startswith("_on_")}
    found = sorted(name for name in handlers if not looks_at_phase(name))
    for name, each in ((name, each) for name, some in matches.items() for each in some):
        is_closed = ast.unparse(each.cases[-1].body[0]) == f"assert_never({ast.unparse(each.subject)})"
        if ast.unparse(each.subject) in {"self.phase", "event"} and not is_closed:
            found.append(f"{name}: match {ast.unparse(each.subject)}")
    return found


def test_a_handler_that_the_type_checker_cannot_prove_complete_is_found() -> None:
    open_matches = LAMP.replace(
        "            case _:\n                assert_never(", "            case _:\n                print("
    )
    lamp = Source("lamp", ROOT / "lamp.py", open_matches).definition("Lamp")
    assert isinstance(lamp, ast.ClassDef)
    assert unproven(lamp) == ["_on_break", "_dispatch: match event", "_on_press: match self.phase"]
    guarded = open_matches.replace(
        "        match event:",
        "        match self.phase:\n            case _:\n                pass\n        match event:",
    )
    lamp = Source("lamp", ROOT / "lamp.py", guarded).definition("Lamp")
    assert isinstance(lamp, ast.ClassDef)
    assert unproven(lamp) == ["_dispatch: match self.phase", "_dispatch: match event", "_on_press: match self.phase"]


def test_a_core_proves_that_each_pair_of_phase_and_event_is_decided() -> None:
    for module, cls in all_cores():
        assert unproven(cls) == [], cls.name
        invariants = invariants_of(module, cls)
        assert invariants and all(sentence for _, sentence in invariants), cls.name
