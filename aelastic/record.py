"""Immutable values that cost nothing to define: the words that cores and shells exchange.

A frozen dataclass of the standard library takes half a millisecond to define, because its methods are
generated and compiled one by one.  There are some thirty such words, and the command's first worker
waits for them.  A `Record` is defined in 10 µs; in all else that matters here it is a frozen dataclass: by
position or by name, with defaults, equal by value, `match` by position.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, dataclass_transform


@dataclass_transform(frozen_default=True)
class Record:
    """Base of an immutable value; the annotations of a class that derives from it are its fields."""

    __match_args__: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.__match_args__ = tuple(cls.__annotations__)  # type: ignore[misc]

    def __init__(self, *args: Any, **fields: Any) -> None:
        names = self.__match_args__
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} has {len(names)} fields, {len(args)} were given")
        fields = {**dict(zip(names, args, strict=False)), **fields}
        if missing := [name for name in names if name not in fields and not hasattr(type(self), name)]:
            raise TypeError(f"{type(self).__name__} lacks {', '.join(missing)}")
        if unknown := fields.keys() - set(names):
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        for name in names:
            self.__dict__[name] = fields[name] if name in fields else getattr(type(self), name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"
