"""Describes a script's habits that break its recovery in place, or may: which rule, where, and what to change.

The rules are those of the contract in `docs/how-to/in-place.md`, by their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

from aelastic.tools.rehearse.noted import Habit
from aelastic.training.rehearsed import notes

# These harm only some scripts, or not at once.
_HARMLESS = {notes.READ_OUTSIDE, notes.STILL_REFERENCED}
_RULES = {
    notes.GROUP_OUTSIDE: 1,
    notes.STILL_REFERENCED: 1,
    notes.NO_GROUP: 1,
    notes.WRAPPED_FIRST: 2,
    notes.COLLECTIVE_AFTER_UPDATE: 3,
    notes.RANDOM: 4,
    notes.READ_OUTSIDE: 5,
    notes.NO_COMMIT: 6,
    notes.COMMIT_WITHOUT_UPDATE: 6,
}


def breaks(habit: Habit) -> bool:
    """Whether it breaks recovery in place; otherwise it may."""
    return habit.habit not in _HARMLESS


def lines_of(habits: Iterable[Habit]) -> list[str]:
    """Returns a line for each habit, those that break recovery first."""
    ordered = sorted(habits, key=lambda each: (not breaks(each), _RULES[each.habit], each.where))
    return [f"rule {_RULES[each.habit]}{'' if breaks(each) else ' (may do harm)'}: {text_of(each)}" for each in ordered]


def text_of(habit: Habit) -> str:
    """Says what the script does, and what to change."""
    has_place, has_object = bool(habit.where), bool(habit.what)
    if habit.habit == notes.RANDOM:
        text = _RANDOM if has_object else _OTHER_STATE
    elif habit.habit == notes.STILL_REFERENCED:
        text = _MODEL_REFERENCED if has_place else _GROUP_REFERENCED
    else:
        text = _TEXTS[habit.habit]
    return text.format(where=habit.where or "the script", what=habit.what)


_TEXTS = {
    notes.GROUP_OUTSIDE: (
        "a process group exists before the function is called: call init_process_group inside the function"
    ),
    notes.NO_GROUP: "{where} calls share in a round without a process group: call init_process_group in each round",
    notes.WRAPPED_FIRST: "{where} wraps the model in {what} before round.share(): call share first",
    notes.COLLECTIVE_AFTER_UPDATE: (
        "{where} calls {what} between optimizer.step() and the commit: call round.commit(step + 1) before it"
    ),
    notes.READ_OUTSIDE: "{where} reads {what} before the function is called: read it inside, as ranks may change",
    notes.NO_COMMIT: "{where} updates the model, but no step is committed: use round.steps() or call round.commit()",
    notes.COMMIT_WITHOUT_UPDATE: (
        "{where} commits steps before their gradients are applied: commit after the optimizer's update"
    ),
}
_RANDOM = "random numbers depend on more than step and rank ({what}): seed them at the start of each step"
_OTHER_STATE = (
    "training continues differently after a recovery: data depend on more than step and rank, or some state is in no "
    "state_dict"
)
_MODEL_REFERENCED = "{what}, made at {where}, outlives its round: keep it in a local variable of the function"
_GROUP_REFERENCED = "a process group outlives its round: keep what belongs to it in local variables of the function"
