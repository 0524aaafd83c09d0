"""The command line: `ronde VERB`, one module per verb."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from ronde.errors import UsageError

__all__ = ["main", "version"]

USAGE_ERROR, INTERRUPTED = 2, 130
VERBS = ("run", "store", "trace")  # the modules that do it, each loaded when it is asked for

HELP = """\
usage: ronde run -n N [options] script.py [arguments]

  ronde run        start a program in several processes (ronde run --help tells more)
  ronde store      serve a store where the nodes of a job meet (ronde store --help tells more)
  ronde trace      merge the timelines of several ranks (ronde trace --help tells more)
  ronde --version  print the version
  ronde --help     print this help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says (default: that of this process) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words[0] if words else "--help"
    if verb in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if verb == "--version":
        print(f"ronde {version()}")
        return 0
    name = "ronde"
    try:
        if verb not in VERBS:
            from ronde.cli.options import nearest

            raise UsageError(f"there is no {verb!r}{nearest(verb, [*VERBS, '--help', '--version'])}")
        name = f"ronde {verb}"
        code: int = import_module(f"ronde.cli.{verb}").run(words[1:])
        return code
    except UsageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:  # before or after the part that takes care of it
        return INTERRUPTED


def version() -> str:
    """Return the version that is installed."""
    from importlib import metadata  # slow to load, and only needed here

    try:
        return metadata.version("ronde")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"
