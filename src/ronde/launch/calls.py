"""A call of a Python function in the workers of an agent: how it gets there, and how the results come back.

The call and each result lie in memory files (memfd) that the workers inherit (`callable_worker.py` says in which form).
A function in a notebook's main module, or within another function, needs cloudpickle; without it, another process must
be able to import the function, as with multiprocessing.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, BinaryIO

from ronde.errors import UsageError, WorkerError
from ronde.launch.plan import INDEX_MACRO
from ronde.rendezvous.membership import Failure

__all__ = ["CallFiles", "check_arguments", "load_result", "pack_call", "pickler", "worker_error"]

_PROGRAM = os.path.join(os.path.dirname(__file__), "callable_worker.py")
_LIKE_THE_CALLER = ("sys_path", "sys_argv", "dir", "orig_dir")
MAIN = b"__main__"
MOST_SHOWN = 60  # characters of an invalid argument
_MAIN_MODULE = ("init_main_from_name", "init_main_from_path")


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
        return python, _PROGRAM, str(self._call), ",".join(map(str, self._results)), INDEX_MACRO

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
        from ronde.launch.unsendable import describe_unsendable  # which only this needs

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
        raise WorkerError(f"rank {rank} ended without a result: the function must return, not exit", rank)
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
