"""Chooses the modules that a template imports: the large ones among those that the script imports.

It reads the text of the script and of the modules next to it, and imports nothing. It uses only the standard library,
because the template runs it first.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator

__all__ = ["LATER", "WORTH_IT", "modules_to_preload"]

# Large modules whose import starts no thread and opens nothing that a fork would break.
WORTH_IT = (
    "datasets", "matplotlib", "numpy", "pandas", "PIL", "pyarrow", "ronde", "safetensors", "scipy", "sklearn",
    "tokenizers", "torch", "torchaudio", "torchvision", "tqdm", "transformers", "yaml",
)  # fmt: skip
# Modules that these import later, when they are first used.
LATER = {
    "ronde": ("ronde.comm.world", "ronde.engine.process"),
    "torch.distributed": ("torch.distributed.rendezvous",),
    "torch.optim": ("torch._dynamo",),
}
MOST_FILES = 200


def modules_to_preload(script: str) -> list[str]:
    """Return the modules in the order of the script's text; none if the script cannot be read."""
    found: dict[str, None] = {}
    for name, names in _imports(script, os.path.dirname(os.path.realpath(script))):
        if name.partition(".")[0] in WORTH_IT:
            found[name] = None
            # `from torch import optim` may name a module, or something else.
            found |= dict.fromkeys(f"{name}.{each}" for each in names if f"{name}.{each}" in LATER)
    for name in list(found):
        found |= dict.fromkeys(LATER.get(name, ()))
    return list(found)


def _imports(script: str, folder: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules that the script and the modules next to it import, each with the imported names."""
    files, seen = [script], {script}
    while files and len(seen) < MOST_FILES:
        for name, names in _imports_of_file(files.pop()):
            yield name, names
            for file in _files_of((name, *(f"{name}.{each}" for each in names)), folder):
                if file not in seen:
                    seen.add(file)
                    files.append(file)


def _imports_of_file(path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # running the script will report the error
    imported = set()
    for node in ast.walk(tree):  # breadth first: the script's imports come before those in functions
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported.add(alias.name)
                yield alias.name, ()
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, tuple(alias.name for alias in node.names)
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported
        ):
            yield node.value.id, (node.attr,)  # torch.optim


def _files_of(names: Iterable[str], folder: str) -> Iterator[str]:
    for name in names:
        path = os.path.join(folder, *name.split("."))
        for file in (f"{path}.py", os.path.join(path, "__init__.py")):
            if os.path.isfile(file):
                yield file
