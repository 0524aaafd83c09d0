"""One parameter has one name in each function, and the names of the neighbours are accepted."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy
import pytest

import ronde
from ronde.comqueue import ComQueue, iterate
from ronde.errors import UsageError
from ronde.foreign_names import other_names


@other_names(np="num_proc", environment="env")
def start(fn: str, num_proc: int = 1, *, env: str = "") -> tuple[str, int, str]:
    """Return what it gets."""
    return fn, num_proc, env


def test_other_names_mean_the_same() -> None:
    given: dict[str, Any] = {"np": 4, "environment": "x"}
    assert start("f", **given) == start("f", 4, env="x") == ("f", 4, "x")
    assert list(inspect.signature(start).parameters) == ["fn", "num_proc", "env"]
    assert start.__doc__ == "Return what it gets."


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"np": 4, "num_proc": 4}, r"start\(\) got both num_proc and np, which mean the same: leave np out"),
        ({"num_procs": 4}, "unexpected keyword argument 'num_procs'"),
    ],
)
def test_two_names_at_once_and_unknown_ones_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        start("f", **given)


@pytest.mark.parametrize("package", ["ronde", "ronde.spark", "ronde.dask", "ronde.flink"])
def test_every_run_has_both(package: str) -> None:
    module = pytest.importorskip(package, exc_type=ImportError)
    place = {"ronde.dask": (None,)}.get(package, ())
    for number, variables in [("np", "env"), ("num_proc", "environment")]:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - a cluster is missing, or the number is invalid
            module.run(*place, print, (), **{number: -1, variables: {}})
        assert "unexpected keyword" not in str(caught.value)


def test_iterations_have_both() -> None:
    more: dict[str, Any] = {"cluster": "threads:1"}
    result = iterate(lambda c: None, data=numpy.ones(3), state={"w": 1}, max_iter=1, **more)
    assert result.state.w == 1
    assert ComQueue().add(print_nothing).exec(**more) == [None]


def print_nothing(context: object) -> None:
    pass


def test_so_has_an_executor_of_ray() -> None:
    pytest.importorskip("ray")
    executor = importlib.import_module("ronde.ray").RayExecutor
    assert executor(np=3).num_workers == executor(num_proc=3).num_workers == 3


@pytest.mark.parametrize("args", [10, "path", b"x", {"lr": 1}, None])
def test_arguments_that_are_no_tuple_are_named(args: Any) -> None:
    with pytest.raises(
        UsageError, match=r"args=.* is invalid: expected a tuple of the arguments of print, as \(.*,\)"
    ):
        ronde.run(print, args)
    with pytest.raises(UsageError, match="kwargs=10 is invalid: expected a dict"):
        ronde.run(print, (), 10)  # type: ignore[arg-type]


def test_a_large_argument_is_not_shown_whole() -> None:
    with pytest.raises(UsageError) as caught:
        ronde.run(print, "x" * 10_000)
    assert len(str(caught.value)) < 400
