"""Finds what keeps a function and its arguments from being pickled, to name it in an error."""

from __future__ import annotations

import dis
import pickle
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = ["describe_unsendable", "describe_unsendable_part"]

MOST_DEPTH = 8

# By the package and the name of a class: what to do instead.
_ROWS = (
    "pass the rows as data, as in ronde.comqueue.iterate(step, data=ronde.comqueue.read({name}), ...), or write them "
    "to files that the function reads"
)
_SESSION = "do not use it in the function: its workers run outside of {platform}'s session"
_REMEDIES = {
    ("pyspark", "DataFrame"): _ROWS,
    ("pyspark", "RDD"): "write its rows to files that the function reads",
    ("pyspark", "SparkContext"): _SESSION.format(platform="Spark"),
    ("pyspark", "SparkSession"): _SESSION.format(platform="Spark"),
    ("pyflink", "Table"): _ROWS,
    ("pyflink", "StreamExecutionEnvironment"): _SESSION.format(platform="Flink"),
    ("pyflink", "StreamTableEnvironment"): _SESSION.format(platform="Flink"),
}


@dataclass(frozen=True)
class Unsendable:
    """An object that cannot be pickled. `where`: its place, such as "the variable 'frame' of train"."""

    where: str
    name: str
    value: Any

    def __str__(self) -> str:
        kind = type(self.value)
        return f"{self.where} is of type {kind.__module__}.{kind.__qualname__}"

    def remedy(self) -> str:
        """Return what to do instead, for an object of a platform; "" for others."""
        for base in type(self.value).__mro__:  # the classes of Spark differ between Spark and Spark Connect
            key = (base.__module__.partition(".")[0], base.__name__)
            if key in _REMEDIES:
                return _REMEDIES[key].format(name=self.name)
        return ""


def describe_unsendable(
    error: Exception,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dumps: Callable[[Any], bytes],
) -> str:
    """Return why a call cannot be pickled, and what to do, as the end of a sentence. `error`: the one of `dumps`."""
    problem = f"{type(error).__name__}: {error}"
    try:
        found = _find_unsendable(fn, args, kwargs, dumps)
        remedy = found.remedy() if found else ""
    except Exception:  # of the user's objects: reading their attributes may run any code
        return problem
    if found is None or isinstance(found.value, types.FunctionType):
        return problem  # which names the function
    if remedy:
        return f"{found}, which exists only in this process; {remedy}"
    return f"{problem}; {found}: create it in the function"


def describe_unsendable_part(name: str, value: Any, dumps: Callable[[Any], bytes]) -> str:
    """Return which part of an object cannot be pickled, as the end of a sentence; "" if that is not to be found.

    `name`: what the object is called, such as "the result".
    """
    try:
        found = _search(Unsendable(name, "data", value), dumps, set(), MOST_DEPTH)
    except Exception:  # of the user's objects: reading their attributes may run any code
        return ""
    return f"; {found}" if found is not None and found.where != name else ""


def _find_unsendable(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], dumps: Callable[[Any], bytes]
) -> Unsendable | None:
    """Return the innermost object that cannot be pickled; None if each by itself can be."""
    named = [("the function", "fn", fn)]
    named += [(f"argument {number}", "data", value) for number, value in enumerate(args, 1)]
    named += [(f"the argument {name!r}", name, value) for name, value in kwargs.items()]
    seen: set[int] = set()
    for where, name, value in named:
        if found := _search(Unsendable(where, name, value), dumps, seen, MOST_DEPTH):
            return found
    return None


def _search(
    found: Unsendable, dumps: Callable[[Any], bytes], seen: set[int], depth: int
) -> Unsendable | None:
    value = found.value
    if depth == 0 or id(value) in seen or _can_be_sent(value, dumps):
        return None
    seen.add(id(value))
    if not found.remedy() and not _is_sent_by_name(value, dumps):
        for part in _parts(found):
            if inner := _search(part, dumps, seen, depth - 1):
                return inner
    return found


def _can_be_sent(value: Any, dumps: Callable[[Any], bytes]) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


def _is_sent_by_name(value: Any, dumps: Callable[[Any], bytes]) -> bool:
    """Return whether the receiver imports the object, so that nothing in it is sent."""
    by_name = types.ModuleType | types.FunctionType if dumps is pickle.dumps else types.ModuleType
    return isinstance(value, by_name)


def _parts(whole: Unsendable) -> Iterator[Unsendable]:
    """Yield what a function refers to, the items of a container, or the attributes of an object."""
    value, where = whole.value, whole.where
    if isinstance(value, partial):
        yield Unsendable(where, whole.name, value.func)
        for number, argument in enumerate(value.args, 1):
            yield Unsendable(f"argument {number} of {where}", "data", argument)
        for name, argument in value.keywords.items():
            yield Unsendable(f"the argument {name!r} of {where}", name, argument)
    elif isinstance(value, types.MethodType):
        yield Unsendable(f"the object of the method {value.__qualname__}", "data", value.__self__)
    elif isinstance(value, types.FunctionType):
        for name, variable in _variables(value):
            yield Unsendable(f"the variable {name!r} of {value.__qualname__}", name, variable)
    elif isinstance(value, Mapping):
        for key, item in list(value.items()):
            yield Unsendable(f"item {key!r} of {where}", "data", item)
    elif isinstance(value, list | tuple | set | frozenset):
        for number, item in enumerate(tuple(value)):
            yield Unsendable(f"item {number} of {where}", "data", item)
    else:
        for name, attribute in list(getattr(value, "__dict__", {}).items()):
            yield Unsendable(f"the attribute {name!r} of {where}", name, attribute)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the variables of a function that are defined outside of it, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    code = function.__code__
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults)
    yield from (function.__kwdefaults__ or {}).items()


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the global variables that the code reads; `co_names` has those of attributes, too."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
