"""Programs for ranks: every operation on arrays of every type, shape and layout, with NumPy as the oracle.

All ranks draw the same examples, because they seed alike. Each knows what every rank passes, computes with NumPy
what must come out, and compares. Sums and products of floats are exact for the values drawn, in whatever order.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from tests.ranks.arithmetic import DTYPES, UFUNCS, Array, reduced, supports, values

import ronde

LAYOUTS = ("plain", "strided", "fortran", "reversed", "read-only", "symmetric", "symmetric, shifted")
OUTS = ("none", *(layout for layout in LAYOUTS if layout != "read-only"))
# Around the sizes at which algorithms and chunks change.
LARGE = (1000, 4096, 16384, 32767, 65536, 65537, 100_003, 524_289)
SCRATCH_BYTES = 16 * (max(LARGE) + 64)
MOST_RANKS = 4


@dataclass(frozen=True)
class Case:
    """One example: the same on all ranks, except where it has one entry per rank."""

    dtype: str
    op: Any
    shape: tuple[int, ...]
    seed: int
    root: int
    rows: tuple[int, ...]  # first dimensions, per rank
    splits: tuple[tuple[int, ...], ...]  # rows from rank to rank
    layouts: tuple[str, ...]  # of the input, per rank
    outs: tuple[str, ...]  # of the output, per rank


class Tester:
    """One rank, and the memory in which it lays out what it passes."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.rank: int = world.rank
        self.size: int = world.size
        self._scratch = [world.empty(SCRATCH_BYTES, np.uint8) for _ in range(2)]

    def lay_out(self, array: Array, layout: str, scratch: int = 0) -> Array:
        """The same values in memory of that layout."""
        if array.ndim and layout == "strided":
            spread = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
            laid_out = spread[..., ::2]
            laid_out[...] = array
            return laid_out
        if layout == "fortran":
            return np.array(array, order="F")
        if array.ndim and layout == "reversed":
            return array[::-1].copy()[::-1]
        if layout.startswith("symmetric"):
            start = 16 * (1 + self.rank) if layout == "symmetric, shifted" else 0
            memory: Array = self._scratch[scratch][start : start + array.nbytes]
            laid_out = memory.view(array.dtype).reshape(array.shape)
            laid_out[...] = array
            return laid_out
        copy = array.copy()
        copy.flags.writeable = layout != "read-only"
        return copy

    def out(self, case: Case, expected: Array) -> Array | None:
        """An output, full of something else, or None."""
        layout = case.outs[self.rank]
        return None if layout == "none" else self.lay_out(np.ones_like(expected), layout, scratch=1)

    def check(self, result: Any, expected: Array, out: Array | None = None) -> None:
        assert isinstance(result, np.ndarray), type(result)
        assert out is None or result is out
        assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
        assert result.shape == expected.shape, (result.shape, expected.shape)
        wide = (
            (result.astype(np.float32), expected.astype(np.float32))
            if result.dtype == ml_dtypes.bfloat16
            else (result, expected)
        )
        np.testing.assert_array_equal(*wide)

    def inputs(self, case: Case, shapes: list[tuple[int, ...]] | None = None, op: Any = None) -> list[Array]:
        """What every rank passes."""
        shapes = shapes or [case.shape] * self.size
        return [values(case.dtype, shapes[rank], case.seed, rank, op) for rank in range(self.size)]

    def pass_mine(self, case: Case, inputs: list[Array]) -> Array:
        return self.lay_out(inputs[self.rank], case.layouts[self.rank])

    def with_rows(self, case: Case) -> list[tuple[int, ...]]:
        return [(rows, *case.shape[1:]) for rows in case.rows[: self.size]]

    # One method per operation

    def allreduce(self, case: Case) -> None:
        inputs = self.inputs(case, op=case.op)
        expected = reduced(inputs, case.op)
        out = self.out(case, expected)
        x = self.pass_mine(case, inputs)
        self.check(self.world.allreduce(x, op=case.op, out=out), expected, out)
        self.check(x, inputs[self.rank])  # nothing has happened to the input

    def allreduce_in_place(self, case: Case) -> None:
        inputs = self.inputs(case, op=case.op)
        layouts = ["plain" if layout == "read-only" else layout for layout in case.layouts]
        x = self.lay_out(inputs[self.rank], layouts[self.rank])
        self.check(self.world.allreduce(x, op=case.op, out=x), reduced(inputs, case.op), x)

    def reduce(self, case: Case) -> None:
        inputs = self.inputs(case, op=case.op)
        expected = reduced(inputs, case.op)
        root = case.root % self.size
        out = self.out(case, expected) if self.rank == root else None
        result = self.world.reduce(self.pass_mine(case, inputs), root, op=case.op, out=out)
        if self.rank == root:
            self.check(result, expected, out)
        else:
            assert result is None

    def reducescatter(self, case: Case) -> None:
        if not case.shape:
            return
        inputs = self.inputs(case, op=case.op)
        expected = np.array_split(reduced(inputs, case.op), self.size)[self.rank]
        out = self.out(case, expected)
        self.check(self.world.reducescatter(self.pass_mine(case, inputs), op=case.op, out=out), expected, out)

    def allgather(self, case: Case) -> None:
        inputs = self.inputs(case, self.with_rows(case))
        expected = np.concatenate(inputs)
        out = self.out(case, expected)
        self.check(self.world.allgather(self.pass_mine(case, inputs), out=out), expected, out)

    def gather(self, case: Case) -> None:
        inputs = self.inputs(case, self.with_rows(case))
        expected = np.concatenate(inputs)
        root = case.root % self.size
        out = self.out(case, expected) if self.rank == root else None
        result = self.world.gather(self.pass_mine(case, inputs), root, out=out)
        if self.rank == root:
            self.check(result, expected, out)
        else:
            assert result is None

    def broadcast(self, case: Case) -> None:
        inputs = self.inputs(case)
        root = case.root % self.size
        out = self.out(case, inputs[root])
        self.check(self.world.broadcast(self.pass_mine(case, inputs), root, out=out), inputs[root], out)

    def scatter(self, case: Case) -> None:
        if not case.shape:
            return
        inputs = self.inputs(case)
        root = case.root % self.size
        expected = np.array_split(inputs[root], self.size)[self.rank]
        out = self.out(case, expected)
        x = self.pass_mine(case, inputs) if self.rank == root else None
        self.check(self.world.scatter(x, root, out=out), expected, out)

    def alltoall(self, case: Case) -> None:
        splits = [list(row[: self.size]) for row in case.splits[: self.size]]
        inputs = self.inputs(case, [(sum(row), *case.shape[1:]) for row in splits])
        parts = [np.split(x, np.cumsum(row)[:-1])[self.rank] for x, row in zip(inputs, splits)]
        expected = np.concatenate(parts)
        out = self.out(case, expected)
        self.check(
            self.world.alltoall(self.pass_mine(case, inputs), splits[self.rank], out=out), expected, out
        )

    def alltoall_evenly(self, case: Case) -> None:
        shape = (self.size * case.rows[0], *case.shape[1:])
        inputs = self.inputs(case, [shape] * self.size)
        expected = np.concatenate([np.split(x, self.size)[self.rank] for x in inputs])
        self.check(self.world.alltoall(self.pass_mine(case, inputs)), expected)

    def send_and_recv(self, case: Case) -> None:
        """Round the table: everyone sends to the right; odd ranks receive first."""
        if self.size == 1:
            return
        inputs = self.inputs(case)
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        layout = case.layouts[left].replace("read-only", "plain")
        x = self.lay_out(np.ones_like(inputs[left]), layout, scratch=1)
        mine = self.pass_mine(case, inputs)
        if self.rank % 2 == 0:
            self.world.send(mine, right, case.root)
        self.check(self.world.recv(x, left, case.root), inputs[left], x)
        if self.rank % 2 == 1:
            self.world.send(mine, right, case.root)


OPERATIONS: dict[str, Callable[[Tester, Case], None]] = {
    name: method
    for name, method in vars(Tester).items()
    if name.startswith(("all", "re", "ga", "br", "sc", "se"))
}


SHAPES: tuple[Callable[[random.Random], tuple[int, ...]], ...] = (
    lambda rng: tuple(rng.choices(range(6), k=rng.randint(0, 4))),
    lambda rng: (rng.choice(LARGE),),
    lambda rng: (rng.choice((1, 3, 128)), rng.choice((1, 256, 1001))),
)


def draw_case(rng: random.Random) -> Case:
    dtype = rng.choice(DTYPES)
    shape = rng.choice(SHAPES)(rng)
    is_wide = np.prod(shape[1:]) >= 100

    def rows() -> int:
        return rng.randint(0, 5) if is_wide or rng.random() < 0.5 else rng.choice((100, 1000))

    return Case(
        dtype=dtype,
        op=rng.choice([op for op in UFUNCS if supports(dtype, op)]),
        shape=shape,
        seed=rng.getrandbits(32),
        root=rng.randrange(MOST_RANKS),
        rows=draw_per_rank(rng, rows),
        splits=draw_per_rank(rng, lambda: draw_per_rank(rng, rows)),
        layouts=draw_per_rank(rng, lambda: rng.choice(LAYOUTS)),
        outs=draw_per_rank(rng, lambda: rng.choice(OUTS)),
    )


def draw_per_rank(rng: random.Random, draw: Callable[[], Any]) -> tuple[Any, ...]:
    """One for each rank, or the same for all."""
    if rng.random() < 0.5:
        return (draw(),) * MOST_RANKS
    return tuple(draw() for _ in range(MOST_RANKS))


def agrees_with_numpy(examples: int, operations: Sequence[str] = tuple(OPERATIONS)) -> int:
    """The program: so many examples of each operation. Returns how many were compared."""
    ronde.init()
    tester = Tester(ronde.world())
    compared = sum(compare(tester, name, examples) for name in operations)
    ronde.shutdown()
    return compared


def compare(tester: Tester, name: str, examples: int) -> int:
    for example in range(examples):
        case = draw_case(random.Random(f"{name} {example}"))
        try:
            OPERATIONS[name](tester, case)
        except Exception:
            raise AssertionError(f"{name} of {case}:\n{traceback.format_exc()}") from None
    return examples
