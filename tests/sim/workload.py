"""What simulated ranks submit: drawn from a seed, known to all, with the right outcome of everything.

A name is submitted several times by every rank; occurrence k of one rank belongs to occurrence k of all others. Mostly
it is what it was the time before. Sometimes it has another signature on all ranks, or (where ranks may differ) on one,
and now and then one rank is mistaken.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property

from ronde.core.messages import Request
from ronde.types import DType, Kind, Max, Min, Sum

KINDS = (
    *[Kind.allreduce] * 4,
    Kind.allgather,
    Kind.broadcast,
    Kind.reducescatter,
    Kind.alltoall,
    Kind.barrier,
)
DTYPES = (DType.float32, DType.float64, DType.int64)
MOST_RANKS_FOR_ALLTOALL = 16  # its responses grow with their square


@dataclass(frozen=True)
class Operation:
    """One occurrence of a name: `odd` is what the odd rank submits, `usual` what all others do."""

    ranks: int
    usual: Request
    odd_rank: int
    odd: Request
    is_mistaken: bool = False

    def request(self, rank: int) -> Request:
        return self.odd if rank == self.odd_rank else self.usual

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """What must stand in the response."""
        requests = [self.request(rank) for rank in range(self.ranks)]
        if self.usual.kind == Kind.allgather:
            return tuple(request.rows for request in requests)
        if self.usual.kind == Kind.alltoall:
            return tuple(rows for request in requests for rows in request.splits)
        return ()

    @property
    def culprits(self) -> tuple[str, ...]:
        """What the reason of the failure must contain."""
        name = f"tensor '{self.usual.name}'"
        if self.usual == self.odd:
            return (name, "all ranks submitted broadcast with root")
        return (name, "rank 0 submitted", f"but rank {self.odd_rank or 1} ")


@dataclass(frozen=True)
class Workload:
    """What happens in one simulation, apart from when."""

    ranks: int
    capacity: int
    in_steps: bool  # a rank waits for all of its tensors before it submits any of them again
    through_the_codec: bool
    operations: list[list[Operation]]  # by name and occurrence

    @property
    def total(self) -> int:
        return sum(map(len, self.operations))

    @staticmethod
    def name(index: int) -> str:
        return f"t{index}"

    @staticmethod
    def index(name: str) -> int:
        return int(name[1:])

    @staticmethod
    def contribution(rank: int, index: int, occurrence: int) -> int:
        """What the rank's tensor holds."""
        return (rank * 31 + 7) * (occurrence + 1) + index * 1009

    def value(self, index: int, occurrence: int) -> int:
        """What all ranks together must arrive at."""
        return sum(self.contribution(rank, index, occurrence) for rank in range(self.ranks))


def draw_ranks(seed: int) -> int:
    """Mostly few ranks, because most mistakes show with few."""
    return random.Random(f"ranks of {seed}").choice((1, 2, 2, 2, 3, 3, 4, 4, 5, 8, 16, 64))


def draw_workload(rng: random.Random, ranks: int) -> Workload:
    few = ranks > 64
    names = (
        rng.randint(2, 4) if few else rng.choice((1, 2, 3, 5, 8, 12) if ranks > 8 else (1, 2, 3, 5, 8, 20))
    )
    occurrences = rng.randint(2, 3) if few else rng.randint(1, 8 if ranks > 8 else 20)
    mistakes, changes = rng.choice((0, 0, 0.03, 0.2)), rng.choice((0, 0, 0.03, 0.1, 0.3, 0.8))
    operations = [
        draw_operations(rng, ranks, Workload.name(index), occurrences, changes, mistakes)
        for index in range(names)
    ]
    return Workload(
        ranks=ranks,
        capacity=rng.choice((0, 1, 2, names // 2, names - 1, names, 64, 64)),
        in_steps=rng.random() < 0.5,
        through_the_codec=ranks <= 64 and rng.random() < 0.5,
        operations=operations,
    )


def draw_operations(
    rng: random.Random, ranks: int, name: str, occurrences: int, changes: float, mistakes: float
) -> list[Operation]:
    operation = draw_operation(rng, ranks, name)
    operations = []
    for _ in range(occurrences):
        if rng.random() < changes:
            operation = change(rng, operation)
        operations.append(make_mistake(rng, operation) if rng.random() < mistakes else operation)
    return operations


def draw_operation(rng: random.Random, ranks: int, name: str) -> Operation:
    kind = rng.choice(KINDS)
    if kind == Kind.alltoall and ranks > MOST_RANKS_FOR_ALLTOALL:
        kind = Kind.allreduce
    shape = () if kind == Kind.barrier else tuple(rng.choices(range(1, 9), k=rng.randint(0, 3)))
    request = Request(
        kind,
        name,
        rng.choice(DTYPES),
        shape,
        op=rng.choice((Sum, Min)) if kind in (Kind.allreduce, Kind.reducescatter) else Sum,
        root=rng.randrange(ranks) if kind == Kind.broadcast else -1,
        prescale=rng.choice((1.0, 0.5)) if kind == Kind.allreduce else 1.0,
    )
    if kind == Kind.alltoall:
        request = with_rows(rng, ranks, request)
    operation = Operation(ranks, request, rng.randrange(ranks), request)
    return change_odd(rng, operation) if rng.random() < 0.5 else operation


def with_rows(rng: random.Random, ranks: int, request: Request) -> Request:
    """The same with another first axis."""
    splits = tuple(rng.choices(range(3), k=ranks)) if request.kind == Kind.alltoall else ()
    rows = sum(splits) if splits else rng.randint(0, 9)
    return replace(request, shape=(rows, *request.shape[1:]), splits=splits)


def change_odd(rng: random.Random, operation: Operation) -> Operation:
    """Another number of rows on one rank, where that is allowed."""
    if operation.usual.kind not in (Kind.allgather, Kind.alltoall):
        return operation
    return replace(operation, odd=with_rows(rng, operation.ranks, operation.odd))


def change(rng: random.Random, operation: Operation) -> Operation:
    """A change that makes sense: of one rank's rows if possible, or of what the name stands for."""
    changed = change_odd(rng, operation)
    if changed != operation and rng.random() < 0.7:
        return changed
    return draw_operation(rng, operation.ranks, operation.usual.name)


def make_mistake(rng: random.Random, operation: Operation) -> Operation:
    """One rank submits something else, or all agree on a root that is not there."""
    usual, odd = operation.usual, operation.odd
    if operation.ranks == 1 or rng.random() < 0.1:
        usual = Request(Kind.broadcast, usual.name, usual.dtype, (3,), root=operation.ranks)
        return Operation(operation.ranks, usual, operation.odd_rank, usual, is_mistaken=True)
    mistakes = (
        replace(odd, dtype=DType.int8),
        replace(odd, shape=(*odd.shape, 2, 2)),
        replace(odd, kind=Kind.broadcast if odd.kind == Kind.allreduce else Kind.allreduce),
        replace(odd, op=Max),
        replace(odd, root=odd.root + 1),
        replace(odd, prescale=0.25),
        replace(odd, postscale=0.25),
        replace(odd, device="cuda"),
    )
    return replace(operation, odd=rng.choice(mistakes), is_mistaken=True)
