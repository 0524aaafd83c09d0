"""What a call moves among the ranks of one host, counted in cache lines, and what is counted of any call. Pure.

Memory counts whole cache lines that move, as if each rank had a core with an endless cache. A line of an array counts
one when it is read and one when it returns to memory after the call, so a copy counts three bytes for each byte. Shared
memory stays in caches: a line of it counts one when it moves to another core, and one when a core invalidates the
copies of other cores.
"""

from __future__ import annotations

from dataclasses import dataclass

from ronde.bench.collective_messages import chunk_bytes

__all__ = [
    "COPY", "FILL", "LINE_BYTES", "READ", "REWRITE", "SMALL_BYTES", "TAKE", "TAKE_OVER", "WRITE", "JobShape", "Traffic",
    "in_host", "reduce_in_host", "reduce_scatter_in_host", "share_in_host", "whole_lines",
]  # fmt: skip

LINE_BYTES = 64
READ, WRITE, REWRITE = 1, 2, 1  # of a line of an array; a rewrite follows its read
COPY = READ + WRITE
# Of a line of shared memory, for its writer, for a reader, and for a reader that then writes to it.
FILL, TAKE, TAKE_OVER = 1, 1, 1


@dataclass(frozen=True)
class JobShape:
    """Hosts with equally many ranks, numbered host by host."""

    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class Traffic:
    """What one call of an algorithm costs, in counts.

    Attributes:
        sent_bytes: What all hosts together send to other hosts.
        busiest_bytes: What the busiest host sends or receives, whichever is more.
        lead_bytes: What a link carries before the last host begins to receive, where hosts pass data on.
        steps: How many messages between hosts follow one another.
        frames: How many messages, or segments of one, the busiest rank sends to and receives from other hosts.
        memory_bytes: What the processors of the busiest host move to and from memory, in whole lines.
        exchanges: How often all ranks of a host wait for one another.
        pieces: The number of pieces in which data cross between hosts while others move through memory (1: no overlap).
    """

    sent_bytes: int = 0
    busiest_bytes: int = 0
    lead_bytes: int = 0
    steps: int = 0
    frames: int = 0
    memory_bytes: int = 0
    exchanges: int = 0
    pieces: int = 1

    def then(self, later: Traffic) -> Traffic:
        """Return the traffic of two phases, one after the other."""
        return Traffic(
            self.sent_bytes + later.sent_bytes,
            self.busiest_bytes + later.busiest_bytes,
            self.lead_bytes + later.lead_bytes,
            self.steps + later.steps,
            self.frames + later.frames,
            self.memory_bytes + later.memory_bytes,
            self.exchanges + later.exchanges,
        )


def whole_lines(nbytes: int) -> int:
    """Return the bytes of the whole lines that hold `nbytes` bytes."""
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


# As in cpp/: `host_segment.h`, `host_segment.cc`, `in_host_reduce.cc`.
SMALL_BYTES = 4 << 10  # travel inside the announcement
STAGING_BYTES = 256 << 10
SMALLEST_WINDOW_BYTES = 16 << 10
WINDOWS_WANTED = 4


def in_host(operation: str, ranks: int, nbytes: int, is_symmetric: bool) -> Traffic:
    if ranks == 1:
        return Traffic(memory_bytes=0 if operation in ("allreduce", "broadcast") else COPY * nbytes)
    parts = chunk_bytes(nbytes, ranks)
    match operation:
        case "allreduce" | "reduce":
            return reduce_in_host(ranks, nbytes, is_symmetric, has_root=operation == "reduce")
        case "reducescatter":
            return reduce_scatter_in_host(ranks, parts, is_symmetric)
        case "allgather" | "gather":
            return share_in_host(ranks, parts, is_symmetric, has_root=operation == "gather")
        case "broadcast":
            return share_in_host(ranks, [nbytes] + [0] * (ranks - 1), is_symmetric)
    return _deal_in_host(ranks, nbytes, is_symmetric, dealers=ranks if operation == "alltoall" else 1)


def _deal_in_host(ranks: int, nbytes: int, is_symmetric: bool, dealers: int) -> Traffic:
    """Return the traffic of an all-to-all, or, with one dealer, of a scatter."""
    part = -(-nbytes // ranks)
    results = ranks * whole_lines(nbytes if dealers > 1 else part)
    arrays = READ * whole_lines(nbytes) * dealers + WRITE * results
    foreign = dealers * (ranks - 1) * whole_lines(part)
    is_small = part <= SMALL_BYTES // (ranks - 1)
    if is_symmetric and not is_small:
        offsets = LINE_BYTES * dealers * (ranks - 1)  # where the parts for others begin
        return Traffic(memory_bytes=arrays + TAKE * offsets, exchanges=2)
    filled = dealers * whole_lines((ranks - 1) * part) if is_small else foreign
    took_over = foreign if ranks == 2 or not is_small else 0
    return Traffic(
        memory_bytes=arrays + FILL * filled + TAKE * foreign + TAKE_OVER * took_over,
        exchanges=1 + (0 if is_small else _windows(part, _lane_bytes(ranks))),
    )


def _lane_bytes(ranks: int) -> int:
    return max(SMALL_BYTES, -(-2 * STAGING_BYTES // max(ranks, 2) // 4096) * 4096)


def _windows(nbytes: int, room: int) -> int:
    """Return in how many windows `nbytes` bytes of a rank pass through lanes with `room` bytes."""
    window = min(max(nbytes // WINDOWS_WANTED, SMALLEST_WINDOW_BYTES), room)
    return -(-nbytes // window)


def reduce_in_host(
    ranks: int, nbytes: int, is_symmetric: bool, has_root: bool = False, result: int = REWRITE
) -> Traffic:
    """Return the traffic of a reduction, with the result on all ranks or on one.

    Args:
        result: The cost of a line of the result; by default it replaces the input.
    """
    nbytes = whole_lines(nbytes)
    results = 1 if has_root else ranks
    arrays = (READ * ranks + result * results) * nbytes
    if nbytes <= SMALL_BYTES:
        read = nbytes * (ranks - 1) * results  # in the announcements of others
        filled = nbytes * (ranks - has_root)  # those that another rank has read since
        took_over = read if ranks == 2 else 0
        return Traffic(memory_bytes=arrays + TAKE * read + TAKE_OVER * took_over + FILL * filled, exchanges=1)
    if is_symmetric:
        return Traffic(memory_bytes=arrays, exchanges=2)
    foreign = nbytes * (ranks - 1) // ranks
    # The owner of a piece takes over the lanes that it reads, and leaves the result there; collecting takes them back.
    lanes = (TAKE + TAKE_OVER) * foreign * (ranks + results) + FILL * foreign * (ranks - results)
    return Traffic(
        memory_bytes=arrays + lanes, exchanges=1 + 2 * _windows(nbytes // ranks, _lane_bytes(ranks))
    )


def reduce_scatter_in_host(ranks: int, parts: list[int], is_symmetric: bool, result: int = WRITE) -> Traffic:
    sizes = [whole_lines(part) for part in parts]
    nbytes, total = sum(parts), sum(sizes)
    whole = whole_lines(nbytes)
    foreign = total * (ranks - 1)
    arrays = READ * whole * ranks + result * total
    if nbytes <= SMALL_BYTES:
        filled = min(whole * ranks, foreign)
        return Traffic(
            memory_bytes=arrays + FILL * filled + (TAKE + (TAKE_OVER if ranks == 2 else 0)) * foreign,
            exchanges=1,
        )
    if is_symmetric:
        return Traffic(memory_bytes=READ * total * ranks + result * total, exchanges=2)
    windows = _windows(max(parts), _lane_bytes(ranks))
    lanes = (FILL + TAKE + TAKE_OVER) * foreign
    return Traffic(memory_bytes=arrays + lanes, exchanges=1 + 2 * windows)


def share_in_host(
    ranks: int,
    parts: list[int],
    is_symmetric: bool,
    has_root: bool = False,
    result: int = WRITE,
    is_kept: bool = False,
    is_in_place: bool = False,
) -> Traffic:
    """Return the traffic of parts that all ranks get, or one.

    Args:
        result: The cost of a line of the result.
        is_in_place: Whether each rank has its part where the result will be, as a broadcast's root always has.
        is_kept: Whether each rank has just written its part.
    """
    sizes = [whole_lines(part) for part in parts]
    total, largest = sum(sizes), max(parts)
    is_in_place = is_in_place or (not has_root and parts[1:] == [0] * (ranks - 1))
    own = sizes[0] if has_root else total
    foreign = total - own if has_root else total * (ranks - 1)
    results = whole_lines(sum(parts)) * (1 if has_root else ranks) - (own if is_in_place else 0)
    arrays = result * results
    if is_symmetric and largest > SMALL_BYTES:
        copied = 0 if is_in_place or is_kept else own
        return Traffic(memory_bytes=arrays + READ * (copied + foreign), exchanges=2)
    staged = total - own if has_root else total
    read = 0 if is_kept else total
    is_sole_reader = ranks == 2 or (has_root and largest > SMALL_BYTES)
    lanes = FILL * staged + (TAKE + (TAKE_OVER if is_sole_reader else 0)) * foreign
    windows = 0 if largest <= SMALL_BYTES else _windows(largest, ranks * _lane_bytes(ranks))
    return Traffic(memory_bytes=arrays + READ * read + lanes, exchanges=1 + 2 * windows)
