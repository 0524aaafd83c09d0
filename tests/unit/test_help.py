"""`help` of each public function, method and class is enough: it describes all parameters, and the errors."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pydoc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ronde

SOURCES = Path(ronde.__file__).parent

# Public methods that only other parts of Ronde call.
INTERNAL = {
    "Communicator.check_adasum", "Communicator.connecting_by", "Communicator.distrust",
    "Communicator.has_failed", "Communicator.leave_stalls", "Communicator.watch_stalls",
    "ProcessSet.mark_added", "ProcessSet.mark_removed", "ProcessSet.place_of",
}  # fmt: skip
# Classes whose instances a user gets from functions.
MADE_BY_RONDE = {"ComContext", "Communicator", "IterationStep", "Job", "RowBlocks"}


def public_functions(module: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in module.__all__:
        member = inspect.unwrap(getattr(module, name))  # also of functools.cache
        if inspect.isfunction(member):
            yield name, member
        elif inspect.isclass(member) and not issubclass(member, BaseException):
            for method, attribute in vars(member).items():
                function = getattr(attribute, "__func__", attribute)  # of a class method
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function


def public_classes(module: ModuleType) -> Iterator[type]:
    for name in module.__all__:
        member = getattr(module, name)
        if inspect.isclass(member) and name not in MADE_BY_RONDE:
            yield member


def lacking(module: ModuleType) -> list[str]:
    found = []
    for name, function in public_functions(module):
        doc = inspect.getdoc(function) or ""
        parameters = [each for each in inspect.signature(function).parameters if each not in ("self", "cls")]
        if name not in INTERNAL and (missing := missing_in(doc, parameters)):
            found.append(f"{name}: {', '.join(missing)}")
    constructors = (
        (each.__name__, undescribed_in(each.__doc__ or "", constructor_parameters(each)))
        for each in public_classes(module)
    )
    return found + [f"{name}: {', '.join(missing)}" for name, missing in constructors if missing]


def constructor_parameters(kind: type) -> list[str]:
    """Return the fields of a dataclass or named tuple, or the parameters with a name of any other class."""
    if fields := getattr(kind, "__match_args__", ()):
        return list(fields)
    if not inspect.isfunction(kind.__init__):  # type: ignore[misc]
        return []
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]
    return [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def missing_in(doc: str, parameters: list[str]) -> list[str]:
    """Return the parameters that the docstring does not describe, and "Raises" if it does not name errors."""
    return undescribed_in(doc, parameters) + ["Raises"] * ("Raises" not in doc)


def undescribed_in(doc: str, parameters: list[str]) -> list[str]:
    """Return the parameters that the docstring does not describe."""
    described = " ".join(re.findall(r"^ +([\w, ]+): ", doc, re.MULTILINE)).replace(",", " ").split()
    return [each for each in parameters if each not in described]


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("ronde", None),
        ("ronde.backends.backend", None),
        ("ronde.comqueue", None),
        ("ronde.rendezvous.membership", None),
        ("ronde.launch.callables", None),
        ("ronde.launch.clusters.cluster", None),
        ("ronde.launch.config", None),
        ("ronde.ml.losses", None),
        ("ronde.ml.optimizers", None),
        ("ronde.ml", "sklearn"),
        ("ronde.rendezvous.rendezvous", None),
        ("ronde.stores.store", None),
        ("ronde.parquet", "torch"),
        ("ronde.testing.faults", None),
        ("ronde.testing.hosts", None),
        ("ronde.testing.ranks", None),
        ("ronde.torch", "torch"),
    ],
)
def test_every_public_function_describes_its_parameters_and_errors(module: str, needs: str | None) -> None:
    if needs:
        pytest.importorskip(needs)
    assert lacking(importlib.import_module(module)) == []


@pytest.mark.parametrize(
    "path",
    [
        "compat/__init__.py",
        "dask/__init__.py",
        "dask/cluster.py",
        "flink/__init__.py",
        "flink/cluster.py",
        "ml/flink.py",
        "ml/spark.py",
        "ray/__init__.py",
        "ray/cluster.py",
        "spark/__init__.py",
        "spark/cluster.py",
        "spark/connect_cluster.py",
        "spark/torch_estimator.py",
        "spark/torch_model.py",
    ],
)
def test_so_does_every_one_of_a_module_that_is_not_imported_here(path: str) -> None:
    assert lacking_in_source((SOURCES / path).read_text(encoding="utf-8")) == []


def test_the_check_of_a_source() -> None:
    source = '''
__all__ = ["Kind", "Record", "function"]

def private(given): ...

def function(described, undescribed, *rest):
    """Do it.

    Args:
        described: a number.
    """

@dataclass(frozen=True)
class Record:
    """A record.

    Attributes:
        first: a number.
    """
    first: int
    second: int = 0

class _Base:
    def inherited(self, given): ...

class Kind(_Base):
    """A kind. Raises no error."""
    def __init__(self, option, **more): ...
    def method(self): ...
    def _method(self): ...
    @property
    def size(self): ...
    @classmethod
    def read(cls, path):
        """Read it. Raises no error."""
'''
    assert lacking_in_source(source) == [
        "function: undescribed, rest, Raises",
        "Record: second",
        "_Base.inherited: given, Raises",
        "Kind: option",
        "Kind.method: Raises",
        "Kind.read: path",
    ]


def lacking_in_source(source: str) -> list[str]:
    """Return what `lacking` returns, of a module that this Python may be unable to import."""
    body = ast.parse(source).body
    public = ast.literal_eval(source.partition("\n__all__ = ")[2].partition("]")[0] + "]")
    classes = [each for each in body if isinstance(each, ast.ClassDef)]
    bases = {ast.unparse(base) for each in classes if each.name in public for base in each.bases}
    found = []
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name in public:
            found.append((node.name, missing_in(ast.get_docstring(node) or "", parameters_of(node))))
        elif isinstance(node, ast.ClassDef) and node.name in {*public, *bases}:
            found += lacking_in_class(node)
    return [f"{name}: {', '.join(missing)}" for name, missing in found if missing]


def lacking_in_class(node: ast.ClassDef) -> Iterator[tuple[str, list[str]]]:
    doc = ast.get_docstring(node) or ""
    if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        yield node.name, undescribed_in(doc, [ast.unparse(each) for each in fields])
    for member in node.body:
        if not isinstance(member, ast.FunctionDef):
            continue
        if member.name == "__init__":
            member.args.vararg = member.args.kwarg = None
            yield node.name, undescribed_in(doc, parameters_of(member))
        elif not member.name.startswith("_") and "property" not in map(ast.unparse, member.decorator_list):
            missing = missing_in(ast.get_docstring(member) or "", parameters_of(member))
            yield f"{node.name}.{member.name}", missing


def parameters_of(node: ast.FunctionDef) -> list[str]:
    given = node.args
    everything = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [each.arg for each in everything if each is not None and each.arg not in ("self", "cls")]


@pytest.mark.parametrize(
    ("path", "name", "others"),
    [
        ("torch_estimator.py", "TorchEstimator", ["ModelParams", "EstimatorParams"]),
        ("torch_model.py", "TorchModel", ["ModelParams"]),
    ],
)
def test_a_class_with_parameters_of_spark_describes_all_of_them(
    path: str, name: str, others: list[str]
) -> None:
    folder = SOURCES / "spark"
    doc = ast.get_docstring(classes_in(folder / path)[name]) or ""
    owners = [classes_in(folder / "ml_params.py")[each] for each in others]
    assigned = [each.targets[0] for owner in owners for each in owner.body if isinstance(each, ast.Assign)]
    assert len(assigned) > 4
    assert undescribed_in(doc, [ast.unparse(each) for each in assigned]) == []


def classes_in(path: Path) -> dict[str, ast.ClassDef]:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {each.name: each for each in body if isinstance(each, ast.ClassDef)}


def test_the_help_of_the_package_begins_with_all_its_names() -> None:
    shown = pydoc.plain(pydoc.render_doc(ronde))
    beginning = shown[: shown.index("PACKAGE CONTENTS")]
    assert len(beginning.splitlines()) < 60
    words = set(re.findall(r"[\w.]+", beginning))
    assert set(ronde.__all__) - words == set()
    packages = {word for word in words if word.startswith("ronde.")} - {
        "ronde.init",
        "ronde.world",
        "ronde.run",
    }
    for package in packages:
        assert importlib.util.find_spec(package), package
