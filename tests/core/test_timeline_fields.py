"""The fields that readers of event logs check match those of the published schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sources import ROOT

from aelastic.tools.timeline import fields

SCHEMA = json.loads((ROOT / "docs/reference/event-log.schema.json").read_text())
EXAMPLES = {"integer": 7, "number": 0.5, "string": "text", "boolean": True}


def typed(schema: Any) -> Iterator[tuple[str, str]]:
    """The fields of one type, at any depth."""
    for name, value in schema.get("properties", {}).items():
        found = value.get("type", "string" if "enum" in value else None)
        types = {found} if isinstance(found, str) else {*found} - {"null"} if found else set()
        if len(types) == 1 and types <= EXAMPLES.keys():
            yield name, types.pop()
    for value in schema.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from typed(each)


@pytest.mark.parametrize("name, kind", sorted({*typed(SCHEMA)}))
def test_a_field_has_the_type_that_the_schema_gives_it_and_no_other(name: str, kind: str) -> None:
    fields.check({name: EXAMPLES[kind]})
    fields.check({name: None})
    other = 7 if kind in {"string", "boolean"} else "text"
    with pytest.raises(ValueError, match=f"{name} is {other!r}"):
        fields.check({name: other})
