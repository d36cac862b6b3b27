"""The page that explains messages has every message of the code, and no other; and the variables are listed."""

from __future__ import annotations

import ast
import re

import messages
import pytest
from sources import ROOT, Source, package
from troubleshooting_page import PAGE, entries

from aelastic.cli.manual.topics import entry as entry_of
from aelastic.cli.manual.topics import topics

ENVIRONMENT = ROOT / "docs/reference/environment.md"
VARIABLE = re.compile(
    r"(?:AELASTIC|TORCHELASTIC|TORCH|SLURM|JOB|MASTER|WATCHDOG|NOTIFY|OMP|TRITON|CUDA|HIP)(?:_[A-Z]+)+"
)


def listed() -> list[str]:
    return [message for entry in entries() for message in entry.messages]


def topics_of_errors() -> dict[str, str]:
    """Each topic of an error in the code, and the file that contains it."""
    found = {}
    for module in package():
        for node in module.nodes:
            match node:
                case ast.keyword(arg="topic", value=ast.Constant(value=str(topic))):
                    found[topic] = module.file
                case ast.Assign(targets=[ast.Name(id="topic")], value=ast.Constant(value=str(topic))):
                    found[topic] = module.file
    return found


def test_each_message_of_the_code_has_an_entry_and_each_entry_has_messages_of_the_code() -> None:
    written, page = messages.messages(), listed()
    missing = {text: places for text, places in written.items() if text not in page}
    assert not missing, f"add to an entry of {PAGE.relative_to(ROOT)}, or add an entry: {missing}"
    assert sorted(set(page) - written.keys() - messages.sentences()) == [], "no code prints these"
    assert len(page) > 250


def test_each_entry_has_an_anchor_of_its_own_messages_and_an_explanation() -> None:
    topics = [entry.topic for entry in entries()]
    assert len(set(topics)) == len(topics) > 80
    prose = {
        entry.topic: [line for line in entry.text.splitlines() if not line.startswith("- ")] for entry in entries()
    }
    assert [topic for topic, lines in prose.items() if not any(lines)] == []


def test_each_topic_that_the_program_prints_has_an_entry() -> None:
    known, of_errors = {entry.topic for entry in entries()}, topics_of_errors()
    assert len(of_errors) > 3 and {topic: file for topic, file in of_errors.items() if topic not in known} == {}
    assert {message: topic for message, topic in messages.with_topics().items() if topic not in known} == {}


def test_each_message_with_a_topic_is_in_the_entry_of_that_topic() -> None:
    by_topic, logged = {entry.topic: entry.messages for entry in entries()}, messages.with_topics()
    assert {message: topic for message, topic in logged.items() if message not in by_topic[topic]} == {}
    assert len(logged) > 25


def test_the_page_of_a_topic_can_be_read_without_the_site() -> None:
    assert list(topics()) == [entry.topic for entry in entries()]
    text = entry_of("no-answer-from-the-endpoint") or ""
    assert text.startswith("No answer from the endpoint\n\n- `") and "What to do: " in text
    assert "](" not in text and entry_of("no-such-topic") is None


@pytest.mark.parametrize(
    "code, texts",
    [
        ("_log.warning('lost node %s: %d s', node, s)", ["lost node …: … s"]),
        ("_log.info('all is well')", []),
        ("raise InputError(f'{name} is {value!r}: use another')", ["… is …: use another"]),
        ("raise InputError('one ' + (f'of {a}' if a else 'at all'))", ["one at all", "one of …"]),
        ("def f():\n    text = f'no node {x}'\n    raise InputError(text)", ["no node …"]),
        ("def f():\n    raise InputError(g(1))\ndef g(x):\n    return f'bad value {x}'", ["bad value …"]),
        ("raise InputError(str(error))", []),
        ("raise KeyError('internal')", []),
    ],
)
def test_a_message_is_found_wherever_it_is_made(monkeypatch: pytest.MonkeyPatch, code: str, texts: list[str]) -> None:
    module = Source("aelastic.rdzv.x", ROOT / "aelastic/x.py", f"class InputError(Exception): ...\n{code}\n")
    monkeypatch.setattr(messages, "package", lambda: [module])
    assert sorted(messages.messages()) == texts


def test_each_variable_that_the_code_names_is_listed() -> None:
    named = {
        node.value: module.name
        for module in package()
        for node in module.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value)
    }
    page = ENVIRONMENT.read_text()
    assert len(named) > 30 and {name: where for name, where in named.items() if f"`{name}" not in page} == {}
