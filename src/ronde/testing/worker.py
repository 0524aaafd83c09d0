"""One rank of `ronde.testing.ranks`: imports the function, calls it, and sends the result.

The process that started the rank made `connection` and holds its other end, so pickles travel only between processes
that trust each other.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NoReturn

from ronde.errors import UsageError

__all__ = ["FunctionRaised", "Returned", "ToldValue", "run_script", "tell"]

PR_SET_PDEATHSIG = 1


class _ThisRank:
    """This process, if it is a rank."""

    connection: Connection[Any, Any] | None = None
    is_importing = False


@dataclass(frozen=True)
class ToldValue:
    """A value that the rank passed to `tell`."""

    value: Any


@dataclass(frozen=True)
class Returned:
    """The function's result."""

    value: Any


@dataclass(frozen=True)
class FunctionRaised:
    """The function's exception (None if it cannot be pickled), and its traceback as text."""

    error: BaseException | None
    traceback_text: str


def tell(value: object = None) -> None:
    """Send a value to the process that started this rank, which reads it by `Job.told(rank)`.

    Args:
        value: Any object that can be pickled (None).

    Raises:
        UsageError: This process is not a rank that `ronde.testing.ranks` has started.
    """
    if _ThisRank.connection is None:
        raise UsageError("tell() works only in a rank that ronde.testing.ranks has started")
    _ThisRank.connection.send(ToldValue(value))


def refuse_while_importing() -> None:
    """Raise UsageError in a rank that imports its program, where starting ranks would never end."""
    if _ThisRank.is_importing:
        raise UsageError(
            "a rank that imports the program would start ranks again: start them in a function, or below "
            "`if __name__ == '__main__':`"
        )


def run_script(path: str, *arguments: str) -> None:
    """Run a Python script as `python path arguments...` does; to be started on ranks. Exit code 0 counts as success.

        ranks.run(ranks.run_script, 2, "train.py", "--epochs", "3")

    Args:
        path: The path of the script.
        arguments: The words after it in the command line.

    Raises:
        SystemExit: The script exits with another code than 0.
        Exception: Any other exception of the script.
    """
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as exit:
        if exit.code:
            raise


def main(connection_fd: int, stacks_fd: int, parent_pid: int) -> None:
    """Serve as one rank, as the command line that `ranks.start` makes. A template's copy has no `parent_pid`."""
    if parent_pid:
        _die_with(parent_pid)
    for fd in (connection_fd, stacks_fd):
        os.set_inheritable(fd, False)  # their end of file must mean the end of this process
    faulthandler.enable(file=stacks_fd)
    # On this signal the rank writes its stacks and ends (the signal's default action): end of file on the
    # pipe tells the reader that the stacks are complete.
    faulthandler.register(signal.SIGUSR1, file=stacks_fd, all_threads=True, chain=True)
    # A copy, because the interpreter closes its own connection before the process has ended.
    _ThisRank.connection = Connection(os.dup(connection_fd))
    code = _serve(_ThisRank.connection)
    if not parent_pid:
        _end_copy(code)
    sys.exit(code)


def _end_copy(code: int) -> NoReturn:
    """End as the interpreter does, but leave the modules as they are.

    To take them apart is most of a copy's cost: it touches each page that the copy shares with its template.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(connection: Connection[Any, Any]) -> int:
    answer: Returned | FunctionRaised
    try:
        # The module comes first, because the arguments may be instances of its classes.
        _ThisRank.is_importing = True
        module = _import(*connection.recv())
        _ThisRank.is_importing = False
        qualname, arguments = connection.recv()
        answer = Returned(_attribute(module, qualname)(*arguments))
    except BaseException as error:  # includes SystemExit and KeyboardInterrupt
        answer = FunctionRaised(_picklable(error), traceback.format_exc())
    try:
        connection.send(answer)
    except BrokenPipeError:
        return 1  # the reader is gone
    except Exception as error:
        answer = FunctionRaised(_picklable(error), "the result cannot be pickled: " + traceback.format_exc())
        connection.send(answer)
    return 0 if isinstance(answer, Returned) else 1


def _import(name: str, file: str | None) -> ModuleType:
    """Import the module by its name or else (a test file, a script) from its file."""
    if name != "__main__":
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if file is None or not (error.name and (name == error.name or name.startswith(error.name + "."))):
                raise
    else:
        name = "__ronde_main__"
    if file is None:
        raise UsageError("the function's module has no file from which a rank could import it")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file that a rank could import")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, qualname: str) -> Callable[..., Any]:
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _picklable(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _die_with(parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(1)
