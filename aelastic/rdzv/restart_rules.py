"""The rules of `--restart-policy`: how the job reacts to the end of a round.

    exit 42: stop; error "ECC|NVLink": restart 2/1h after 5s..1m; node-lost: ignore; *: restart

A rule is a list of conditions, separated by commas, a colon and an action.  `;` or the end of the line ends it, `#`
begins a comment.  The first rule that matches applies, as in a Kubernetes `podFailurePolicy`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from aelastic.base.record import Record

RULES_MAX = 20
CHARS_MAX = 8192  # agents compare their texts
RESTARTS_MAX = 100  # per rule: each restart is remembered for the rule's window
CONDITIONS = (
    "exit N[-M]", "signal NAME", "error REGEX", "oom", "hang", "node-lost", "drained", "unfit", "same-error [any]",
    "no-progress K", "*",
)  # fmt: skip
ACTIONS = ("restart [N/WINDOW] [after S..S]", "elsewhere", "ignore", "stop")
_TOKEN = re.compile(r"""[ \t\r]*(?:"([^"\n]*)"|'([^'\n]*)'|([:,;\n])|([^\s:,;"'#]+)|(#[^\n]*)|(["']))""")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


class Condition(Record):
    """A condition of a rule: its word and its arguments."""

    word: str
    first: int = 0
    last: int = 0
    pattern: str = ""


class Rule(Record):
    """Conditions, and the action if one of them holds."""

    text: str  # as the user wrote it
    conditions: tuple[Condition, ...]
    action: str  # restart, elsewhere, ignore or stop
    most: int = 0  # restarts within the window; 0: those of `--max-restarts`
    window_s: float = 0.0
    after: tuple[float, float] = (0.0, 0.0)  # seconds before the first restart, and at most

    @property
    def is_endless(self) -> bool:
        """Whether the rule restarts after any failure, without limit."""
        return self.action == "ignore" and any(each.word == "*" for each in self.conditions)


def error_patterns(rules: Sequence[Rule]) -> dict[str, list[int]]:
    """Returns the patterns of `error` conditions, with the places of the rules that have them."""
    places: dict[str, list[int]] = {}
    for place, rule in enumerate(rules):
        for condition in rule.conditions:
            if condition.word == "error":
                places.setdefault(condition.pattern, []).append(place)
    return places


class RuleError(ValueError):
    """The rules are invalid; the message names the column and the words that are allowed."""


DEFAULT = (
    Rule("drained: ignore", (Condition("drained"),), "ignore"),
    Rule("same-error: stop", (Condition("same-error"),), "stop"),
    Rule("*: restart", (Condition("*"),), "restart"),
)


def parse(text: str) -> tuple[Rule, ...]:
    """Parses the rules.

    Raises:
        RuleError: the rules are invalid.
    """
    return tuple(_Reader(text).rules())


def problem_of(text: str) -> str:
    """Returns what is wrong with the rules; empty if nothing is."""
    try:
        parse(text)
    except RuleError as error:
        return str(error)
    return ""


class _Token(Record):
    text: str
    at: int
    end: int
    is_mark: bool = False  # `:`, `,`, `;`, or the end of a line
    is_quoted: bool = False


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._next = text, 0
        if len(text) > CHARS_MAX:
            raise self._error(CHARS_MAX, f"the rules are longer than {CHARS_MAX} characters")
        self._tokens = [*self._read_tokens(), _Token(";", len(text), len(text), is_mark=True)]

    def _read_tokens(self) -> list[_Token]:
        tokens, at = [], 0
        while match := _TOKEN.match(self._text.rstrip(" \t"), at):
            double, single, mark, word, comment, unclosed = match.groups()
            start, at = match.start(match.lastindex or 0), match.end()
            if unclosed:
                raise self._error(start, "the quotation mark is not closed")
            quoted = double if double is not None else single
            if quoted is not None:
                tokens.append(_Token(quoted, start - 1, at, is_quoted=True))
            elif comment is None:
                tokens.append(_Token(mark or word, start, at, is_mark=mark is not None))
        return tokens

    def rules(self) -> list[Rule]:
        rules: list[Rule] = []
        while self._next < len(self._tokens):
            if self._sees(";", "\n"):
                self._next += 1
                continue
            if len(rules) == RULES_MAX:
                raise self._error(self._token.at, f"there are more than {RULES_MAX} rules")
            rules.append(self._rule())
        if not rules:
            raise self._error(0, f"there is no rule: use CONDITION: ACTION, with one of {', '.join(CONDITIONS)}")
        return rules

    @property
    def _token(self) -> _Token:
        return self._tokens[min(self._next, len(self._tokens) - 1)]

    def _sees(self, *marks: str) -> bool:
        return self._token.is_mark and self._token.text in marks

    def _word(self) -> _Token | None:
        """Reads the next word, if there is one before the next mark."""
        if self._token.is_mark:
            return None
        self._next += 1
        return self._tokens[self._next - 1]

    def _error(self, where: int | _Token | None, what: str) -> RuleError:
        """Returns an error at an offset or a token; `None`: at the next token, where a word is missing."""
        at = where if isinstance(where, int) else (where or self._token).at
        line, column = self._text.count("\n", 0, at) + 1, at - self._text.rfind("\n", 0, at)
        return RuleError(f"line {line}, " * ("\n" in self._text) + f"column {column}: {what}")

    def _rule(self) -> Rule:
        start, conditions = self._token.at, [self._condition()]
        while self._sees(","):
            self._next += 1
            conditions.append(self._condition())
        if not self._sees(":"):
            raise self._error(self._token.at, "a colon and an action should follow, as in 'exit 42: stop'")
        self._next += 1
        rule = self._action()
        if not self._sees(";", "\n"):
            raise self._error(self._token.at, f"{self._token.text!r} follows an action: end the rule with ';'")
        text = self._text[start : self._tokens[self._next - 1].end]
        words = {each.word for each in conditions}
        if words & {"drained", "node-lost"} and rule.action == "elsewhere":
            raise self._error(start, "the node is gone: 'elsewhere' is for failures of workers")
        if "drained" in words and rule.action == "restart":
            raise self._error(start, "a drain is not charged: use 'drained: ignore', or 'drained: stop'")
        return rule.replace(text=" ".join(text.split()), conditions=tuple(conditions))

    def _condition(self) -> Condition:
        at, word = self._token.at, self._word()
        match "" if word is None or word.is_quoted else word.text:
            case "exit":
                return self._exit()
            case "signal":
                return self._signal()
            case "error":
                return Condition("error", pattern=self._pattern())
            case "no-progress":
                return self._no_progress()
            case "same-error":
                if not self._token.is_mark and self._token.text == "any":
                    self._next += 1
                    return Condition("same-error", pattern="any")
                return Condition("same-error")
            case "oom" | "hang" | "node-lost" | "drained" | "unfit" | "*" as plain:
                return Condition(plain)
            case _:
                named = "there is not a condition here" if word is None else f"{word.text!r} is not a condition"
                raise self._error(at, f"{named}: use one of {', '.join(CONDITIONS)}")

    def _no_progress(self) -> Condition:
        token = self._word()
        if token is None or not token.text.isdecimal() or not 1 <= int(token.text) <= RESTARTS_MAX:
            what = f"no-progress needs a number from 1 to {RESTARTS_MAX}: how often in a row, as in 'no-progress 3'"
            raise self._error(token, what)
        return Condition("no-progress", int(token.text))

    def _exit(self) -> Condition:
        token = self._word()
        match = None if token is None else re.fullmatch(r"(\d{1,3})(?:-(\d{1,3}))?", token.text)
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= first <= last <= 255:
            raise self._error(token, "exit needs a code from 1 to 255, or a range, as in 'exit 40-49'")
        return Condition("exit", first, last)

    def _signal(self) -> Condition:
        token = self._word()
        name = "" if token is None else f"SIG{token.text.upper().removeprefix('SIG')}"
        if name not in signal.Signals.__members__:
            raise self._error(token, "signal needs a name, as in 'signal SEGV'")
        return Condition("signal", signal.Signals[name].value)

    def _pattern(self) -> str:
        token = self._word()
        if token is None or not token.text:
            raise self._error(token, "error needs a regular expression, as in 'error \"ECC|NVLink\"'")
        try:
            re.compile(token.text)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._error(token, f"{token.text!r} is not a regular expression ({error})") from None
        return token.text

    def _action(self) -> Rule:
        at, word = self._token.at, self._word()
        match "" if word is None or word.is_quoted else word.text:
            case "stop" | "ignore" | "elsewhere" as plain:
                return Rule("", (), plain)
            case "restart":
                return self._restart()
            case _:
                named = "there is not an action here" if word is None else f"{word.text!r} is not an action"
                raise self._error(at, f"{named}: use one of {', '.join(ACTIONS)}")

    def _restart(self) -> Rule:
        rule = Rule("", (), "restart")
        if (token := self._word()) is not None and token.text != "after":
            number, slash, window = token.text.partition("/")
            window_s = _seconds(window)
            if not (slash and number.isdecimal() and 1 <= int(number) <= RESTARTS_MAX and window_s):
                what = f"{token.text!r} is not a budget: use N/WINDOW, N from 1 to {RESTARTS_MAX}, as in 'restart 5/1h'"
                raise self._error(token.at, what)
            rule, token = rule.replace(most=int(number), window_s=window_s), self._word()
        if token is not None:
            rule = rule.replace(after=self._after(token))
        return rule

    def _after(self, token: _Token) -> tuple[float, float]:
        if token.text != "after":
            raise self._error(token.at, f"{token.text!r} follows 'restart': use N/WINDOW, after S..S, or nothing")
        times = self._word()
        low, dots, high = ("", "", "") if times is None else times.text.partition("..")
        first, most = _seconds(low), _seconds(high) if dots else _seconds(low)
        if first is None or most is None or not first <= most <= _UNITS["h"]:
            what = "after needs times up to 1h, with units, the first before the last: as in 'after 1s..5m'"
            raise self._error(times, what)
        return first, most


def _seconds(text: str) -> float | None:
    """Parses a time such as `90s` or `1.5h`; returns `None` if it is invalid."""
    match = _TIME.fullmatch(text)
    return float(match[1]) * _UNITS[match[2]] if match else None


def in_time(seconds: float) -> str:
    """Formats a time as in a rule: `90s`, `1h`."""
    unit = next((unit for unit in ("d", "h", "m") if seconds >= _UNITS[unit] and not seconds % _UNITS[unit]), "s")
    return f"{seconds / _UNITS[unit]:g}{unit}"
