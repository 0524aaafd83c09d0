"""Element-wise combinations of the arrays of all tasks, in the order of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comm.splits import even_split
from ronde.comqueue.buffers import Buffers
from ronde.comqueue.packing import layout_of
from ronde.comqueue.task_group import TaskGroup
from ronde.errors import UsageError
from ronde.types import ReduceOp

__all__ = ["Combine", "piece_owners", "reduce_flat", "reduce_leaves"]

PIECE = 4096  # elements; of a reduction by a function, each piece has an owner

Array = NDArray[Any]
Combine = Callable[[Array, Array], Array]


def reduce_leaves(
    group: TaskGroup, leaves: Sequence[Array], op: ReduceOp | Combine, buffers: Buffers
) -> Iterator[Array]:
    """Return combinations of leaves, as new arrays. All tasks have leaves of the same dtypes and shapes."""
    layout = layout_of(leaves)
    flats = [buffers.empty(size, dtype) for size, dtype in zip(layout.sizes, layout.dtypes)]
    if len(leaves) == 1 and leaves[0].flags.c_contiguous:  # no need to copy it
        reduce_flat(group, leaves[0].reshape(-1), op, flats[0])
    else:
        layout.pack(leaves, flats)
        for flat in flats:
            reduce_flat(group, flat, op)
    return layout.parts(flats)


def reduce_flat(group: TaskGroup, array: Array, op: ReduceOp | Combine, out: Array | None = None) -> None:
    """Combine contiguous arrays of one axis. `out`: where the result goes (None: into `array`)."""
    if isinstance(op, ReduceOp):
        group.allreduce(array, op, out)
        return
    if out is not None:
        out[...] = array
    if group.num_tasks > 1:
        _reduce_by_pieces(group, array if out is None else out, op)


def piece_owners(length: int, num_tasks: int) -> list[int]:
    """Return how many elements each task combines: whole pieces of 4,096, the last one of the array perhaps shorter.

    Of p pieces, task i owns p // n + (i < p % n), in the order of tasks.
    """
    pieces = even_split(-(-length // PIECE), num_tasks)
    ends = [min(sum(pieces[: task + 1]) * PIECE, length) for task in range(num_tasks)]
    return [end - begin for begin, end in zip([0, *ends], ends)]


def _reduce_by_pieces(group: TaskGroup, flat: Array, combine: Combine) -> None:
    """Send each piece to its owner, which combines it in the order of tasks and sends the result to all."""
    counts = piece_owners(len(flat), group.num_tasks)
    mine = counts[group.task_id]
    parts = group.alltoall(flat, counts).reshape(group.num_tasks, mine)
    total = parts[0].copy()
    for part in parts[1:]:
        total = np.asarray(combine(total, part))
        if total.shape != part.shape:
            raise UsageError(
                f"the function that combines two arrays of shape {part.shape} returned one of shape {total.shape}: it "
                "must work element by element"
            )
    flat[:] = group.allgather(total.astype(flat.dtype, copy=False))
