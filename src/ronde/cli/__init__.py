"""The command line: `ronde VERB`, one module per verb."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from ronde.errors import UsageError

__all__ = ["command", "main", "show", "version"]

USAGE_ERROR, INTERRUPTED = 2, 130
VERBS = ("run", "store", "trace", "bench", "doctor", "completion")  # each is a module, loaded on demand

HELP = """\
usage: ronde run -n N [options] script.py [arguments]

  ronde run         start a program in several processes (see ronde run --help)
  ronde store       serve a store in which the nodes of a job meet (see ronde store --help)
  ronde trace       merge the timelines of several ranks (see ronde trace --help)
  ronde bench       compare collectives with what the machine allows (see ronde bench --help)
  ronde doctor      check this machine for what slows ranks down (see ronde doctor --help)
  ronde completion  print a script for the completion in shells (see ronde completion --help)
  ronde --version   print the version
  ronde --help      print this help
"""


def command() -> NoReturn:
    """Run the command line of this process and end the process, as the program `ronde` does."""
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of this process) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words[0] if words else "--help"
    name = "ronde"
    try:
        if verb in ("-h", "--help", "help"):
            show(HELP)
            return 0
        if verb == "--version":
            show(f"ronde {version()}\n")
            return 0
        if verb not in VERBS:
            from ronde.cli.options import nearest

            raise UsageError(f"unknown command {verb!r}{nearest(verb, [*VERBS, '--help', '--version'])}")
        name = f"ronde {verb}"
        _require_directory()
        if verb in ("run", "bench") and argv is None and (ended := _run_in_child()) is not None:
            return ended
        code: int = import_module(f"ronde.cli.{verb}").run(words[1:])
        return code
    except UsageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except (OSError, RuntimeError, MemoryError) as error:
        from ronde.process.resources import shortage

        if not (sentence := shortage(error)):
            raise
        print(f"{name}: {sentence}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:  # outside of the part that handles it
        return INTERRUPTED


def _run_in_child() -> int | None:
    """Return the exit code if a child has done the work, because this is the first process of a container."""
    if os.getpid() != 1:
        return None
    from ronde.process.signals import leave_work_to_child

    return leave_work_to_child()


def _require_directory() -> None:
    try:
        os.getcwd()
    except OSError:
        raise UsageError("the current directory no longer exists: change to another one") from None


def show(text: str) -> None:
    """Print the text. Raises UsageError if it cannot be written; a closed pipe is not an error."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        nothing = os.open(os.devnull, os.O_WRONLY)  # for what is left in the buffer
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        if not isinstance(error, BrokenPipeError):
            raise UsageError(f"cannot write to standard output: {error.strerror}") from None


def version() -> str:
    """Return the installed version."""
    from importlib import metadata  # slow to load, and only needed here

    try:
        return metadata.version("ronde")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
