"""Finds a file beside the program that hides a module of the same name, after an import has failed because of it.

Python looks for modules in the folder of the script first (with `-m`: in the current folder). A `random.py` there is
what every library gets that imports `random`. The error then names the module, but seldom the file.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

__all__ = ["describe_hiding"]

# What errors say of a module that lacks a name.
_NAMES = (
    r"module '([\w.]+)' has no attribute ",
    r"cannot import name '[^']*' from (?:partially initialized module )?'([\w.]+)'",
    r"No module named '([\w.]+)'",
)
_FILE = r'^ *File "([^"<][^"]*)", line '


def describe_hiding(traceback: str, folder: str = "") -> str:
    """Return which file hides which module, if that can have caused the error; else "".

    `folder`: where Python looks first ("": where the file of the traceback's first frame lies, or the current folder).
    """
    try:
        folders = [folder] if folder else [*_first_folder(traceback), os.getcwd()]
    except OSError:  # the current folder is gone
        return ""
    names = [found.partition(".")[0] for pattern in _NAMES for found in re.findall(pattern, traceback)]
    for name in dict.fromkeys(names):
        for each in folders:
            path = next(filter(os.path.isfile, _files_of(name, each)), "")
            if path and _exists_elsewhere(name, each):
                owner = "Python's" if name in sys.stdlib_module_names else "the installed"
                return f"{path} hides {owner} module {name!r} from this program: rename it"
    return ""


def _first_folder(traceback: str) -> Iterator[str]:
    found = re.search(_FILE, traceback, re.MULTILINE)
    if found:
        yield os.path.dirname(os.path.abspath(found[1]))


def _files_of(name: str, folder: str) -> tuple[str, str]:
    return os.path.join(folder, f"{name}.py"), os.path.join(folder, name, "__init__.py")


def _exists_elsewhere(name: str, folder: str) -> bool:
    """Return whether the module would be found without the folder."""
    from importlib.machinery import PathFinder

    if name == "ronde":  # an editable installation is found in another way
        return True
    paths = [path for path in sys.path if os.path.abspath(path or ".") != os.path.abspath(folder)]
    return name not in sys.builtin_module_names and PathFinder.find_spec(name, paths) is not None
