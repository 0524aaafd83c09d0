"""`ronde.comqueue`: iterative computation, as a queue of compute and communicate steps over named objects.

    from ronde.comqueue import iterate

    def step(c):
        moved = c.sum(gradient(c.data, c.state.weights))
        c.state.weights -= 0.1 * moved
        c.stop_if(abs(moved).max() < 1e-6)

    result = iterate(step, data=rows, state={"weights": start}, max_iter=100, on="local:2")

`iterate` runs one step function; `IterativeComQueue`, on which it is built, runs a queue of functions. docs/comqueue.md
explains both.
"""

from __future__ import annotations

from ronde.comqueue.block_sums import SumBlocks
from ronde.comqueue.functions import (
    MAX,
    MIN,
    SUM,
    AllGather,
    AllReduce,
    Barrier,
    Broadcast,
    ComContext,
    CommunicateFunction,
    CompareCriterionFunction,
    CompleteResultFunction,
    ComputeFunction,
    Gather,
    ReduceScatter,
)
from ronde.comqueue.iteration import IterationResult, IterationStep, iterate
from ronde.comqueue.partitions import LocatedRows, Partitions, RowBlocks
from ronde.comqueue.queue import ComQueue, IterativeComQueue
from ronde.comqueue.read import read
from ronde.comqueue.task_group import TaskGroup
from ronde.data.rows import RowSource, StreamedSource

__all__ = [
    "MAX",
    "MIN",
    "SUM",
    "AllGather",
    "AllReduce",
    "Barrier",
    "Broadcast",
    "ComContext",
    "ComQueue",
    "CommunicateFunction",
    "CompareCriterionFunction",
    "CompleteResultFunction",
    "ComputeFunction",
    "Gather",
    "IterationResult",
    "IterationStep",
    "IterativeComQueue",
    "LocatedRows",
    "Partitions",
    "ReduceScatter",
    "RowBlocks",
    "RowSource",
    "SumBlocks",
    "StreamedSource",
    "TaskGroup",
    "iterate",
    "read",
]
