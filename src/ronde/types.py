"""Element types and reductions, with the numbers of cpp/base/types.h."""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "Adasum",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "DType",
    "Kind",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
]


class DType(IntEnum):
    """The type of one element, named as NumPy names it. The numbers travel between ranks: never renumber."""

    bool = 0
    uint8 = 1
    uint16 = 2
    uint32 = 3
    uint64 = 4
    int8 = 5
    int16 = 6
    int32 = 7
    int64 = 8
    float16 = 9
    bfloat16 = 10
    float32 = 11
    float64 = 12
    complex64 = 13
    complex128 = 14

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEM_BYTES[self]


_ITEM_BYTES = (1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16)


class Kind(IntEnum):
    """The operation of a call, which ranks compare before they combine data. The numbers travel between ranks."""

    barrier = 0
    allreduce = 1
    reduce = 2
    reducescatter = 3
    allgather = 4
    broadcast = 5
    gather = 6
    scatter = 7
    alltoall = 8
    sendrecv = 9
    empty = 10


class ReduceOp(IntEnum):
    """How a collective combines the elements of all ranks: `ronde.Sum` is `ReduceOp.Sum`, and so on."""

    # The numbers travel between ranks: never renumber.
    Sum = 0
    Average = 1
    Min = 2
    Max = 3
    Product = 4
    BitAnd = 5
    BitOr = 6
    BitXor = 7
    Adasum = 8  # of whole vectors, by all-reduce only

    def __repr__(self) -> str:
        return f"ronde.{self.name}"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if spec else str(self)


Sum = ReduceOp.Sum
Average = ReduceOp.Average
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
BitAnd = ReduceOp.BitAnd
BitOr = ReduceOp.BitOr
BitXor = ReduceOp.BitXor
Adasum = ReduceOp.Adasum

# The kinds as global names, because Python 3.11 looks up a member of an enum more slowly.
Barrier = Kind.barrier
Allreduce = Kind.allreduce
Reducescatter = Kind.reducescatter
Allgather = Kind.allgather
Broadcast = Kind.broadcast
Alltoall = Kind.alltoall
