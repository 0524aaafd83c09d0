"""Dataclasses that are defined quickly, for modules that the launcher loads: each millisecond delays the start of a
job.

The standard module generates and compiles source code for each class, some 0.3 ms for each, and loads the compiler's
tools for it. These dataclasses use closures instead. Type checkers see the standard ones, and `fields`, `asdict` and
others accept them. They have no order and no real slots (`slots=True` is accepted). Instances are made about as fast.
"""

from __future__ import annotations

from ronde.light_typing import TYPE_CHECKING, Any

__all__ = ["dataclass", "field", "replace"]

if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
else:

    class _Field:
        """The options of a field."""

        def __init__(self, default, default_factory, repr, compare):
            self.default, self.default_factory = default, default_factory
            self.repr, self.compare = repr, compare

    _MISSING = object()

    def field(*, default=_MISSING, default_factory=None, repr=True, compare=True):
        return _Field(default, default_factory, repr, compare)

    def replace(record, /, **changes):
        return type(record)(**{**record.__dict__, **changes})

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True):
        if cls is None:
            return lambda cls: _define(cls, frozen, eq)
        return _define(cls, frozen, eq)

    class _StandardFields:
        """The standard module's description of the fields, made when its functions ask for it."""

        def __get__(self, instance, cls):
            import dataclasses

            body = {"__annotations__": dict.fromkeys(cls.__match_args__, Any)}
            for base in reversed(cls.__mro__):
                notes = getattr(base, "__annotations__", {})
                body["__annotations__"] |= {name: notes[name] for name in notes if name in cls.__match_args__}
            for name, each in cls.__record__.items():
                if each.default_factory is not None:
                    body[name] = dataclasses.field(default_factory=each.default_factory, repr=each.repr)
                elif each.default is not _MISSING:
                    body[name] = dataclasses.field(default=each.default, repr=each.repr)
            cls.__dataclass_fields__ = dataclasses.dataclass(
                type(cls.__name__, (), body)
            ).__dataclass_fields__
            return cls.__dataclass_fields__

    def _define(cls, frozen, eq):
        known = {}
        for base in reversed(cls.__mro__[1:]):
            known |= base.__dict__.get("__record__", {})
        for name, note in getattr(cls, "__annotations__", {}).items():
            if not str(note).startswith("ClassVar"):
                given = cls.__dict__.get(name, _MISSING)
                known[name] = given if isinstance(given, _Field) else _Field(given, None, True, True)
                if isinstance(given, _Field):
                    if given.default is _MISSING:
                        delattr(cls, name)
                    else:
                        setattr(cls, name, given.default)
        cls.__record__ = known
        cls.__match_args__ = tuple(known)
        cls.__dataclass_fields__ = _StandardFields()
        cls.__init__ = _initializer(cls.__qualname__, known, hasattr(cls, "__post_init__"))
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = _represent
        if eq:
            _compare_by(cls, [name for name, each in known.items() if each.compare], frozen)
        if frozen:
            cls.__setattr__, cls.__delattr__ = _refuse, _refuse
        return cls

    def _initializer(qualname, known, has_more):
        names = tuple(known)
        count = len(names)
        values = {name: each.default for name, each in known.items() if each.default is not _MISSING}
        factories = {name: each.default_factory for name, each in known.items() if each.default_factory}
        optional = values.keys() | factories.keys()

        def initialize(self, *args, **kwargs):
            state = self.__dict__
            if len(args) != count or kwargs:
                check(args, kwargs)
                state.update(values)
                for name, factory in factories.items():
                    if name not in kwargs:
                        state[name] = factory()
            state.update(zip(names, args))
            state.update(kwargs)
            if has_more:
                self.__post_init__()

        def check(args, kwargs):
            positional = names[: len(args)]
            wrong = [name for name in kwargs if name not in known or name in positional]
            missing = [name for name in names[len(args) :] if name not in kwargs and name not in optional]
            if len(args) > count or wrong or missing:
                problem = (
                    f"has no field, or has twice: {', '.join(wrong)}" if wrong else "gets too many values"
                )
                problem = f"lacks {', '.join(missing)}" if missing else problem
                raise TypeError(f"{qualname}() {problem}")

        return initialize

    def _represent(self):
        shown = (name for name, each in self.__record__.items() if each.repr)
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _compare_by(cls, names, frozen):
        def equals(self, other):
            if other.__class__ is not self.__class__:
                return NotImplemented
            mine, others = self.__dict__, other.__dict__
            return mine is others or all(mine[name] == others[name] for name in names)

        def hashed(self):
            state = self.__dict__
            return hash(tuple([state[name] for name in names]))

        if "__eq__" not in cls.__dict__:
            cls.__eq__ = equals
        if "__hash__" not in cls.__dict__ or cls.__dict__["__hash__"] is None:
            cls.__hash__ = hashed if frozen else None

    def _refuse(self, name, value=None):
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")
