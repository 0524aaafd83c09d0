"""Python functions as workers: `ronde.run(fn, np=4)`, from a script or a notebook.

The launcher's agent starts processes (`callable_worker.py`) that unpickle the function and its arguments and call it.
It supervises them like other workers. A function in a notebook's main module, or within another function, needs
cloudpickle; without it, another process must be able to import the function, as with multiprocessing.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.spawn import get_preparation_data
from typing import Any, Generic, ParamSpec, TypeVar

from ronde.core.rendezvous.membership import Failure
from ronde.environment import environment as own_environment
from ronde.errors import RemoteError, UsageError
from ronde.launch.agent.agent import RunResult, run_agent
from ronde.launch.config import LaunchConfig, WorkerSpec
from ronde.launch.plan import INDEX_MACRO
from ronde.launch.templates.preload import LATER, WORTH_IT

__all__ = ["ElasticLaunch", "run"]

P = ParamSpec("P")
R = TypeVar("R")

_PROGRAM = os.path.join(os.path.dirname(__file__), "callable_worker.py")
_LIKE_THE_CALLER = ("sys_path", "sys_argv", "dir", "orig_dir")
_MAIN_MODULE = ("init_main_from_name", "init_main_from_path")
_SIGNALS = {128 + signum: signum for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
INTERRUPTED = 128 + signal.SIGINT

is_preparing = False  # whether this is a worker that imports the caller's main module


def run(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    *,
    environment: Mapping[str, str] | None = None,
    start_method: str = "spawn",
) -> list[R]:
    """Call `fn(*args, **kwargs)` in `np` new processes, the ranks of a job, and return a list of their results by rank.

        results = ronde.run(train, (10,), np=4)

    Output of the ranks appears here, prefixed by the rank. Ctrl-C ends all of them.

    Args:
        fn: a function of a module; with cloudpickle installed, any function.
        args: positional arguments, the same for all ranks (default: none).
        kwargs: keyword arguments, the same for all ranks (default: none).
        np: the number of processes (default: 1).
        environment: variables for the processes, which override this process's, except those of rank and size.
        start_method: "spawn" starts new processes; "forkserver" forks them from one process that has imported the large
            modules of this one (default: "spawn").

    Raises:
        RemoteError: a rank failed: `.rank`, `.traceback_text`, `.exit_codes`. All ranks have ended.
        UsageError: an argument is invalid, or the function cannot be sent to other processes.
    """
    if np < 1:
        raise UsageError(f"ronde.run(np={np}) is invalid: expected a whole number above 0")
    worker = WorkerSpec(argv=(), slots=np, environment=environment or {})
    launch = ElasticLaunch(LaunchConfig(worker), fn, start_method=start_method)
    results = launch._call(args, kwargs or {})
    return [results[rank] for rank in sorted(results)]


class ElasticLaunch(Generic[P, R]):
    """Calls a function in the workers of a job that `config` describes, as torch's `elastic_launch` does.

    `ElasticLaunch(config, fn)(*args)` returns the results of this node's workers by rank. The command in `config` is
    not used. `python` runs the workers that are spawned, instead of the caller's own. Raises as `run`.
    """

    def __init__(
        self,
        config: LaunchConfig,
        fn: Callable[P, R],
        *,
        start_method: str = "spawn",
        python: str | None = None,
    ) -> None:
        if not callable(fn):
            raise UsageError(f"{fn!r} is not callable: to run a command, use ronde.cli.main(['run', ...])")
        if config.worker.slots < 1:
            raise UsageError(f"{config.worker.slots} workers requested: expected at least 1")
        if start_method not in ("spawn", "forkserver"):
            raise UsageError(
                f"start_method={start_method!r} is invalid: expected 'spawn' or 'forkserver' ('fork' would "
                "copy the locks and open connections of this process)"
            )
        self._config = config
        self._fn = fn
        self._start_method = start_method
        self._python = python or sys.executable

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> dict[int, R]:
        """Run the job; return the results by rank."""
        return self._call(args, kwargs)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, R]:
        if is_preparing:
            raise UsageError(
                "a worker imports this script, and so would start workers of its own: call ronde.run() under "
                '`if __name__ == "__main__":`, or install cloudpickle'
            )
        if not self._python:
            raise UsageError("there is no Python to run workers with: sys.executable is empty")
        packed = _pack(self._fn, args, kwargs)
        with ExitStack() as stack:
            call, *results = (_memory_file(stack) for _ in range(1 + self._config.worker.slots))
            with open(call, "wb", closefd=False) as file:
                file.write(packed)
            del packed
            argv = (self._python, _PROGRAM, str(call), ",".join(map(str, results)), INDEX_MACRO)
            worker = replace(self._config.worker, argv=argv, fork=self._start_method == "forkserver")
            if worker.preload is None:
                worker = replace(worker, preload=_loaded_here())
            result = run_agent(
                replace(self._config, worker=worker), own_environment(), keep=(call, *results), report=False
            )
            if result.exit_code == 0:
                return {rank: _result(fd, rank) for rank, fd in zip(sorted(result.returncodes), results)}
            _raise(result, results)
            raise AssertionError  # not reached


def _loaded_here() -> tuple[str, ...]:
    """Return the modules for a template: those that `callable_worker.py` needs and those that the function may use."""
    return ("multiprocessing.spawn", __name__, *(name for name in (*WORTH_IT, *LATER) if name in sys.modules))


def pickler() -> Any:
    """Return cloudpickle if it is installed, else pickle."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def _pack(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return the call as `callable_worker.py` reads it. Raises UsageError if it cannot be sent."""
    name = getattr(fn, "__qualname__", repr(fn))
    pickles = pickler()
    data = get_preparation_data("worker")
    preparation = {key: data[key] for key in _LIKE_THE_CALLER if key in data}
    main = {key: data[key] for key in _MAIN_MODULE if key in data}
    # In a child of multiprocessing, and in a worker, the main module has another name, which cloudpickle uses, too.
    is_imported = getattr(sys.modules.get("__main__"), "__name__", "") == "__mp_main__"
    advice = (
        ""
        if pickles is not pickle
        else "; with cloudpickle installed (pip install 'ronde[notebook]') any function can"
    )
    if is_imported:
        preparation |= main
    elif pickles is pickle and getattr(fn, "__module__", "") == "__main__":
        if not main:
            raise UsageError(
                f"{name} cannot be sent to workers: it is not in a file that they could import{advice}"
            )
        preparation |= main
    try:
        call = pickles.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise UsageError(f"{name} and its arguments cannot be sent to workers: {problem}{advice}") from None
    packed: bytes = pickle.dumps(preparation) + pickle.dumps(call)
    return packed


def _memory_file(stack: ExitStack) -> int:
    fd = os.memfd_create("ronde", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _read(fd: int) -> tuple[bytes, Callable[[], Any]]:
    """Return the letter of a result, and the function that loads the rest."""
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read(1), partial(_load, fd)


def _load(fd: int) -> Any:
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        file.seek(1)
        return pickle.load(file)


def _result(fd: int, rank: int) -> Any:
    kind, load = _read(fd)
    if kind != b"R":
        raise RemoteError(f"rank {rank} ended without a result: the function must return, not exit", rank)
    try:
        return load()
    except Exception as error:
        raise RemoteError(
            f"the result of rank {rank} cannot be read here: {type(error).__name__}: {error}", rank
        ) from error


def _raise(result: RunResult, fds: Sequence[int]) -> None:
    """Raise the exception that a failed job means for the caller."""
    failure = next(iter(result.failures.values()), None)
    if failure is not None:
        raise _remote_error(result, failure, fds)
    if result.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    if result.exit_code in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[result.exit_code])  # as if the signal had come to this process
    raise RemoteError(result.reason)


def _remote_error(result: RunResult, failure: Failure, fds: Sequence[int]) -> RemoteError:
    message, text = failure.message, failure.details
    ours = dict(zip(sorted(result.returncodes), fds))
    if failure.rank in ours:
        kind, load = _read(ours[failure.rank])
        if kind == b"E" and failure.exit_code == 1:
            exception, text = load()
            message = f"rank {failure.rank} (pid {failure.pid}) failed: {exception}"
    codes = {rank: each.exit_code for rank, each in result.failures.items()}
    return RemoteError(f"{message}\n\n{text.rstrip()}" if text else message, failure.rank, text, codes)
