"""The page that explains messages has each one that the code can write, and no other; and the variables are listed."""

from __future__ import annotations

import ast
import re

import messages
import pytest
from sources import ROOT, Source, package

PAGE = ROOT / "docs/reference/troubleshooting.md"
ENVIRONMENT = ROOT / "docs/reference/environment.md"
CODE = re.compile(r"`` (.+?) ``|`([^`]+)`")
VARIABLE = re.compile(
    r"(?:AELASTIC|TORCHELASTIC|TORCH|SLURM|JOB|MASTER|WATCHDOG|NOTIFY|OMP|TRITON|CUDA|HIP)(?:_[A-Z]+)+"
)


def explained() -> dict[str, tuple[str, str]]:
    rows = [
        re.split(r"(?<!\\) \| ", line.strip("| ")) for line in PAGE.read_text().splitlines() if line.startswith("| ")
    ]
    return {
        (double or single).replace("\\|", "|"): (means, remedy)
        for cell, means, remedy in rows
        for double, single in CODE.findall(cell)
    }


def test_each_message_of_the_code_is_explained_and_each_that_is_explained_is_in_the_code() -> None:
    written, page = messages.messages(), explained()
    missing = {text: places for text, places in written.items() if text not in page}
    assert not missing, f"add to a row, or a row to {PAGE.relative_to(ROOT)}: {missing}"
    assert sorted(page.keys() - written.keys() - messages.sentences()) == [], "these are written no more"
    assert len(page) > 250 and all(means and remedy for means, remedy in page.values())


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
