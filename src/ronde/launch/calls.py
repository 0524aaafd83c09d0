"""A call of a Python function in the workers of an agent: how it gets there, and how the results come back.

The call and each result lie in memory files (memfd) that the workers inherit (`callable_worker.py` says in which form).
A function in a notebook's main module, or within another function, needs cloudpickle; without it, another process must
be able to import the function, as with multiprocessing. If a function, an argument or a result cannot be pickled,
`describe_unsendable` finds the part that prevents it, to name it in the error.
"""

from __future__ import annotations

import dis
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from ronde.errors import UsageError, WorkerError
from ronde.rendezvous.membership import Failure

__all__ = [
    "CallFiles",
    "check_arguments",
    "describe_unsendable",
    "describe_unsendable_part",
    "load_result",
    "pack_call",
    "pickler",
    "worker_error",
]

_PROGRAM = os.path.join(os.path.dirname(__file__), "callable_worker.py")
_LIKE_THE_CALLER = ("sys_path", "sys_argv", "dir", "orig_dir")
MAIN = b"__main__"
MOST_SHOWN = 60  # characters of an invalid argument
_MAIN_MODULE = ("init_main_from_name", "init_main_from_path")

is_preparing = False  # whether this is a worker that imports the caller's main module


class CallFiles:
    """The memory files of a call and of its results, one for each worker of the agent; the stack closes them.

    `fds`: those that the workers inherit. `packed`: the bytes of `pack_call`.
    """

    def __init__(self, stack: ExitStack, packed: Iterable[bytes], workers: int) -> None:
        self._call, *self._results = self.fds = [_memory_file(stack) for _ in range(1 + workers)]
        with open(self._call, "wb", closefd=False) as file:
            file.writelines(packed)

    def command(self, python: str) -> tuple[str, ...]:
        """Return the command of the workers."""
        return python, _PROGRAM, str(self._call), ",".join(map(str, self._results))

    def open_result(self, worker: int) -> BinaryIO:
        """Return the file with the result of a worker, counted from 0 within the agent; empty if it left none."""
        return open(f"/proc/self/fd/{self._results[worker]}", "rb")


def pickler() -> Any:
    """Return cloudpickle if it is installed, else pickle."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def check_arguments(function: str, args: object, kwargs: object) -> None:
    """Raise UsageError unless these are the arguments of a call: several by place, and a dictionary by name."""
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
        given = _beginning(repr(args))
        raise UsageError(
            f"args={given} is invalid: expected a tuple of the arguments of {function}, as ({given},) for one argument"
        )
    if not isinstance(kwargs, Mapping):
        raise UsageError(
            f"kwargs={_beginning(repr(kwargs))} is invalid: expected a dict of the arguments of {function} by name"
        )


def _beginning(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."


def pack_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_same_machine: bool = True
) -> bytes:
    """Return the call as `callable_worker.py` reads it. Raises UsageError if it cannot be sent.

    `is_same_machine`: the workers find the caller's files, so they get its module path and its main module.
    """
    from multiprocessing.spawn import get_preparation_data  # slow to load, and agents do not need it

    name = getattr(fn, "__qualname__", repr(fn))
    check_arguments(name, args, kwargs)
    pickles = pickler()
    data = get_preparation_data("worker") if is_same_machine else {}
    preparation = {key: data[key] for key in _LIKE_THE_CALLER if key in data}
    main = {key: data[key] for key in _MAIN_MODULE if key in data}
    # In a child of multiprocessing, and in a worker, the main module has another name, which cloudpickle uses, too.
    is_imported = getattr(sys.modules.get("__main__"), "__name__", "") == "__mp_main__"
    advice = (
        ""
        if pickles is not pickle
        else "; with cloudpickle installed (pip install 'ronde[notebook]') any function can"
    )
    try:
        call = pickles.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        problem = describe_unsendable(error, fn, args, kwargs, pickles.dumps)
        raise UsageError(f"{name} and its arguments cannot be sent to workers: {problem}{advice}") from None
    # Of the function, or of a class or function among its arguments.
    needs_main = pickles is pickle and MAIN in call
    if needs_main and not main:
        raise UsageError(
            f"{name} cannot be sent to workers: it, or an argument, is not in a file that they could import{advice}"
        )
    if is_imported or needs_main:
        preparation |= main
    packed: bytes = pickle.dumps(preparation) + pickle.dumps(call)
    return packed


def load_result(file: BinaryIO, rank: int) -> Any:
    """Return the result of the worker of that rank. Raises WorkerError if it left none, or one that is unreadable."""
    if file.read(1) != b"R":
        raise WorkerError(
            f"rank {rank} ended without a result: the function must return, not exit; if a signal has killed the "
            "process after an elastic training, the output of the launcher says so",
            rank,
        )
    try:
        return pickle.load(file)
    except Exception as error:
        raise WorkerError(
            f"the result of rank {rank} cannot be read here: {type(error).__name__}: {error}", rank
        ) from error


def worker_error(
    failure: Failure,
    result: BinaryIO | None,
    exit_codes: Mapping[int, int] | None = None,
    place: str = "",
) -> WorkerError:
    """Return the error of a job that a worker's failure has ended. `place`: what its message says about the host.

    `result`: the file in which the worker has left its exception, if it has; None: there is no such file. A worker that
    is killed before it can write one has perhaps printed its traceback.
    """
    message = f"{failure.message}{place}"
    traceback = failure.details if failure.details.startswith("Traceback (") else ""
    if failure.exit_code == 1 and result is not None and (error := _read_error(result)):
        exception, traceback = error
        message = f"rank {failure.rank} (pid {failure.pid}){place} failed: {exception}"
    details = traceback or failure.details
    return WorkerError(
        f"{message}\n\n{details.rstrip()}" if details else message,
        rank=failure.rank,
        host=failure.host,
        exit_code=failure.exit_code,
        traceback_text=traceback,
        last_lines=failure.details.splitlines(),
        exit_codes=exit_codes,
    )


def _read_error(file: BinaryIO) -> tuple[str, str] | None:
    """Return the texts of the exception that ended a worker's call, and of its traceback; None if none did."""
    if file.read(1) != b"E":
        return None
    exception, text = pickle.load(file)
    return exception, text


def _memory_file(stack: ExitStack) -> int:
    fd = os.memfd_create("ronde", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


# Why something cannot be sent


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
    """Return the innermost object that cannot be pickled; None if each one alone can be."""
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
