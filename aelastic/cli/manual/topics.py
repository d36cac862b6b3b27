"""The entry of the troubleshooting page that explains a message: `(help: TOPIC)` at the end of its line.

An error of ours carries its topic (`AelasticError.topic`), a log line has it in `extra={"topic": …}`.  Only messages
whose reader needs more than the line have one.  `make docs` writes `topics.md`, which has the entries, from
docs/reference/troubleshooting.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping


def with_topic(text: str, topic: str | None) -> str:
    """A message of one line, followed by where help on it is."""
    return text if topic is None else f"{text} (help: {topic})"


class HelpfulFormatter(logging.Formatter):
    """Ends a log line with its topic."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  its name in `logging`
        return with_topic(super().formatMessage(record), topic_of(record))


def topic_of(record: logging.LogRecord) -> str | None:
    """Its own, or else that of the error of ours that it quotes."""
    topics = [_topic_in(record), *(_topic_in(each) for each in _values(record) if isinstance(each, Exception))]
    return next(filter(None, topics), None)


def topics() -> Iterable[str]:
    """Those that have an entry, in the page's order."""
    return _entries()


def entry(topic: str) -> str | None:
    """What the page has on a topic, as text for a terminal; `None` if it has nothing."""
    return _entries().get(topic)


def _entries() -> Mapping[str, str]:
    from importlib.resources import files

    text = files("aelastic.cli.manual").joinpath("topics.md").read_text(encoding="utf-8")
    parts = [part.partition("\n") for part in text.split("\n# ")[1:]]
    return {topic: body.strip() for topic, _, body in parts}


def _values(record: logging.LogRecord) -> Iterable[object]:
    return record.args if isinstance(record.args, tuple) else ()


def _topic_in(value: object) -> str | None:
    topic = getattr(value, "topic", None)
    return topic if isinstance(topic, str) else None
