"""Names of `typing` for modules that the launcher loads: the standard module would delay each start by 3 ms.

Type checkers see the standard names. At run time, named tuples are real ones, and the other names only stand in
annotations, aliases and lists of bases. These do not work at run time:
  - `isinstance` and `issubclass` with a protocol;
  - `X | None` of one of these names outside an annotation;
  - the values of a `Literal`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for true
if TYPE_CHECKING:
    from typing import (
        IO,
        Any,
        ClassVar,
        Generic,
        Literal,
        NamedTuple,
        NoReturn,
        Protocol,
        TextIO,
        TypedDict,
        TypeVar,
    )
else:
    from collections import namedtuple

    class Generic:
        """A base that takes parameters: `class Queue(Generic[Item])`, `Queue[int]()`."""

        __slots__ = ()

        def __class_getitem__(cls, item):
            return cls

    class Any(Generic):
        """Stands for `typing.Any` in annotations."""

    class IO(Generic):
        """Stands for `typing.IO` in annotations."""

    class TextIO(Generic):
        """Stands for `typing.TextIO` in annotations."""

    class ClassVar(Generic):
        """Stands for `typing.ClassVar` in annotations."""

    class Literal(Generic):
        """Stands for `typing.Literal` in annotations."""

    class NoReturn(Generic):
        """Stands for `typing.NoReturn` in annotations."""

    class Protocol(Generic):
        """The base of interfaces; it checks nothing at run time."""

        __slots__ = ()

    class TypedDict(dict):
        """A base for types of dictionaries."""

    class TypeVar:
        """A parameter of a type."""

        def __init__(self, name):
            self.__name__ = name

    class _TupleMaker(type):
        """Makes a subclass of a named tuple, with defaults, of a class that lists fields."""

        def __new__(meta, name, bases, body):
            if not bases:
                return super().__new__(meta, name, bases, body)
            fields = body.get("__annotations__", {})
            if not fields:
                remedy = "annotate them, and begin the module with `from __future__ import annotations`"
                raise TypeError(f"no fields found in the named tuple {name}: {remedy}")
            has_default = [field in body for field in fields]
            if has_default != sorted(has_default):
                raise TypeError(f"a field of {name} without a default follows one with a default")
            defaults = [body.pop(field) for field in fields if field in body]
            base = namedtuple(name, fields, defaults=defaults, module=body["__module__"])
            return type(name, (base,), {"__slots__": (), **body})

    class NamedTuple(metaclass=_TupleMaker):
        """A base for named tuples."""


__all__ = [
    "IO", "TYPE_CHECKING", "Any", "ClassVar", "Generic", "Literal", "NamedTuple", "NoReturn", "Protocol", "TextIO",
    "TypeVar", "TypedDict",
]  # fmt: skip
