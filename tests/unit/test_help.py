"""`help` of each public function and method is enough: it describes all parameters, and the errors."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ronde
from ronde.help_texts import complete_help

SOURCES = Path(ronde.__file__).parent

# Public methods that only other parts of Ronde call.
INTERNAL = {
    "Communicator.check_adasum", "Communicator.connecting_by", "Communicator.distrust",
    "Communicator.has_failed", "Communicator.leave_stalls", "Communicator.watch_stalls",
    "ProcessSet.mark_added", "ProcessSet.mark_removed", "ProcessSet.place_of",
}  # fmt: skip


def public_functions(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in module.__all__:
        member = getattr(module, name)
        if inspect.isfunction(member):
            yield name, member
        elif inspect.isclass(member) and not issubclass(member, BaseException):
            for method, function in vars(member).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function


def lacking(module: ModuleType) -> list[str]:
    found = []
    for name, function in public_functions(module):
        doc = inspect.getdoc(function) or ""
        parameters = [each for each in inspect.signature(function).parameters if each != "self"]
        if name not in INTERNAL and (missing := missing_in(doc, parameters)):
            found.append(f"{name}: {', '.join(missing)}")
    return found


def missing_in(doc: str, parameters: list[str]) -> list[str]:
    """Return the parameters that the docstring does not describe, and "Raises" if it does not name errors."""
    described = " ".join(re.findall(r"^ +([\w, ]+): ", doc, re.MULTILINE)).replace(",", " ").split()
    missing = [each for each in parameters if each not in described]
    return missing + ["Raises"] * ("Raises" not in doc)


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("ronde", None),
        ("ronde.comqueue", None),
        ("ronde.launch.callables", None),
        ("ronde.launch.clusters.base", None),
        ("ronde.ml.losses", None),
        ("ronde.ml.optimizers", None),
        ("ronde.ml", "sklearn"),
        ("ronde.parquet", "torch"),
        ("ronde.testing.faults", None),
        ("ronde.testing.linearizability", None),
        ("ronde.torch", "torch"),
    ],
)
def test_every_public_function_describes_its_parameters_and_errors(module: str, needs: str | None) -> None:
    if needs:
        pytest.importorskip(needs)
    assert lacking(importlib.import_module(module)) == []


@pytest.mark.parametrize(
    "path",
    ["spark/__init__.py", "ray/executor.py", "dask/__init__.py", "flink/__init__.py", "compat/__init__.py"],
)
def test_so_does_every_one_of_a_module_that_is_not_imported_here(path: str) -> None:
    found = []
    module = ast.parse((SOURCES / path).read_text(encoding="utf-8"))
    classes = [
        each for each in module.body if isinstance(each, ast.ClassDef) and not each.name.startswith("_")
    ]
    for node in [*module.body, *(member for each in classes for member in each.body)]:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
            parameters = [each for each in arguments if each not in ("self", "cls")]
            if missing := missing_in(ast.get_docstring(node) or "", parameters):
                found.append(f"{node.name}: {', '.join(missing)}")
    assert found == []


def test_a_shared_parameter_without_a_description_is_an_error() -> None:
    def operation(undescribed: int) -> None:
        """Do it."""

    with pytest.raises(KeyError, match="undescribed"):
        complete_help([operation], {}, {}, "")


def test_a_docstring_replaces_what_is_shared() -> None:
    def operation(x: int) -> None:
        """Do it.

        Args:
            x: special.
        """

    complete_help([operation], {"x": "shared"}, {"ValueError": "never."}, "")
    doc = inspect.getdoc(operation) or ""
    assert "    x: special." in doc
    assert "x: shared" not in doc
    assert "    ValueError: never." in doc
