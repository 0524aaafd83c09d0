"""The setting `backends`, and backends by name."""

from __future__ import annotations

import pytest

from ronde.engine.chosen_backends import backend_class, preferences
from ronde.errors import UsageError
from ronde.types import Kind


def test_a_preference_for_some_operations_or_for_all() -> None:
    assert preferences("native")[Kind.broadcast] == ["native"]
    assert set(map(tuple, preferences("mpi, gloo,mpi").values())) == {("mpi", "gloo")}
    some = preferences("allreduce=mpi,native; broadcast = gloo")
    assert some[Kind.allreduce] == ["mpi", "native"]
    assert some[Kind.broadcast] == ["gloo"]
    assert some[Kind.allgather] == ["native"]
    both = preferences("gloo;barrier=native")
    assert both[Kind.alltoall] == ["gloo"]
    assert both[Kind.barrier] == ["native"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sum=mpi", "'sum' is not one of the operations allreduce, reducescatter"),
        ("allreduce=", "expected the name of a backend"),
    ],
)
def test_invalid_preferences(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        preferences(text)


def test_the_error_of_an_unknown_backend_names_all() -> None:
    with pytest.raises(
        UsageError, match="backend 'ddl' does not exist: expected one of native, mpi, gloo, ccl, nccl"
    ):
        backend_class("ddl")
