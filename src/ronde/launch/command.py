"""Converts the script, module or program that the user names to a command that can be started."""

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

    This Python runs a module (`module`), a directory with a __main__.py, a file that ends in .py, .pyz or .zip, and any
    file with `run_path`. Everything else, and with `no_python` any file, is a program: a file of that name or, if there
    is none and the name has no slash, the first one in `search_path` (PATH). A text file that is not executable and
    names no other interpreter is a script, too. Raises UsageError if the file does not exist, is another directory, or
    may not be read or executed.
    """
    if module:
        return [sys.executable, "-m", name, *arguments]
    if not no_python and _is_package(name):
        return [sys.executable, name, *arguments]
    if run_path or (name.endswith((".py", ".pyz", ".zip")) and not no_python):
        _check_file(name, "script", os.R_OK, "it may not be read")
        return [sys.executable, name, *arguments]
    if os.sep not in name and not os.path.isfile(name):
        if found := shutil.which(name, path=search_path):
            return [found, *arguments]
    if not no_python and _is_script(name):
        return [sys.executable, name, *arguments]
    _check_file(name, "program", os.X_OK, "it is not executable (chmod +x would make it so)")
    _check_program(name)
    return [name if os.sep in name else os.path.join(".", name), *arguments]


def _is_package(name: str) -> bool:
    return os.path.isdir(name) and os.path.isfile(os.path.join(name, "__main__.py")) and name[-3:] != ".py"


def _is_script(name: str) -> bool:
    if not os.path.isfile(name) or os.access(name, os.X_OK) or not os.access(name, os.R_OK):
        return False
    with open(name, "rb") as file:
        head = file.read(1024)
    first = head.partition(b"\n")[0]
    return b"\0" not in head and (b"python" in first or not first.startswith(b"#!"))


def _check_file(name: str, kind: str, right: int, without: str) -> None:
    if os.path.isdir(name):
        raise UsageError(f"cannot run {name!r}: it is a directory, not a {kind}")
    if not os.path.exists(name):
        raise UsageError(f"{kind} {name!r} not found" + _where(name, kind))
    if not os.access(name, right):
        raise UsageError(f"cannot run {name!r}: {without}")


def _check_program(name: str) -> None:
    """Raise UsageError if it is a text file that names no existing interpreter. An unreadable file passes."""
    if not os.access(name, os.R_OK) or not os.path.isfile(name):
        return
    with open(name, "rb") as file:
        head = file.read(1024)
    first = head.partition(b"\n")[0]
    if first.startswith(b"#!"):
        interpreter = os.fsdecode((first[2:].split() or [b""])[0])
        if not os.path.exists(interpreter):
            raise UsageError(
                f"cannot run {name!r}: its first line names {interpreter!r}, which does not exist"
            )
    elif b"\0" not in head:
        raise UsageError(f"cannot run {name!r}: its first line names no interpreter, as in #!/bin/sh")


def _where(name: str, kind: str) -> str:
    if os.path.isabs(name):
        return ""
    elsewhere = " or in PATH" if kind == "program" and os.sep not in name else ""
    return f" in {os.getcwd()}{elsewhere}"
