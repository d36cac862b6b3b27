"""The ways through a pair of phase and event, read from the code of a core.

`_dispatch` is followed for each pair, as the interpreter would: what depends on the phase or on the event's class is
decided, everything else goes both ways.  A way ends ignored for a reason (`return []  # reason`), impossible
(`raise self._impossible(event)`), or the core has acted: with the actions that it gives, and the phase that it is in
then.  A pair that no case decides is a mistake (`UndecidedError`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace

from effects import Parts, children
from sources import Source, methods_of, own_method, unparse

CALLS_MAX = 12  # one in another: beyond, a method calls itself


class UndecidedError(Exception):
    """No case of the core decides a pair of phase and event."""


@dataclass(frozen=True)
class Way:
    """One way through a pair of phase and event."""

    phase: str  # afterwards, if the way ends here
    actions: tuple[str, ...] = ()  # those of a part, which gives them or not, end in "?"
    is_changed: bool = False  # a field has another value
    is_impossible: bool = False
    is_over: bool = False  # it has returned, or raised
    conditions: tuple[str, ...] = ()
    note: str = ""
    is_told: bool = False  # the handler has returned to `_dispatch`, which goes on: that is the same for all events
    moved_to: str = ""  # the phase that a first step led to, before the phase was looked at
    held: tuple[tuple[str, tuple[str, ...]], ...] = ()  # local names that hold actions, not yet returned
    kinds: tuple[tuple[str, str], ...] = ()  # names and fields whose class is known: `self._wish` is an `_End`

    @property
    def is_ignored(self) -> bool:
        return not (self.is_impossible or self.is_changed or self.actions)


class Walker:
    """Follows one event from one phase through the code of a core."""

    def __init__(self, module: Source, cls: ast.ClassDef, phases: str, event: str, actions: frozenset[str]) -> None:
        self._module, self._phases, self._event, self._actions = module, phases, event, actions
        self._methods = methods_of(cls)
        self._parts = Parts(module, cls, actions)
        self._calls = list[str]()
        self._began_in = ""

    def through(self, phase: str) -> list[Way]:
        self._began_in = phase
        ways = self._block(self._methods["_dispatch"].body, [Way(phase)], is_shown=True)
        if any(not way.is_over for way in ways):
            raise UndecidedError("_dispatch ends without a return")
        return ways

    def _block(self, stmts: list[ast.stmt], ways: list[Way], *, is_shown: bool) -> list[Way]:
        for stmt in stmts:
            going = [way for way in ways if not way.is_over]
            done = [way for way in ways if way.is_over]
            ways = done + _distinct(each for way in going for each in self._step(stmt, way, is_shown=is_shown))
        return ways

    def _step(self, stmt: ast.stmt, way: Way, *, is_shown: bool) -> list[Way]:
        if is_shown and isinstance(stmt, ast.Assign) and self._is_handler(stmt.value):
            assert isinstance(stmt.value, ast.Call)
            after = self._call(self._methods[str(own_method(stmt.value))], way, stmt.value, is_tail=True)
            return [replace(each, is_over=each.is_impossible, is_told=True) for each in after]
        ways = self._statement(stmt, way, is_shown=is_shown and not way.is_told)
        return [replace(each, is_changed=way.is_changed) for each in ways] if way.is_told else ways

    def _statement(self, stmt: ast.stmt, way: Way, *, is_shown: bool) -> list[Way]:
        match stmt:
            case ast.Return():
                return self._return(stmt, way, is_shown=is_shown)
            case ast.Raise(exc=exc):
                raised = unparse(exc) if exc else ""
                is_impossible = "_impossible" in raised or "InvalidTransition" in raised
                return [replace(way, is_over=True, is_impossible=is_impossible, is_changed=not is_impossible)]
            case ast.If():
                return self._if(stmt, way, is_shown=is_shown)
            case ast.Match():
                return self._match(stmt, way, is_shown=is_shown)
            case ast.For() | ast.While() | ast.With():
                ways = self._expression(stmt.iter, way) if isinstance(stmt, ast.For) else [way]
                once = self._block(stmt.body, ways, is_shown=False)
                return _distinct([*once, *ways] if not isinstance(stmt, ast.With) else once)
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
                return self._assign(stmt, way)
            case ast.Delete():
                return [replace(way, is_changed=True)]
            case ast.Expr(value=value):
                if isinstance(value, ast.Call) and unparse(value.func) == "assert_never":
                    raise UndecidedError(f"assert_never is reached (line {stmt.lineno})")
                return self._expression(value, way)
            case _:
                return [way]

    def _return(self, stmt: ast.Return, way: Way, *, is_shown: bool) -> list[Way]:
        comment = self._module.comment_of(stmt) if is_shown else ""
        value, ways = stmt.value, [way]
        if is_shown and isinstance(value, ast.BinOp) and self._is_handler(value.right):
            ways, value = self._expression(value.left, way), value.right
        if is_shown and isinstance(value, ast.Call) and self._is_handler(value):
            method = self._methods[str(own_method(value))]
            noted = [replace(each, note=each.note or comment) for each in ways]
            return _distinct(after for each in noted for after in self._call(method, each, value, is_tail=True))
        ways = self._expression(stmt.value, way) if stmt.value else [way]
        return [replace(each, is_over=True, note=each.note or comment) for each in ways]

    def _is_handler(self, expr: ast.expr) -> bool:
        """Whether it calls a method whose ways are worth showing: one for an event, or one that looks at the phase."""
        method = self._methods.get(own_method(expr) or "")
        if method is None:
            return False
        looks = any(isinstance(each, ast.Match) and unparse(each.subject) == "self.phase" for each in method.body)
        return looks or method.name.startswith("_on_")

    def _if(self, stmt: ast.If, way: Way, *, is_shown: bool) -> list[Way]:
        ways = list[Way]()
        known = self._test(stmt.test, way)
        for before in self._expression(stmt.test, way):
            if known is not False:
                taken = self._when(before, self._open_part(stmt.test, way), known=known, is_shown=is_shown)
                after = self._block(stmt.body, [taken], is_shown=is_shown)
                # A condition is worth a line where it ends the way; what goes on meets the next one.
                ways += [each if each.is_over else replace(each, conditions=way.conditions) for each in after]
            if known is not True:
                ways += self._block(stmt.orelse, [before], is_shown=is_shown)
        return _distinct(ways)

    def _open_part(self, test: ast.expr, way: Way) -> str:
        """A condition without what the phase has decided already."""
        if isinstance(test, ast.BoolOp):
            parts = [self._open_part(value, way) for value in test.values if self._test(value, way) is None]
            return (" and " if isinstance(test.op, ast.And) else " or ").join(parts)
        return unparse(test)

    def _match(self, stmt: ast.Match, way: Way, *, is_shown: bool) -> list[Way]:
        ways, subject = list[Way](), unparse(stmt.subject)
        is_decidable = subject in {"self.phase", "event"} or subject in dict(way.kinds)
        for before in self._expression(stmt.subject, way):
            for case in stmt.cases:
                known = self._fits(case.pattern, subject, before)
                if known is False or (not is_decidable and _is_assert_never(case)):
                    continue
                if case.guard is not None:
                    guard = self._test(case.guard, before)
                    if guard is False:
                        continue
                    known = known and guard
                taken = self._when(before, self._case_text(case, subject, known=known), known=known, is_shown=is_shown)
                if is_shown:
                    taken = self._moved(taken) if subject == "self.phase" else taken
                    taken = replace(taken, note=taken.note or self._case_comment(case))
                ways += self._block(case.body, [taken], is_shown=is_shown)
                if known is True:
                    break
            else:
                if is_decidable:
                    raise UndecidedError(f"no case of `match {subject}` fits (line {stmt.lineno})")
                ways += [] if any(_is_assert_never(case) for case in stmt.cases) else [before]
        return _distinct(ways)

    def _fits(self, pattern: ast.pattern, subject: str, way: Way) -> bool | None:
        """Whether a pattern fits; None: it depends on what is not known here."""
        match pattern:
            case ast.MatchOr(patterns=patterns):
                each = [self._fits(one, subject, way) for one in patterns]
                return True if True in each else None if None in each else False
            case ast.MatchAs(pattern=None):
                return True
            case ast.MatchAs(pattern=inner) if inner is not None:
                return self._fits(inner, subject, way)
            case ast.MatchValue(value=value) if subject == "self.phase":
                return unparse(value).rpartition(".")[2] == way.phase
            case ast.MatchClass(cls=cls) if subject == "event" or subject in dict(way.kinds):
                kind = self._event if subject == "event" else dict(way.kinds)[subject]
                if unparse(cls).rpartition(".")[2] != kind:
                    return False
                literal = [*pattern.patterns, *pattern.kwd_patterns]
                return None if any(not isinstance(each, ast.MatchAs) for each in literal) else True
            case _:
                return None

    def _test(self, test: ast.expr, way: Way) -> bool | None:
        """Whether a condition holds, as far as the phase tells."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                known = self._test(operand, way)
                return None if known is None else not known
            case ast.BoolOp(op=op, values=values):
                each = [self._test(value, way) for value in values]
                decisive = isinstance(op, ast.Or)
                return decisive if decisive in each else None if None in each else not decisive
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if name in self._methods:
                body = self._methods[name].body  # a property, as in `is_closed`
                returned = body[-1].value if isinstance(body[-1], ast.Return) else None
                return self._test(returned, way) if returned is not None else None
            case ast.Compare(left=left, ops=[op], comparators=[right]) if unparse(left) == "self.phase":
                phases = self._phases_in(right)
                if phases is None:
                    return None
                return (way.phase in phases) is isinstance(op, ast.Is | ast.Eq | ast.In)
            case ast.Call(func=ast.Name(id="isinstance"), args=[value, kind]):
                known_kind = self._event if unparse(value) == "event" else dict(way.kinds).get(unparse(value))
                kinds = {each.rpartition(".")[2].strip(" ()") for each in unparse(kind).split("|")}
                return None if known_kind is None else known_kind in kinds
            case _:
                return None

    def _phases_in(self, expr: ast.expr) -> set[str] | None:
        if isinstance(expr, ast.Attribute) and unparse(expr.value).rpartition(".")[2] == self._phases:
            return {expr.attr}
        if isinstance(expr, ast.Set | ast.Tuple):
            each = [self._phases_in(one) for one in expr.elts]
            return set().union(*[one for one in each if one]) if None not in each else None
        return None

    def _assign(self, stmt: ast.Assign | ast.AugAssign | ast.AnnAssign, way: Way) -> list[Way]:
        if stmt.value is None:
            return [way]
        ways = self._expression(stmt.value, way)
        targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
        if all(isinstance(target, ast.Name) for target in targets):
            return _distinct(_hold(each, way, unparse(targets[0]), _kind_of(stmt.value, way)) for each in ways)
        for target in targets:
            pairs = [(target, stmt.value)]
            if isinstance(target, ast.Tuple) and isinstance(stmt.value, ast.Tuple):
                pairs = list(zip(target.elts, stmt.value.elts, strict=True))
            elif isinstance(target, ast.Tuple):
                pairs = [(each, stmt.value) for each in target.elts]
            for to, value in pairs:
                if isinstance(to, ast.Attribute | ast.Subscript):
                    kinds = _known(way.kinds, unparse(to), _kind_of(value, way))
                    ways = [replace(each, is_changed=True, kinds=kinds) for each in ways]
                    way = replace(way, kinds=kinds)
                if unparse(to) == "self.phase":
                    phases = sorted(self._phases_set_by(value))
                    ways = [replace(each, phase=phase) for each in ways for phase in phases]
        return _distinct(ways)

    def _phases_set_by(self, value: ast.expr) -> set[str]:
        found = {
            each.attr
            for each in ast.walk(value)
            if isinstance(each, ast.Attribute) and unparse(each.value).rpartition(".")[2] == self._phases
        }
        if not found:
            raise UndecidedError(f"`self.phase = {unparse(value)}` names no phase (line {value.lineno})")
        return found

    def _expression(self, expr: ast.expr, way: Way) -> list[Way]:
        """What an expression does: calls of own methods, and the actions that it makes, in order."""
        match expr:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                known = self._test(test, way)
                ways = self._expression(test, way)
                taken = [] if known is False else [each for one in ways for each in self._expression(body, one)]
                other = [] if known is True else [each for one in ways for each in self._expression(orelse, one)]
                return _distinct([*taken, *other])
            case ast.BoolOp(values=values):
                ways, reached = list[Way](), [way]
                for value in values:
                    reached = [each for one in reached for each in self._expression(value, one)]
                    ways += reached
                return _distinct(ways)
            case ast.Lambda():
                return [way]
            case ast.Name(id=name) if name in dict(way.held):
                return [replace(way, actions=_with(way.actions, dict(way.held)[name]))]
            case ast.Call():
                return self._call_expression(expr, way)
            case _:
                ways = [way]
                for child in children(expr):
                    ways = _distinct(each for one in ways for each in self._expression(child, one))
                return ways

    def _call_expression(self, call: ast.Call, way: Way) -> list[Way]:
        ways = [way]
        for each in [*call.args, *[keyword.value for keyword in call.keywords]]:
            ways = _distinct(after for one in ways for after in self._expression(each, one))
        called = unparse(call.func)
        name = called.rpartition(".")[2]
        if (own := own_method(call)) is not None and own in self._methods:
            return _distinct(after for one in ways for after in self._call(self._methods[own], one, call))
        if name in self._actions:
            return [replace(one, actions=_with(one.actions, (name,))) for one in ways]
        if called.startswith("self."):
            made, is_changed = self._parts.effects(called)
            return [
                replace(one, actions=_with(one.actions, made), is_changed=one.is_changed or is_changed) for one in ways
            ]
        return ways

    def _call(self, method: ast.FunctionDef, way: Way, call: ast.Call, *, is_tail: bool = False) -> list[Way]:
        """What a method of the core does; the handler that a case returns is shown, way by way."""
        if self._calls.count(method.name) or len(self._calls) > CALLS_MAX:
            return [way]
        own = [(name, kind) for name, kind in way.kinds if name.startswith("self.")]
        parameters = [each.arg for each in method.args.args[1:]]
        given = [*zip(parameters, call.args, strict=False), *[(str(k.arg), k.value) for k in call.keywords]]
        arguments = [(name, kind) for name, value in given if (kind := _kind_of(value, way))]
        self._calls.append(method.name)
        try:
            ways = self._block(method.body, [replace(way, held=(), kinds=(*own, *arguments))], is_shown=is_tail)
        finally:
            self._calls.pop()
        if is_tail:
            return [replace(each, is_over=True) for each in ways]
        # What a method returns early does not end its caller, whose names hold what they held.
        local = tuple((name, kind) for name, kind in way.kinds if not name.startswith("self."))
        return _distinct(
            replace(each, is_over=each.is_impossible, held=way.held, kinds=_own_kinds(each) + local) for each in ways
        )

    @staticmethod
    def _when(way: Way, text: str, *, known: bool | None, is_shown: bool) -> Way:
        if known is True or not is_shown or not text:
            return way
        return replace(way, conditions=(*way.conditions, f"`{text}`"))

    def _moved(self, way: Way) -> Way:
        """Notes of a way that has left the phase it began in, before it comes to a case, which one it is in."""
        return way if way.phase == self._began_in or way.moved_to else replace(way, moved_to=way.phase)

    @staticmethod
    def _case_text(case: ast.match_case, subject: str, *, known: bool | None) -> str:
        if known is True:
            return ""
        guard = unparse(case.guard) if case.guard else ""
        if subject in {"self.phase", "event"} or (
            isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
        ):
            return guard
        pattern = f"{subject} is {unparse(case.pattern)}"
        return f"{pattern} and {guard}" if guard else pattern

    def _case_comment(self, case: ast.match_case) -> str:
        line = (case.guard or case.pattern).end_lineno or 0
        return self._module.comments.get(line, "")


def _distinct(ways: Iterable[Way]) -> list[Way]:
    return list(dict.fromkeys(ways))


def _with(actions: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return actions + tuple(each for each in more if each not in actions)


def _is_assert_never(case: ast.match_case) -> bool:
    return unparse(case.body[0]).startswith("assert_never")


def _kind_of(expr: ast.expr, way: Way) -> str | None:
    """The class of a value, where it is made on the spot or held by a name of which it is known."""
    match expr:
        case ast.Call(func=ast.Name(id=name)) if name.lstrip("_")[:1].isupper():
            return name
        case ast.Name() | ast.Attribute():
            return dict(way.kinds).get(unparse(expr))
        case _:
            return None


def _known(kinds: tuple[tuple[str, str], ...], name: str, kind: str | None) -> tuple[tuple[str, str], ...]:
    others = tuple((each, its) for each, its in kinds if each != name)
    return others if kind is None else (*others, (name, kind))


def _own_kinds(way: Way) -> tuple[tuple[str, str], ...]:
    return tuple((name, kind) for name, kind in way.kinds if name.startswith("self."))


def _hold(after: Way, before: Way, name: str, kind: str | None) -> Way:
    """What an assignment to a local name gives: its actions are not given yet, but held."""
    made = tuple(each for each in after.actions if each not in before.actions)
    held = dict(after.held)
    held[name] = _with(held.get(name, ()), made)
    return replace(after, actions=before.actions, held=tuple(held.items()), kinds=_known(after.kinds, name, kind))
