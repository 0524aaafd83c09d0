"""A program, not a module: one worker that calls a Python function and stores its result.

    python callable_worker.py CALL_FD RESULT_FD[,RESULT_FD]...

The descriptors are memory files (memfd) that `ronde.launch.calls` creates, one for the call and one for the result
of each worker of an agent, in the order of their ranks. They hold values of any size, need no reader while the other
side writes, and vanish with the last process that has them open. A worker that outlives the loss of others may end
with another rank than its first one (`ronde.elastic`), so it looks for its file at the end.

CALL_FD holds two pickles. The first makes this process like the caller's (paths, the main module), and is empty if the
caller is on another machine; the second, kept as bytes until then, is the function with its arguments. The result is a
letter and a pickle: R and the result, or E and the texts of an exception and its traceback.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import sys
from typing import Any

PLACE = "HOROVOD_LOCAL_RANK"  # and not LOCAL_RANK, which --virtual-local-rank makes 0 for all


def main(words: list[str]) -> int:
    """Do the call and return the exit code."""
    atexit.register(shorten_end)
    files = ResultFiles(words[1])
    try:
        result = call(int(words[0]), files)
    except Exception as error:
        # The frames above are Ronde's.
        ours = error.__traceback__
        failed(files, error.with_traceback(ours and ours.tb_next and ours.tb_next.tb_next))
        return 1
    try:
        files.write(b"R", pickler().dumps(result))
    except Exception as error:
        from ronde.launch.calls import describe_unsendable_part

        where = f"the result, of type {type(result).__qualname__}, cannot be sent to the caller: "
        part = describe_unsendable_part("the result", result, pickler().dumps)
        failed(files, TypeError(f"{where}{type(error).__name__}: {error}{part}"))
        return 1
    return 0


class ResultFiles:
    """The files for the results of the agent's workers, of which this process writes one."""

    def __init__(self, word: str) -> None:
        self._fds = [int(fd) for fd in word.split(",")]
        self._place = 0
        for fd in self._fds:
            os.set_inheritable(fd, False)

    def _find(self) -> int:
        """Return the file of the present place among the agent's workers, even if the call has removed variables."""
        from ronde.environment import environment  # once the path is that of the caller

        self._place = int(environment().get(PLACE, self._place))
        return self._fds[
            self._place if len(self._fds) > 1 else 0
        ]  # agents with one worker each may share a host

    def clear(self) -> None:
        """Empty the file: an earlier attempt may have failed."""
        os.ftruncate(self._find(), 0)

    def write(self, kind: bytes, data: bytes) -> None:
        """Write the result."""
        with open(self._find(), "wb", closefd=False) as file:
            os.lseek(file.fileno(), 0, os.SEEK_SET)  # the workers share the offset
            os.ftruncate(file.fileno(), 0)
            file.write(kind)
            file.write(data)


def call(fd: int, files: ResultFiles) -> Any:
    """Return what the function returns."""
    with open(f"/proc/self/fd/{fd}", "rb") as file:  # a separate file offset: all workers read this
        os.close(fd)
        preparation, packed = pickle.load(file), pickle.load(file)
    if preparation:  # the caller is on this machine
        sys.path[:] = preparation["sys_path"]
        prepare(preparation)
    else:
        forget_program()
    from ronde.environment import environment

    if PLACE in environment():  # a spare worker has none yet
        files.clear()
    function, args, kwargs = pickle.loads(packed)
    del packed
    return function(*args, **kwargs)


def forget_program() -> None:
    """Remove from the path what this program's folder put there, whose modules could hide the user's, and its words."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if folder != here]
    del sys.argv[1:]


def prepare(preparation: dict[str, Any]) -> None:
    """Copy the caller's paths, and import its main module if the function needs it."""
    from multiprocessing import spawn

    from ronde.launch import calls  # and not `callables`, with which comes all that launches

    calls.is_preparing = True
    try:
        spawn.prepare(preparation)
    finally:
        calls.is_preparing = False


def pickler() -> Any:
    """Return the module that pickles results: cloudpickle, which knows a notebook's types, if it is installed."""
    from ronde.launch import calls

    return calls.pickler()


def failed(files: ResultFiles, error: Exception) -> None:
    """Report the exception to the caller, to the launcher and on stderr."""
    from ronde.process.exceptions import described, exception_text
    from ronde.process.uncaught import announce_exception

    text = exception_text(error)
    sys.stderr.write(text)
    files.write(b"E", pickle.dumps((described(error), text)))
    announce_exception(error)


def shorten_end() -> None:
    """Spare the interpreter's end its searches for garbage in all that modules hold, a tenth of a short worker's time.

    As the last function at exit, after threads have ended, it collects what they and the call have left.
    """
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
