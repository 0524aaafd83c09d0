"""Modules that say "Pure." decide and touch nothing: no socket, file, process, thread, clock, random number or setting.

A test or a simulator can therefore run what they decide with nothing but values. The first paragraph of such a module's
docstring ends with "Pure."; it may import other pure modules, what has no state at the bottom of the house, and the
part of the standard library that touches nothing either.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
FOUNDATION = {"ronde.errors", "ronde.types", "ronde.values"}
USES_NATIVE_FUNCTION = {"ronde.bench.collective_traffic"}  # a function of numbers, in C++
HARMLESS = {
    "__future__", "abc", "base64", "bisect", "collections", "dataclasses", "difflib", "enum", "fractions", "functools",
    "hashlib", "heapq", "inspect", "ipaddress", "itertools", "json", "logging", "math", "operator", "re", "shlex",
    "signal", "statistics", "string", "struct", "textwrap", "types", "typing", "zlib",
}  # fmt: skip


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(SOURCES.rglob("*.py"))}


def is_pure(path: Path) -> bool:
    header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(header.partition("\n\n")[0].split()).endswith("Pure.")


PURE = {name for name, path in MODULES.items() if is_pure(path)}


def imports(tree: ast.AST) -> Iterator[str]:
    """Names of the modules that the code imports anywhere, except for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            inner = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else module for name in inner)
        else:
            yield from imports(node)


def test_the_machines_are_pure() -> None:
    """A mark that goes missing takes its module out of the check below."""
    assert len(PURE) > 40


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_pure_module_imports_nothing_that_touches_the_world(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    used = set(imports(tree)) - PURE - FOUNDATION
    if name in USES_NATIVE_FUNCTION:
        used -= {"ronde"}
    foreign = {module for module in used if module.partition(".")[0] not in HARMLESS}
    assert not foreign, f"{name} says that it is pure, and imports {', '.join(sorted(foreign))}"
