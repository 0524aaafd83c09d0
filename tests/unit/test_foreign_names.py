"""What somebody sees who writes the names of mpi4py, torch.distributed or Horovod."""

from __future__ import annotations

import importlib.metadata

import pytest

import ronde
from ronde.foreign_names import advice


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("all_reduce", "ronde.allreduce"),
        ("Allreduce", "ronde.allreduce"),
        ("bcast", "ronde.broadcast"),
        ("Get_rank", "ronde.rank"),
        ("get_world_size", "ronde.size"),
        ("COMM_WORLD", "ronde.world()"),
        ("init_process_group", "ronde.init"),
        ("DistributedOptimizer", "ronde.torch.DistributedOptimizer"),
        ("all_gather_object", "ronde.allgather_object"),
    ],
)
def test_an_unknown_name_is_answered_with_ours(name: str, instead: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"has no attribute '{name}'; in Ronde it is {instead}".replace("()", r"\(\)")
    ):
        getattr(ronde, name)


def test_a_name_that_nobody_has_gets_no_advice() -> None:
    with pytest.raises(AttributeError, match=r"^module 'ronde' has no attribute 'frobnicate'$"):
        _ = ronde.frobnicate
    assert not hasattr(ronde, "__path_of_nothing__")


def test_advice_names_only_what_is_there() -> None:
    assert advice("communicator", "Bcast", ["broadcast"]) == "; in Ronde it is communicator.broadcast"
    assert advice("communicator", "Dup", ["duplicate"]) == "; in Ronde it is communicator.duplicate"
    assert advice("communicator", "Create", ["group"]) == "; in Ronde it is communicator.group"
    assert advice("communicator", "Bcast", ["rank"]) == ""
    assert advice("communicator", "COMM_WORLD", ["rank"]) == ""


def test_the_version_is_that_of_the_installed_package() -> None:
    assert ronde.__version__ == importlib.metadata.version("ronde")
