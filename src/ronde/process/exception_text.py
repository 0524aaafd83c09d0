"""The text of an exception, as a worker prints it and reports show it.

1. An error of Ronde says in its message what is wrong, so the frames inside Ronde below the caller's line are left out.
   All other exceptions keep theirs, because one that is raised inside Ronde by mistake is found by them. Where Ronde
   calls the user's function, the frames before it are left out. The log level `debug` keeps all.
2. Its length is bounded: a long message, or a long line of source, loses its middle.
3. Leaving a debugger by `q` is no mistake of the program, so one sentence replaces the traceback.
"""

from __future__ import annotations

import os
import stat
import traceback

from ronde.errors import RondeError

__all__ = ["exception_text", "headline", "left_debugger", "shortened", "shortened_lines", "shows_all_frames"]

MOST_OF_PART = 8 * 1024  # characters of one message, or of one frame
MOST_OF_TEXT = 64 * 1024
_HEADLINE = 300
_RONDE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def exception_text(error: BaseException) -> str:
    """Return what Python prints of an uncaught exception, by the rules above."""
    if sentence := left_debugger(error):
        return f"{sentence}\n"
    described = traceback.TracebackException.from_exception(error, compact=True)
    if not shows_all_frames():
        _leave_out_inner_frames(described, error)
    return shortened("".join(shortened(part) for part in described.format()), MOST_OF_TEXT)


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
    import logging  # slow to load; only failed workers need it

    return logging.getLogger("ronde").isEnabledFor(logging.DEBUG)


def _leave_out_inner_frames(described: traceback.TracebackException, error: BaseException) -> None:
    """Remove the frames that rule 1 leaves out, of the exception and of those that led to it."""
    while True:
        frames, is_ours = described.stack, isinstance(error, RondeError)
        users = [number for number, frame in enumerate(frames) if not _is_ours(frame)]
        if users:
            frames[:] = frames[users[0] : users[-1] + 1 if is_ours else None]
        elif is_ours:
            del frames[:-1]
        cause = error.__cause__
        if cause is not None and described.__cause__ is not None:
            described, error = described.__cause__, cause
        elif error.__context__ is not None and described.__context__ is not None:
            described, error = described.__context__, error.__context__
        else:
            return


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_RONDE)
