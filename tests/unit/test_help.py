"""`help` of each public function and method is enough: it describes all parameters, and the errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import ronde
import ronde.comqueue
import ronde.ml.losses
import ronde.ml.optimizers
from ronde.help_texts import complete_help

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
        missing = [each for each in parameters if f"    {each}: " not in doc]
        if name not in INTERNAL and (missing or "Raises" not in doc):
            found.append(f"{name}: {', '.join(missing) or 'Raises'}")
    return found


def test_every_public_function_describes_its_parameters_and_errors() -> None:
    assert lacking(ronde) == []


def test_so_does_every_one_of_comqueue() -> None:
    assert lacking(ronde.comqueue) == []


def test_so_does_every_one_of_the_optimizers() -> None:
    assert lacking(ronde.ml.losses) + lacking(ronde.ml.optimizers) == []


def test_so_does_every_one_of_torch() -> None:
    pytest.importorskip("torch")
    import ronde.torch

    assert lacking(ronde.torch) == []


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
