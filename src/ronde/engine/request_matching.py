"""Decides whether the requests of all ranks for one name match, and returns the rows of their response. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ronde.engine.messages import Request
from ronde.types import Kind

__all__ = ["find_problem", "response_rows"]

# The fields that must be the same on all ranks, in the order of comparison; "" is the kind.
_COMPARED = ("", "op", "root", "prescale_factor", "postscale_factor", "device")
_UNEVEN = (Kind.allgather, Kind.alltoall)  # ranks may have different numbers of rows


def _compared(request: Request) -> tuple[object, ...]:
    """Return the values that must be equal, in the order of _COMPARED, and then those of each tensor."""
    terms = request.kind, request.op, request.root, request.prescale, request.postscale, request.device
    if request.kind not in _UNEVEN:
        return *terms, request.dtype, request.shape, *request.more
    return *terms, *((each.dtype, _fixed(each.shape, is_uneven=True)) for each in request.tensors)


def _fixed(shape: tuple[int, ...], is_uneven: bool) -> tuple[int, ...]:
    """Return the part of a shape that must be the same on all ranks; an array without axes counts as one row."""
    return (max(len(shape), 1), *shape[1:]) if is_uneven else shape


def find_problem(by_name: dict[int, Request], absent: Sequence[int], names: Sequence[int]) -> str:
    """Return why the requests for one name do not match; "" if they do.

    `by_name`: in the order of ranks. `absent`: ranks that contribute nothing. `names`: of all ranks.
    """
    first, lowest = next(iter(by_name.items()))
    expected = _compared(lowest)
    for name, request in by_name.items():
        if request != lowest and _compared(request) != expected:
            return _describe_difference(first, lowest, name, request)
    if lowest.kind == Kind.broadcast and not 0 <= lowest.root < len(names):
        return (
            f"{_subject(lowest)}: all ranks submitted broadcast with root {lowest.root}, but there are only ranks 0 to "
            f"{len(names) - 1}"
        )
    if lowest.kind == Kind.broadcast and lowest.root in absent:
        root = names[lowest.root]
        return (
            f"{_subject(lowest)}: the root of the broadcast, rank {root}, has joined: it has nothing to send"
        )
    if lowest.kind == Kind.alltoall and absent:
        return (
            f"{_subject(lowest)}: rank {first} submitted alltoall, but rank {names[absent[0]]} has joined, so its "
            "number of rows is unknown"
        )
    if lowest.is_in_device_memory and absent:
        return (
            f"{_subject(lowest)}: rank {first} submitted it in {lowest.device}, but rank {names[absent[0]]} has "
            "joined and has no tensor in that memory to contribute"
        )
    if lowest.kind == Kind.alltoall:
        return _find_bad_splits(by_name)
    return ""


def _subject(request: Request) -> str:
    return f"{'group' if request.more else 'tensor'} '{request.name}'"


def _describe_difference(first: int, lowest: Request, rank: int, other: Request) -> str:
    text = f"{_subject(lowest)}: rank {first} submitted {lowest.kind.name}"
    if lowest.kind != other.kind:
        return f"{text}, but rank {rank} {other.kind.name}"
    if len(lowest.more) != len(other.more):
        return f"{text} of {len(lowest.tensors)} tensors, but rank {rank} of {len(other.tensors)}"
    is_uneven = lowest.kind in _UNEVEN
    for index, (ours, theirs) in enumerate(zip(lowest.tensors, other.tensors)):
        which = f" (tensor {index} of the group)" if lowest.more else ""
        if ours.dtype != theirs.dtype:
            return (
                f"{text} with dtype {ours.dtype.name}, but rank {rank} with dtype {theirs.dtype.name}{which}"
            )
        if _fixed(ours.shape, is_uneven) != _fixed(theirs.shape, is_uneven):
            which += " (only the first axis may differ)" if is_uneven else ""
            return f"{text} with shape {ours.shape}, but rank {rank} with shape {theirs.shape}{which}"
    terms = zip(_COMPARED, _compared(lowest), _compared(other))
    label, here, there = next(each for each in terms if each[1] != each[2])
    if label == "op":
        here, there = lowest.op.name, other.op.name
    return f"{text} with {label} {here}, but rank {rank} with {label} {there}"


def _find_bad_splits(by_name: dict[int, Request]) -> str:
    size = len(by_name)
    for rank, request in by_name.items():
        who = f"tensor '{request.name}': rank {rank} submitted alltoall with shape {request.shape}"
        splits = request.splits
        if not splits:
            if request.rows % size:
                return f"{who}, whose first axis cannot be divided equally among {size} ranks"
        elif len(splits) != size or min(splits) < 0 or sum(splits) != request.rows:
            return f"{who} and splits {splits}, which are not {size} numbers of rows that add up to {request.rows}"
    return ""


def response_rows(by_rank: dict[int, Request], size: int) -> tuple[int, ...]:
    """Return the rows of the response (see messages.Run); ranks that are missing in `by_rank` have no rows."""
    kind = next(iter(by_rank.values())).kind
    if kind == Kind.allgather:
        count = len(next(iter(by_rank.values())).tensors)
        rows = [
            [each.rows for each in by_rank[rank].tensors] if rank in by_rank else [0] * count
            for rank in range(size)
        ]
        return tuple(of_rank[index] for index in range(count) for of_rank in rows)
    if kind == Kind.alltoall:
        requests = [by_rank[rank] for rank in range(size)]
        equal = [request.splits or (request.rows // size,) * size for request in requests]
        return tuple(rows for splits in equal for rows in splits)
    return ()
