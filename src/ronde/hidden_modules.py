"""Finds a file beside the program that hides a module of the same name, after an import has failed because of it.

Python looks for modules in the folder of the script first; with `-m`, `-c` and at a prompt, in the current folder. A
`random.py` there is what every library gets that imports `random`. The error then names the module, but seldom the
file. If it names one, or the traceback has a frame in one, that shows which module the program has got.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import PathFinder

__all__ = ["describe_hiding"]

# What errors say of a module that lacks a name.
_NAMES = (
    r"module '([\w.]+)' has no attribute ",
    r"cannot import name '[^']*' from (?:partially initialized module )?'([\w.]+)'",
    r"No module named '([\w.]+)'",
)
_FROM = r" from (?:partially initialized module )?'([\w.]+)' \((/[^)]*)\)"
_FRAME = r'^ *File "([^"]+)", line '
_TRACEBACK = "Traceback (most recent call last):"


def describe_hiding(traceback: str, folder: str | None = None) -> str:
    """Return which file hides which module, if that can have caused the error; else "".

    `folder`: where Python looks first ("": in the current folder; None: as the last traceback tells).
    """
    try:
        folder = _first_folder(traceback) if folder is None else os.path.abspath(folder)
    except OSError:  # the current folder is gone
        return ""
    names = [found.partition(".")[0] for pattern in _NAMES for found in re.findall(pattern, traceback)]
    for name in dict.fromkeys(names) if folder else ():
        path = next(filter(os.path.isfile, _files_of(name, folder)), "")
        if path and _is_got_from(path, name, folder, traceback):
            owner = "Python's" if name in sys.stdlib_module_names else "the installed"
            return f"{path} hides {owner} module {name!r} from this program: rename it"
    return ""


def _first_folder(traceback: str) -> str:
    """Return the folder of the script, or the current one if there is none; "" without a traceback."""
    # An earlier one is that of a cause, which begins elsewhere.
    found = re.search(_FRAME, traceback.rpartition(_TRACEBACK)[2], re.MULTILINE)
    if not found:
        return ""
    is_script = not found[1].startswith("<")  # <frozen runpy>, <string>, <stdin>
    return os.path.dirname(os.path.abspath(found[1])) if is_script else os.getcwd()


def _files_of(name: str, folder: str) -> tuple[str, str]:
    return os.path.join(folder, f"{name}.py"), os.path.join(folder, name, "__init__.py")


def _is_got_from(path: str, name: str, folder: str, traceback: str) -> bool:
    """Return whether the program can have got the module from this file instead of from elsewhere."""
    elsewhere = _places_elsewhere(name, folder)
    if elsewhere is None:
        return False
    if any(_is_in(frame, elsewhere) for frame in re.findall(_FRAME, traceback, re.MULTILINE)):
        return False
    here = [os.path.dirname(path) if os.path.basename(path) == "__init__.py" else path]
    named = [file for module, file in re.findall(_FROM, traceback) if module.partition(".")[0] == name]
    return all(_is_in(file, here) for file in named)


def _is_in(file: str, places: list[str]) -> bool:
    """Return whether the file is one of these files, or in one of these folders."""
    real = os.path.realpath(file)
    return any(f"{real}/".startswith(os.path.realpath(place) + "/") for place in places)


def _places_elsewhere(name: str, folder: str) -> list[str] | None:
    """Return the file or the folders of the module that would be found without the folder; None if there is none."""
    if name == "ronde":  # an editable installation is found in another way
        return []
    paths = [path for path in sys.path if os.path.abspath(path or ".") != os.path.abspath(folder)]
    spec = None if name in sys.builtin_module_names else PathFinder.find_spec(name, paths)
    if spec is None:
        return None
    return list(spec.submodule_search_locations or [spec.origin or ""])
