"""What a user names to be run, as a command that can be started: a script, a module or a program."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from ronde.errors import UsageError

__all__ = ["find_command"]


def find_command(
    name: str,
    arguments: Sequence[str],
    *,
    module: bool,
    no_python: bool,
    search_path: str | None,
    run_path: bool = False,
) -> list[str]:
    """Return the command whose first word is a path: `name` with its arguments.

    A module (`module`), a file ending in .py and any file with `run_path` run with this Python; with `no_python`, and
    whatever ends otherwise, is a program: a file of that name or, if there is none and the name has no slash, the first
    in `search_path` (PATH). Raises UsageError if it is not there, is a directory, or may not be read or executed.
    """
    if module:
        return [sys.executable, "-m", name, *arguments]
    if run_path or (name.endswith(".py") and not no_python):
        _check_file(name, "script", os.R_OK, "it may not be read")
        return [sys.executable, name, *arguments]
    if os.sep not in name and not os.path.isfile(name) and (found := shutil.which(name, path=search_path)):
        return [found, *arguments]
    _check_file(name, "program", os.X_OK, "it is not executable (chmod +x would make it so)")
    return [os.path.join(".", name), *arguments]


def _check_file(name: str, kind: str, right: int, without: str) -> None:
    if os.path.isdir(name):
        raise UsageError(f"cannot run {name!r}: it is a directory, not a {kind}")
    if not os.path.exists(name):
        raise UsageError(f"{kind} {name!r} not found" + _where(name, kind))
    if not os.access(name, right):
        raise UsageError(f"cannot run {name!r}: {without}")


def _where(name: str, kind: str) -> str:
    if os.path.isabs(name):
        return ""
    elsewhere = " or in PATH" if kind == "program" and os.sep not in name else ""
    return f" in {os.getcwd()}{elsewhere}"
