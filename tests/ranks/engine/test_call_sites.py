"""A warning names the lines at which ranks call an operation without a name, if they differ."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

import ronde
from ronde import Handle
from ronde.testing import ranks


class Records(logging.Handler):
    """The warnings of the engine in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []
        logging.getLogger("ronde.engine").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


def first_line(function: Callable[..., object]) -> int:
    """The number of the line after the `def`."""
    return function.__code__.co_firstlineno + 1


def reduce_zeros(name: str | None) -> Handle:
    return ronde.allreduce_async(np.zeros(3), name=name, op=ronde.Sum)


def reduce_tens(name: str | None) -> Handle:
    return ronde.allreduce_async(np.full(3, 10.0), name=name, op=ronde.Sum)


def reduce_in_different_order(names: tuple[str, str] | tuple[None, None]) -> tuple[list[str], list[float]]:
    """Two sums of one shape, in the other order on rank 1; then all again and again, until they are cached."""
    ronde.init()
    records = Records()
    calls = list(zip((reduce_zeros, reduce_tens), names))
    for _ in range(50):
        order = calls if ronde.rank() == 0 else calls[::-1]
        results = {reduce: reduce(name) for reduce, name in order}
        zeros = results[reduce_zeros].wait()
        results[reduce_tens].wait()
    ronde.shutdown()
    return records.warnings, zeros.tolist()


def test_a_swap_is_one_warning_on_rank_0() -> None:
    (warnings, zeros), (others, _) = ranks.run(reduce_in_different_order, 2, (None, None))
    assert zeros == [10.0] * 3  # the silent mistake
    [warning] = warnings
    here, there = (f"test_call_sites.py:{first_line(each)}" for each in (reduce_zeros, reduce_tens))
    assert warning.startswith(
        f"unnamed operation 'allreduce.noname.0' is called at {here} on rank 0 and at {there} on rank 1: if"
    )
    assert others == []


def test_named_operations_may_come_in_any_order() -> None:
    assert ranks.run(reduce_in_different_order, 2, ("zeros", "tens")) == [([], [0.0] * 3)] * 2


def call_what_only_looks_different() -> tuple[int, int, int]:
    """The warnings after calls in one line on all ranks, of a root with its own, and of a rank with its own."""
    ronde.init()
    records = Records()
    counts = []
    for _ in range(3):
        ronde.allreduce(np.ones(3))
        ronde.barrier()
    counts.append(len(records.warnings))
    if ronde.rank() == 0:
        ronde.broadcast(np.ones(3), 0)
        ronde.barrier()
    else:
        ronde.broadcast(np.zeros(3), 0)
        ronde.barrier()
    counts.append(len(records.warnings))
    for _ in range(3):
        if ronde.rank() == 0:
            ronde.allgather(np.ones((1, 2)))
        else:
            ronde.allgather(np.ones((5, 2)))
    counts.append(len(records.warnings))
    ronde.shutdown()
    return counts[0], counts[1], counts[2]


def test_what_only_looks_different_is_at_most_one_warning() -> None:
    assert ranks.run(call_what_only_looks_different, 2) == [(0, 0, 1), (0, 0, 0)]
