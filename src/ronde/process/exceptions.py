"""The exception that ends a worker: its text, as workers print it and reports show it, and the file that carries it.

The text

1. An error of Ronde says in its message what is wrong, so the frames inside Ronde below the caller's line are left out.
   All other exceptions keep theirs, because one that is raised inside Ronde by mistake is found by them. Where Ronde
   calls the user's function, the frames before it are left out. The log level `debug` keeps all.
2. Its length is bounded: a long message, or a long line of source, loses its middle.
3. Leaving a debugger by `q` is no mistake of the program, so one sentence replaces the traceback.

The error file

A worker writes it, and its launcher reads it. The format is that of torch's `@record`, so either side may be torch's:

    {"message": {"message": "ValueError: ...", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "seconds"}}}

Ronde adds to `extraInfo` the time in nanoseconds, whether the exception is a consequence of a lost peer, and whether
the worker leaves its traceback to the report of the launcher.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ronde.errors import AbortedError, PeerLostError, RemoteError, RondeError
from ronde.trusted_files import create_anew, open_for_writing

if TYPE_CHECKING:
    from ronde.rendezvous.membership import Failure

__all__ = [
    "ERROR_FILE",
    "ErrorReport",
    "blames_peer",
    "described",
    "exception_text",
    "hand_up",
    "headline",
    "is_blame",
    "leave_to_report",
    "left_debugger",
    "read_error_file",
    "shortened",
    "shortened_lines",
    "shows_all_frames",
    "write_error_file",
]

MOST_OF_PART = 8 * 1024  # characters of one message, or of one frame
MOST_OF_TEXT = 64 * 1024
_HEADLINE = 300
_RONDE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the variable that names a worker's error file
MOST_BYTES = 64 << 20  # how much of an error file is read: torch's has the whole message, twice
_LEFT = "is_left_to_report"
_CONSEQUENCES = (PeerLostError, AbortedError, RemoteError)

# The beginning of a traceback's last line if the worker ended because of another one: in Ronde's words, or Gloo's.
# torch puts its own prefix before each line of a traceback.
_BLAME = (
    rb"(\[rank\d+\]: )?((ronde\.)?(errors\.)?(%s)\b"
    rb"|(\w+\.)*\w+Error: .*\bgloo\b.*(closed by peer|reset by peer|Broken pipe))"
    % b"|".join(error.__name__.encode() for error in _CONSEQUENCES)
)


# The text


def exception_text(error: BaseException) -> str:
    """Return what Python prints of an uncaught exception, by the rules above."""
    if sentence := left_debugger(error):
        return f"{sentence}\n"
    summary = traceback.TracebackException.from_exception(error, compact=True)
    if not shows_all_frames():
        _leave_out_inner_frames(summary, error)
    return shortened("".join(shortened(part) for part in summary.format()), MOST_OF_TEXT)


def headline(error: BaseException) -> str:
    """Return the type and the first line of the message, as in the last line of a traceback."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    # The lines before that of a SyntaxError show its place.
    name = type(error).__qualname__
    line = next((line for line in lines if line.partition(":")[0].endswith(name)), lines[0])
    return shortened(line, _HEADLINE)


def left_debugger(error: BaseException) -> str:
    """Return where the user has left the debugger, if this exception means that; else an empty text."""
    kind = type(error)
    if (kind.__module__, kind.__name__) != ("bdb", "BdbQuit"):
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_debugger(frame)]
    where = (
        f' at File "{frames[-1].filename}", line {frames[-1].lineno}, in {frames[-1].name}' if frames else ""
    )
    hint = "; it has no standard input: `ronde run` gives it to local rank 0 only" if _has_no_input() else ""
    return f"BdbQuit: the debugger was left{where}{hint}"


def _is_debugger(frame: traceback.FrameSummary) -> bool:
    return os.path.basename(frame.filename) in ("bdb.py", "pdb.py", "cmd.py")


def _has_no_input() -> bool:
    try:
        mine = os.fstat(0)
        return stat.S_ISCHR(mine.st_mode) and mine.st_rdev == os.stat(os.devnull).st_rdev
    except OSError:
        return True


def shortened(text: str, most: int = MOST_OF_PART) -> str:
    """Return the text. If it has more characters than `most`, its middle is replaced by how many were left out."""
    if len(text) <= most:
        return text
    head, tail = most * 3 // 4, most // 8
    return f"{text[:head]} ... ({len(text) - head - tail:,} characters left out) ... {text[-tail:]}"


def shortened_lines(text: str) -> str:
    """Return the text of an exception that another program has formatted, with shortened lines."""
    return shortened("\n".join(map(shortened, text.split("\n"))), MOST_OF_TEXT)


def shows_all_frames() -> bool:
    """Return whether the log level asks for all there is."""
    return logging.getLogger("ronde").isEnabledFor(logging.DEBUG)


def _leave_out_inner_frames(summary: traceback.TracebackException, error: BaseException) -> None:
    """Remove the frames that rule 1 leaves out, of the exception and of those that led to it."""
    while True:
        frames, is_ours = summary.stack, isinstance(error, RondeError)
        users = [number for number, frame in enumerate(frames) if not _is_ours(frame)]
        if users:
            frames[:] = frames[users[0] : users[-1] + 1 if is_ours else None]
        elif is_ours:
            del frames[:-1]
        cause = error.__cause__
        if cause is not None and summary.__cause__ is not None:
            summary, error = summary.__cause__, cause
        elif error.__context__ is not None and summary.__context__ is not None:
            summary, error = summary.__context__, error.__context__
        else:
            return


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_RONDE)


def is_blame(line: bytes) -> bool:
    """Return whether this is the last line of the traceback of a worker that has lost a peer."""
    return re.match(_BLAME, line) is not None


def blames_peer(error: BaseException | None) -> bool:
    """Return whether the exception, or one that was being handled when it was raised, reports a lost peer."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        if isinstance(error, _CONSEQUENCES):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def described(error: BaseException) -> str:
    """Return the type and text of the exception, even if its `__str__` fails; a long text without its middle."""
    try:
        return shortened(f"{type(error).__name__}: {error}")
    except Exception as problem:
        return f"{type(error).__name__}, whose text cannot be had: {type(problem).__name__}"


# The error file


def write_error_file(path: str, error: BaseException) -> None:
    """Write the exception and its traceback into an error file. Raises OSError."""
    sentence = left_debugger(error)
    info = {
        "py_callstack": "" if sentence else exception_text(error),
        "timestamp": str(int(time.time())),
        "timestamp_ns": time.time_ns(),
        "blames_peer": blames_peer(error),
    }
    message = {"message": sentence or described(error), "extraInfo": info}
    _write_whole(path, json.dumps({"message": message}))


def leave_to_report(path: str) -> bool:
    """Note in an error file that the worker does not print its traceback. Return whether it has one and notes that."""
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read(MOST_BYTES))
        info = content["message"]["extraInfo"]
        if not info["py_callstack"]:
            return False
        info[_LEFT] = True
        _write_whole(path, json.dumps(content))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return True


@dataclass(frozen=True)
class ErrorReport:
    """The content of an error file: `message` is the exception, `time_ns` its time since 1970.

    `blames_peer`: another rank's failure caused the exception. `is_left`: the worker has not printed the traceback.
    """

    message: str
    traceback: str
    time_ns: int
    blames_peer: bool = False
    is_left: bool = False


def read_error_file(path: str) -> ErrorReport | None:
    """Return the content of an error file; None without a file. Raises nothing, because a worker wrote the content."""
    try:
        with open(path, "rb") as file:
            text = file.read(MOST_BYTES)
            written_ns = os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
    if not text:
        return None
    try:
        message = json.loads(text)["message"]
        if not isinstance(message, dict):
            return ErrorReport(shortened(str(message)), "", written_ns)
        info = message.get("extraInfo", {})
        # torch writes whole seconds, too coarse to tell the first exception.
        what = str(message["message"])
        return ErrorReport(
            shortened(what),
            shortened_lines(str(info.get("py_callstack", ""))),
            int(info.get("timestamp_ns", written_ns)),
            bool(info.get("blames_peer")) or is_blame(what.encode(errors="replace")),
            bool(info.get(_LEFT)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        what = shortened(text.decode(errors="replace"))
        return ErrorReport("an error file that cannot be read", what, written_ns)


def hand_up(path: str, failure: Failure, error_file: str = "") -> None:
    """Write the error file that this launcher's own launcher named: why the job failed.

    As in torchrun, it is the worker's own error file (`error_file`) with its exit code; without one, it has the
    launcher's description of the failure. Raises OSError.
    """
    try:
        with open(error_file, "rb") as file:
            content = json.loads(file.read(MOST_BYTES))
        message = content["message"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        info = {"py_callstack": failure.details, "timestamp": str(int(time.time()))}
        message = {"message": f"{failure.message} on {failure.host}", "extraInfo": info}
        content = {"message": message}
    if isinstance(message, dict):
        message["errorCode"] = failure.exit_code
        if isinstance(extra := message.get("extraInfo"), dict):
            extra.pop(_LEFT, None)  # this launcher's report shows it
    _write_whole(path, json.dumps(content))


def _write_whole(path: str, text: str) -> None:
    """Write the file atomically, by replacing it.

    A link, a device or a file that a container mounted cannot be replaced and is overwritten. Raises OSError.
    """
    draft = f"{path}.{os.getpid()}.new"
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return _write(path, text)
    except FileNotFoundError:
        pass
    try:
        with os.fdopen(create_anew(draft), "w") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        _write(path, text)


def _write(path: str, text: str) -> None:
    with os.fdopen(open_for_writing(path, os.O_TRUNC), "w") as file:
        file.write(text)
