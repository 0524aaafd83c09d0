"""What simulated ranks submit: drawn from a seed, known to all, with the right outcome of everything.

A name, of a tensor or a group of them, is submitted several times by every rank; occurrence k of one rank belongs to
occurrence k of all others. Mostly it is what it was the time before. Sometimes it has another signature on all ranks,
or (where ranks may differ) on one, and now and then one rank is mistaken.

In some simulations ranks run out of data: time is divided into epochs, in each of which ranks submit every name a
number of times of their own, and then join.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from ronde.engine.messages import Request, TensorType
from ronde.types import DType, Kind, Max, Min, Sum

KINDS = (
    *[Kind.allreduce] * 4,
    Kind.allgather,
    Kind.broadcast,
    Kind.reducescatter,
    Kind.alltoall,
    Kind.barrier,
)
GROUPED = (Kind.allreduce, Kind.allgather, Kind.reducescatter)
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

    def response(self, absent: tuple[int, ...]) -> tuple[Request, tuple[int, ...]]:
        """The request and the rows that must stand in the response."""
        lowest = next(rank for rank in range(self.ranks) if rank not in absent)
        request = self.request(lowest)
        if request.kind == Kind.alltoall:
            return request, tuple(rows for rank in range(self.ranks) for rows in self.request(rank).splits)
        if request.kind != Kind.allgather:
            return request, ()
        usual = [each.rows for each in self.usual.tensors]
        odd = [each.rows for each in self.odd.tensors]
        rows = []
        for index in range(len(usual)):
            of_tensor = [usual[index]] * self.ranks
            of_tensor[self.odd_rank] = odd[index]
            for rank in absent:
                of_tensor[rank] = 0
            rows += of_tensor
        return request, tuple(rows)

    def culprits(self, absent: tuple[int, ...]) -> tuple[str, ...]:
        """What the reason of the failure must contain; nothing if there must be none."""
        lowest = next(rank for rank in range(self.ranks) if rank not in absent)
        request = self.request(lowest)
        name = f"{'group' if request.more else 'tensor'} '{request.name}'"
        if self.is_mistaken and self.usual == self.odd:
            return (name, "all ranks submitted broadcast with root")
        if self.is_mistaken:
            return (name, "rank 0 submitted", f"but rank {self.odd_rank or 1} ")
        if absent and request.kind == Kind.alltoall:
            return (name, f"rank {lowest} submitted alltoall, but rank {absent[0]} has joined")
        if request.kind == Kind.broadcast and request.root in absent:
            return (name, f"the root of the broadcast, rank {request.root}, has joined")
        return ()


@dataclass(frozen=True)
class Epoch:
    """The occurrences `begin` to `end` of every name; a rank makes the first `counts[rank]` of them, and then joins."""

    begin: int
    counts: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.begin + max(self.counts)

    def absent(self, occurrence: int) -> tuple[int, ...]:
        """The ranks that have run out of data before."""
        place = occurrence - self.begin
        return tuple(rank for rank, count in enumerate(self.counts) if count <= place)


@dataclass(frozen=True)
class Workload:
    """What happens in one simulation, apart from when."""

    ranks: int
    capacity: int
    in_steps: bool  # a rank waits for all of its tensors before it submits any of them again
    through_the_codec: bool
    operations: list[list[Operation]]  # by name and occurrence
    epochs: list[Epoch]
    has_joins: bool

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

    def absent(self, occurrence: int) -> tuple[int, ...]:
        """The ranks that have joined instead of submitting this occurrence of a name."""
        if not self.has_joins:
            return ()
        return next(epoch for epoch in self.epochs if occurrence < epoch.end).absent(occurrence)

    def value(self, index: int, occurrence: int) -> int:
        """What all ranks together must arrive at."""
        absent = set(self.absent(occurrence))
        return sum(
            self.contribution(rank, index, occurrence) for rank in range(self.ranks) if rank not in absent
        )


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
    has_joins = rng.random() < 0.3
    epochs = draw_epochs(rng, ranks, occurrences) if has_joins else [Epoch(0, (occurrences,) * ranks)]
    operations = [
        draw_operations(rng, ranks, Workload.name(index), epochs, changes, mistakes) for index in range(names)
    ]
    return Workload(
        ranks=ranks,
        capacity=rng.choice((0, 1, 2, names // 2, names - 1, names, 64, 64)),
        in_steps=rng.random() < 0.5,
        through_the_codec=ranks <= 64 and rng.random() < 0.5,
        operations=operations,
        epochs=epochs,
        has_joins=has_joins,
    )


def draw_epochs(rng: random.Random, ranks: int, occurrences: int) -> list[Epoch]:
    """About so many occurrences in one to three epochs; now and then nobody has any data at all."""
    epochs: list[Epoch] = []
    begin = 0
    for _ in range(rng.randint(1, 3)):
        most = rng.randint(0, max(occurrences // 2, 1))
        few = rng.sample(range(most + 1), min(most + 1, 3))
        epochs.append(Epoch(begin, tuple(rng.choices(few, k=ranks))))
        begin = epochs[-1].end
    return epochs


def draw_operations(
    rng: random.Random, ranks: int, name: str, epochs: list[Epoch], changes: float, mistakes: float
) -> list[Operation]:
    operation = draw_operation(rng, ranks, name)
    operations = []
    for epoch in epochs:
        for occurrence in range(epoch.begin, epoch.end):
            if rng.random() < changes:
                operation = change(rng, operation)
            is_mistaken = rng.random() < mistakes and not epoch.absent(occurrence)
            operations.append(make_mistake(rng, operation) if is_mistaken else operation)
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
    if kind in GROUPED and rng.random() < 0.3:
        shapes = [tuple(rng.choices(range(1, 9), k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
        request = replace(request, more=tuple(TensorType(rng.choice(DTYPES), shape) for shape in shapes))
    operation = Operation(ranks, request, rng.randrange(ranks), request)
    return change_odd(rng, operation) if rng.random() < 0.5 else operation


def with_rows(rng: random.Random, ranks: int, request: Request) -> Request:
    """The same with another first axis."""
    splits = tuple(rng.choices(range(3), k=ranks)) if request.kind == Kind.alltoall else ()
    rows = sum(splits) if splits else rng.randint(0, 9)
    more = [each._replace(shape=(rng.randint(0, 9), *each.shape[1:])) for each in request.more]
    return replace(request, shape=(rows, *request.shape[1:]), splits=splits, more=tuple(more))


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
        replace(odd, more=(*odd.more, TensorType(DType.int8, (1,)))),
        *(replace(odd, more=(*odd.more[1:], TensorType(DType.int8, (1,)))) for _ in odd.more[:1]),
    )
    return replace(operation, odd=rng.choice(mistakes), is_mistaken=True)
