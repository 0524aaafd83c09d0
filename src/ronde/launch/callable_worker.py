"""A program, not a module: one worker that calls a Python function and stores its result.

    python callable_worker.py CALL_FD RESULT_FD[,RESULT_FD]... INDEX

The descriptors are memory files (memfd) that `ronde.launch.calls` creates, one for the call and one for the result
of each of its workers, of which this is number INDEX. They hold values of any size, need no reader while the other side
writes, and vanish with the last process that has them open.

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


def main(words: list[str]) -> int:
    """Do the call and return the exit code."""
    atexit.register(shorten_end)
    result_fds = [int(word) for word in words[1].split(",")]
    result_fd = result_fds.pop(int(words[2]))
    for fd in result_fds:
        os.close(fd)
    os.set_inheritable(result_fd, False)
    os.ftruncate(result_fd, 0)  # an earlier attempt may have failed
    os.lseek(result_fd, 0, os.SEEK_SET)
    try:
        result = call(int(words[0]))
    except Exception as error:
        # The frames above are Ronde's.
        ours = error.__traceback__
        failed(result_fd, error.with_traceback(ours and ours.tb_next and ours.tb_next.tb_next))
        return 1
    try:
        write(result_fd, b"R", pickler().dumps(result))
    except Exception as error:
        from ronde.launch.calls import describe_unsendable_part

        where = f"the result, of type {type(result).__qualname__}, cannot be sent to the caller: "
        part = describe_unsendable_part("the result", result, pickler().dumps)
        failed(result_fd, TypeError(f"{where}{type(error).__name__}: {error}{part}"))
        return 1
    return 0


def call(fd: int) -> Any:
    """Return what the function returns."""
    with open(f"/proc/self/fd/{fd}", "rb") as file:  # a separate file offset: all workers read this
        os.close(fd)
        preparation, packed = pickle.load(file), pickle.load(file)
    if preparation:  # the caller is on this machine
        sys.path[:] = preparation["sys_path"]
        prepare(preparation)
    else:
        forget_program()
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


def failed(fd: int, error: Exception) -> None:
    """Report the exception to the caller, to the launcher and on stderr."""
    from ronde.process.exceptions import described, exception_text
    from ronde.process.uncaught import announce_exception

    text = exception_text(error)
    sys.stderr.write(text)
    write(fd, b"E", pickle.dumps((described(error), text)))
    announce_exception(error)


def shorten_end() -> None:
    """Spare the interpreter's end its searches for garbage in all that modules hold, a tenth of a short worker's time.

    As the last function at exit, after threads have ended, it collects what they and the call have left.
    """
    gc.collect()
    gc.freeze()


def write(fd: int, kind: bytes, data: bytes) -> None:
    """Write the result into the memory file."""
    with open(fd, "wb", closefd=False) as file:
        file.write(kind)
        file.write(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
