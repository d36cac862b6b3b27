"""A record behaves like a frozen dataclass in all respects that cores and tests rely on."""

from __future__ import annotations

import copy
import pickle

import pytest

from aelastic.base.record import Record


class Point(Record):
    x: int
    y: int = 7


class Other(Record):
    x: int
    y: int = 7


class Empty(Record): ...


def test_fields_come_by_position_by_name_and_by_default() -> None:
    assert (Point(1).x, Point(1).y) == (1, 7)
    assert Point(1, 2) == Point(y=2, x=1)
    assert [*Point(1, 2).__dict__] == ["x", "y"], "a greeting is recognized by the first of its fields"


def test_records_are_equal_by_type_and_value() -> None:
    assert Point(1, 2) == Point(1, 2)
    assert Point(1) == Point(1, 7) == Point(1, 7).replace(x=1) != Point(1, 8)
    assert hash(Point(1)) == hash(Point(1, 7)) and repr(Point(1)) == repr(Point(1, 7)) == "Point(x=1)"
    assert Point(1, 2) != Point(1, 3)
    assert Point(1) != Point(1, 8) and Point(1, 8) != Point(1)
    assert Point(1, 2) != Other(1, 2)
    assert Empty() == Empty()
    assert len({Point(1, 2), Point(1, 2), Other(1, 2)}) == 2


def test_a_default_is_that_of_one_kind_of_records() -> None:
    class Height(Record):
        y: int

    with pytest.raises(TypeError, match="Height lacks y"):
        Height()  # type: ignore[call-arg]


def test_a_record_cannot_be_changed() -> None:
    point = Point(1)

    with pytest.raises(AttributeError, match="Point is immutable"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(AttributeError, match="Point is immutable"):
        del point.x


def test_match_takes_it_apart_by_position() -> None:
    match Point(3, 4):
        case Point(x, 4):
            assert x == 3
        case _:
            pytest.fail("no match")


def test_wrong_fields_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="Point lacks x"):
        Point()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Point has no field z"):
        Point(1, z=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Point has 2 fields, 3 were given"):
        Point(1, 2, 3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Point was given x twice"):
        Point(1, x=2)  # type: ignore[misc]


def test_it_is_copied_pickled_and_shown_by_value() -> None:
    point = Point(1, 2)

    assert copy.deepcopy(point) == point
    assert pickle.loads(pickle.dumps(point)) == point
    assert repr(point) == "Point(x=1, y=2)"


def test_a_record_with_other_values_is_a_new_one() -> None:
    point = Point(1, 2)
    assert point.replace(y=3) == Point(1, 3) and point == Point(1, 2)
    assert point.replace() == point
    with pytest.raises(TypeError, match="Point has no field z"):
        point.replace(z=1)
