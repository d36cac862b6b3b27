"""Immutable values that are cheap to define: events, actions and messages of cores and shells.

A frozen dataclass of the standard library takes half a millisecond to define, because its methods are generated and
compiled one by one.  There are about 150 such classes, and the command's first worker waits for them.  A `Record` is
defined in 10 µs.  In everything else that matters here it is a frozen dataclass: fields by position or by name,
defaults, equality by value, and `match` by position.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self, dataclass_transform


@dataclass_transform(frozen_default=True)
class Record:
    """The base of an immutable value.  The annotations of a subclass are its fields."""

    __match_args__: ClassVar[tuple[str, ...]] = ()
    _names: ClassVar[frozenset[str]] = frozenset()
    required: ClassVar[frozenset[str]] = frozenset()
    defaults: ClassVar[dict[str, Any]] = {}

    # A leader makes, sends and reads tens of thousands of these in a second.  So an instance has only the fields that
    # it was given; a default is an attribute of the class.

    def __init_subclass__(cls) -> None:
        cls.__match_args__ = tuple(cls.__annotations__)  # type: ignore[misc]
        cls._names = frozenset(cls.__match_args__)
        cls.defaults = {name: getattr(cls, name) for name in cls.__match_args__ if hasattr(cls, name)}
        cls.required = cls._names - cls.defaults.keys()

    def __init__(self, *args: Any, **fields: Any) -> None:
        names, values = self.__match_args__, self.__dict__
        values.update(zip(names, args))  # noqa: B905  a keyword would take a quarter of the time again
        if not fields:  # fields without a default come first, so it is enough to count
            is_wrong = not len(self.required) <= len(args) <= len(names)
        else:
            values.update(fields)
            is_wrong = len(values) < len(args) + len(fields) or not self._names.issuperset(fields)
            is_wrong = is_wrong or not self.required <= values.keys()
        if is_wrong:
            self._refuse_wrong(args, fields)

    def _refuse_wrong(self, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        names, cls = self.__match_args__, type(self)
        if len(args) > len(names):
            raise TypeError(f"{cls.__name__} has {len(names)} fields, {len(args)} were given")
        if args and (twice := fields.keys() & set(names[: len(args)])):
            raise TypeError(f"{cls.__name__} was given {', '.join(sorted(twice))} twice")
        if strange := fields.keys() - self._names:
            raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(strange))}")
        if missing := [name for name in names if name not in self.__dict__ and name in self.required]:
            raise TypeError(f"{cls.__name__} lacks {', '.join(missing)}")

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Self:
        """Returns a value with these fields; missing ones have their defaults."""
        value = object.__new__(cls)
        value.__dict__.update(fields)
        return value

    @property
    def given(self) -> dict[str, Any]:
        """The fields that this value was given, without those that have their defaults; not to be changed."""
        return self.__dict__

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with other values in some fields."""
        if not self._names.issuperset(changes):
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(changes.keys() - self._names))}")
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **changes)
        return other

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False
        mine, its = self.__dict__, other.__dict__
        if mine.keys() == its.keys():
            return mine == its
        return self.defaults | mine == self.defaults | its

    def __hash__(self) -> int:
        return hash((type(self), *[getattr(self, name) for name in self.__match_args__]))

    def __repr__(self) -> str:
        values, defaults = self.__dict__, self.defaults
        given = [name for name in self.__match_args__ if name in values]
        shown = [name for name in given if name not in defaults or values[name] != defaults[name]]
        return f"{type(self).__name__}({', '.join(f'{name}={values[name]!r}' for name in shown)})"
