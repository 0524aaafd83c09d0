"""The engine where hosts lie under hosts: chains (arity 1) and trees (arity 2). Mostly every rank is its own host."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from tests.ranks.engine.test_named_operations import (
    disagree,
    do_every_operation,
    environ,
    submit_in_random_orders,
    wait_for_a_lost_rank,
)

import ronde
from ronde.errors import MismatchError
from ronde.testing import ranks

N = 4
ARITIES = pytest.mark.parametrize("arity", [1, 2])


def deep(arity: int) -> dict[str, str]:
    return environ("tcp", RONDE_TREE_ARITY=arity)


@ARITIES
def test_every_operation(arity: int) -> None:
    assert ranks.run(do_every_operation, N, environ=deep(arity)) == ["done"] * N


@ARITIES
@pytest.mark.parametrize("changes", [False, True])
def test_random_orders(arity: int, changes: bool) -> None:
    done = ranks.run(submit_in_random_orders, N, 30, 6, 17, changes, environ=deep(arity))
    assert done == [180] * N


@ARITIES
def test_disagreements_are_told_to_all(arity: int) -> None:
    first, *others = ranks.run(disagree, N, environ=deep(arity))
    assert all(other == first for other in others)
    for case, answer in first.items():
        assert f"tensor '{case.split()[0]}'" in answer, answer
        assert "rank 0 " in answer, answer
        assert f"rank {N - 1} " in answer, answer


def work_of_every_kind() -> tuple[str, int, int]:
    ronde.init()
    host, hosts = ronde.local_size(), ronde.cross_size()
    done = do_every_operation()
    assert submit_in_random_orders(20, 4, 19, True) == 80
    return done, host, hosts


@pytest.mark.slow
def test_several_ranks_on_each_host() -> None:
    places = [ranks.Place(environ={"RONDE_HOST_ID": host}) for host in "aabcc"]
    with ranks.start(
        work_of_every_kind, 5, environ=environ("auto", RONDE_TREE_ARITY=1), places=places
    ) as job:
        results = job.results()
    assert results == [("done", local, hosts) for local, hosts in ((2, 3), (2, 2), (1, 3), (2, 3), (2, 2))]


def disagree_in_a_long_list(tensors: int) -> list[str]:
    """More new tensors at once than fit into the first part of a message. Returns why some did not run."""
    ronde.init()
    odd = ronde.rank() == 3
    handles = []
    for i in range(tensors):
        x = np.full(4 if odd and i % 50 == 7 else 3, float(ronde.rank()))
        handles.append(ronde.allreduce_async(x, name=f"a long name of a tensor, number {i}", op=ronde.Sum))
    reasons = []
    for handle in handles:
        try:
            assert (handle.wait() == sum(range(ronde.size()))).all()
        except MismatchError as error:
            reasons.append(str(error))
    ronde.shutdown()
    return reasons


@ARITIES
def test_many_new_tensors_at_once(arity: int) -> None:
    places = [ranks.Place(environ={"RONDE_HOST_ID": host}) for host in "abbc"]
    with ranks.start(
        disagree_in_a_long_list, N, 200, environ=environ("auto", RONDE_TREE_ARITY=arity), places=places
    ) as job:
        results = job.results()
    text = "tensor '{}': rank 0 submitted allreduce with shape (3,), but rank 3 with shape (4,)"
    names = [f"a long name of a tensor, number {number}" for number in (7, 57, 107, 157)]
    assert results == [[text.format(name) for name in names]] * N


@ARITIES
def test_a_host_in_the_middle_is_lost(arity: int) -> None:
    with ranks.start(wait_for_a_lost_rank, N, False, environ=deep(arity)) as job:
        job.told(1)
        time.sleep(0.3)
        os.kill(job.pids[1], signal.SIGKILL)
        outcomes = job.outcomes()
    assert [outcomes[rank].value for rank in range(N) if rank != 1] == ["told"] * (N - 1)


@ARITIES
def test_a_host_in_the_middle_leaves(arity: int) -> None:
    results = ranks.run(wait_for_a_lost_rank, N, True, environ=deep(arity))
    assert results == ["left" if rank == 1 else "told" for rank in range(N)]


def init_with_own_arity() -> str:
    with pytest.raises(MismatchError, match=r"tree_arity .* 3 on rank 0 and 4 on rank 1"):
        ronde.init(tree_arity=3 + int(os.environ["RANK"]))
    return "refused"


def test_the_arity_must_be_the_same() -> None:
    assert ranks.run(init_with_own_arity, 2) == ["refused"] * 2


def come_late_one_by_one() -> float:
    """Every rank waits for more than a second for another one, under which there are more."""
    ronde.init()
    time.sleep(1.2 * ((ronde.rank() + 1) % N))
    total = float(ronde.allreduce(np.ones(3), name="late", op=ronde.Sum)[0])
    ronde.shutdown()
    return total


@pytest.mark.slow
def test_ranks_may_come_late_one_by_one() -> None:
    assert ranks.run(come_late_one_by_one, N, environ=deep(1)) == [float(N)] * N
