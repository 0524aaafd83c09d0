"""What each algorithm of a collective moves: bytes between hosts, bytes through the memory of a host, and how often
ranks wait for each other. Pure.

The choice of an algorithm is that of the native code itself.

A size in bytes is that of the array of a rank; in an all-gather and a gather, that of all ranks' arrays together.
`bench/traffic_counts` says what is counted, and has the phases inside a host.
`cpp/tests/traffic` counts all this in the real algorithms; the model agrees within 3 % where the parts of the ranks
have at least a line each. `bench/cost_model` converts counts to seconds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ronde import _native
from ronde.bench import collective_messages as messages
from ronde.bench.collective_messages import SEGMENT_BYTES, Message
from ronde.bench.traffic_counts import (
    COPY,
    FILL,
    LINE_BYTES,
    READ,
    REWRITE,
    SMALL_BYTES,
    TAKE,
    TAKE_OVER,
    WRITE,
    JobShape,
    Traffic,
    in_host,
    reduce_in_host,
    reduce_scatter_in_host,
    share_in_host,
    whole_lines,
)

__all__ = [
    "OPERATIONS",
    "JobShape",
    "Traffic",
    "algorithms_of",
    "least_traffic",
    "select_allreduce",
    "traffic_of",
    "usual_algorithm",
]

OPERATIONS = (
    "allreduce", "reducescatter", "allgather", "broadcast", "reduce", "gather", "scatter", "alltoall",
)  # fmt: skip
IN_HOST, HIERARCHICAL, OVER_LINKS = "in-host", "hierarchical", "over links"
_ALGORITHMS = (
    "auto",
    "direct",
    "ring",
    "doubling",
    HIERARCHICAL,
    IN_HOST,
)  # the numbers of cpp/algorithms/select.h

# As in cpp/: `hierarchical.cc`, `over_links.h`, `direct.cc`.
WHOLE_BYTES = 16 << 10  # what rails may send that carry whole messages
DIRECT_SCRATCH_BYTES, DIRECT_DEPTH, SMALLEST_SEGMENT_BYTES = 32 << 20, 8, 32 << 10
# And of `hierarchical_pieces.cc`.
FEWEST_PIECES, SMALLEST_PIECE_BYTES, SMALLEST_PIECE_SEGMENT_BYTES = 16, 256 << 10, 32 << 10
LAG = 2

THROUGH_PIPE = FILL + TAKE + TAKE_OVER  # a message between two ranks of a host
PIPE_BYTES = 8 * LINE_BYTES  # of each such message: its frame, and the pipe's counters
FROM_CARD = READ  # a message from another host
SHARD_BYTES = 256  # shards of an array are multiples of it


def algorithms_of(operation: str, shape: JobShape) -> tuple[str, ...]:
    """Return the algorithms that can carry the operation, by the names of `allreduce_algorithm` where it has them."""
    if shape.hosts == 1:
        return (IN_HOST,)
    flat = tuple(messages.ALLREDUCE) if operation == "allreduce" else (OVER_LINKS,)
    if shape.ranks_per_host == 1:
        return flat
    if operation == "broadcast":
        return (HIERARCHICAL,)
    return flat if operation in ("gather", "scatter", "alltoall") else (HIERARCHICAL, *flat)


def select_allreduce(shape: JobShape, nbytes: int) -> str:
    """Return the algorithm that `auto` takes for a sum of float32 values, with the default sizes."""
    return _ALGORITHMS[_native.select_allreduce(nbytes, shape.ranks, shape.hosts)]


def usual_algorithm(operation: str, shape: JobShape, nbytes: int) -> str:
    """Return the algorithm that carries the operation unless a setting says otherwise."""
    if operation == "allreduce":
        return select_allreduce(shape, nbytes)
    return algorithms_of(operation, shape)[0]


def traffic_of(
    operation: str, algorithm: str, shape: JobShape, nbytes: int, is_symmetric: bool = False
) -> Traffic:
    """Return what one call moves. `is_symmetric`: whether all arrays are in symmetric memory."""
    if algorithm == IN_HOST:
        return in_host(operation, shape.ranks_per_host, nbytes, is_symmetric)
    if algorithm == HIERARCHICAL:
        return _hierarchical(operation, shape, nbytes, is_symmetric)
    announcement = Traffic(exchanges=1 if shape.ranks_per_host > 1 else 0)
    return announcement.then(_over_links(operation, algorithm, shape, nbytes))


def _messages(operation: str, algorithm: str, size: int, nbytes: int, rails: int) -> Iterable[Message]:
    match operation:
        case "allreduce":
            return messages.ALLREDUCE[algorithm](size, nbytes)
        case "reducescatter" | "alltoall":
            return messages.pairwise(size, nbytes)
        case "allgather":
            return messages.share(size, nbytes)
        case "broadcast":
            return messages.broadcast(size, nbytes)
        case "reduce":
            return messages.reduce(size, nbytes, rails)
        case "scatter":
            return (
                (step, receiver, sender, size)
                for step, sender, receiver, size in messages.gather(size, nbytes)
            )
    return messages.gather(size, nbytes)


def _segment_bytes(algorithm: str, operation: str, size: int) -> int | None:
    """Return the largest message; None: messages are not cut."""
    if algorithm == "direct" or operation in ("reducescatter", "reduce"):
        return min(SEGMENT_BYTES, max(DIRECT_SCRATCH_BYTES // (DIRECT_DEPTH * size), SMALLEST_SEGMENT_BYTES))
    return SEGMENT_BYTES if algorithm == "ring" or operation in ("allgather", "broadcast") else None


def _over_links(
    operation: str, algorithm: str, shape: JobShape, nbytes: int, rails: int = 1, is_cached: bool = False
) -> Traffic:
    """Return the traffic among all ranks as if each pair had a link.

    Args:
        rails: How many such groups share the hosts.
        is_cached: Whether the ranks have just written their input.
    """
    segment_bytes = _segment_bytes(algorithm, operation, shape.ranks)
    out, into = [0] * shape.hosts, [0] * shape.hosts
    memory = _own_memory(operation, algorithm, shape, nbytes, rails, is_cached)
    frames = [0] * shape.ranks
    steps = 0
    for step, sender, receiver, size in _messages(operation, algorithm, shape.ranks, nbytes, rails):
        here, there = sender // shape.ranks_per_host, receiver // shape.ranks_per_host
        lines = whole_lines(size)
        memory[there] += _arrival(operation, algorithm, step, shape.ranks, is_cached) * lines
        if here == there:
            memory[here] += THROUGH_PIPE * lines + PIPE_BYTES
            continue
        memory[there] += FROM_CARD * lines
        pieces = 1 if segment_bytes is None else max(-(-size // segment_bytes), 1)
        frames[sender] += pieces
        frames[receiver] += pieces
        out[here] += size
        into[there] += size
        steps = max(steps, step + 1)
    lead = (steps - 1) * min(SEGMENT_BYTES, nbytes) if operation == "broadcast" else 0
    return Traffic(sum(out), max(out + into), lead, steps, max(frames), max(memory))


def _own_memory(
    operation: str, algorithm: str, shape: JobShape, nbytes: int, rails: int, is_cached: bool
) -> list[int]:
    """Return for each host what its ranks move without messages: their input, and the results that they leave alone."""
    whole, part = whole_lines(nbytes), whole_lines(-(-nbytes // shape.ranks))
    read = 0 if is_cached else READ
    match operation:
        case "allreduce" if algorithm == "doubling":
            mine, of_root = (read + (0 if is_cached else REWRITE) + WRITE) * whole, 0  # with scratch
        case "allreduce":
            mine, of_root = read * whole + (0 if is_cached else REWRITE) * part, 0
        case "reduce":
            is_one_step = shape.ranks <= 2 or nbytes <= messages.SMALL_REDUCE_BYTES // rails
            mine, of_root = read * whole, REWRITE * (whole if is_one_step else part)
        case "reducescatter" | "alltoall":
            mine, of_root = read * whole + WRITE * part, 0
        case "allgather":
            mine, of_root = COPY * part, 0
        case "gather":
            mine, of_root = READ * part, WRITE * part
        case "scatter":
            mine, of_root = 0, READ * whole + WRITE * part
        case _:
            mine, of_root = 0, READ * whole
    return [shape.ranks_per_host * mine + (of_root if host == 0 else 0) for host in range(shape.hosts)]


def _arrival(operation: str, algorithm: str, step: int, ranks: int, is_cached: bool) -> int:
    """Return what a line of a message costs where it arrives: new memory, or where its receiver has had its input."""
    if operation == "allreduce" and algorithm == "doubling":
        return 0
    is_result = step > 0 if algorithm == "direct" or operation == "reduce" else step >= ranks - 1
    if operation == "allreduce" and is_result:
        return 0 if is_cached else REWRITE
    return REWRITE if operation == "reduce" and is_result and not is_cached else WRITE


def _shards(nbytes: int, ranks: int) -> list[int]:
    """Return the sizes of the parts of an array that the rails of a host carry."""
    units = -(-nbytes // SHARD_BYTES)
    ends = [min(units * index // ranks * SHARD_BYTES, nbytes) for index in range(ranks + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _piece_count(operation: str, shape: JobShape, nbytes: int) -> int:
    """Return in how many pieces the hierarchical algorithm moves an array; 1: as a whole."""
    largest = nbytes // shape.ranks
    smallest = max(SMALLEST_PIECE_SEGMENT_BYTES, whole_lines(SMALLEST_PIECE_BYTES // shape.ranks))
    is_whole = operation == "allreduce" and select_allreduce(JobShape(shape.hosts, 1), nbytes) != "direct"
    if operation == "broadcast" or is_whole or largest < FEWEST_PIECES * smallest:
        return 1
    wanted = largest // FEWEST_PIECES // LINE_BYTES * LINE_BYTES
    fair = DIRECT_SCRATCH_BYTES // (DIRECT_DEPTH * shape.hosts) // LINE_BYTES * LINE_BYTES
    return -(-largest // min(max(wanted, smallest), max(smallest, min(SEGMENT_BYTES, fair))))


def _hierarchical(operation: str, shape: JobShape, nbytes: int, is_symmetric: bool) -> Traffic:
    pieces = _piece_count(operation, shape, nbytes)
    if pieces == 1:
        return _hierarchical_phases(operation, shape, nbytes, is_symmetric)
    one = _hierarchical_phases(operation, shape, nbytes // pieces, is_symmetric, is_piece=True)
    return Traffic(
        sent_bytes=one.sent_bytes * pieces,
        busiest_bytes=one.busiest_bytes * pieces,
        steps=one.steps,
        frames=one.frames * pieces,
        memory_bytes=one.memory_bytes * pieces - _reused(operation, shape, nbytes, pieces),
        exchanges=one.exchanges * pieces,
        pieces=pieces,
    )


def _reused(operation: str, shape: JobShape, nbytes: int, pieces: int) -> int:
    """Return the memory traffic saved by pieces that reuse the memory of earlier ones, which is still in the cache."""
    hosts, piece = shape.hosts, nbytes // pieces
    contributions = piece * (hosts - 1) // (1 if operation == "reduce" and hosts == 2 else hosts)
    sums = {"reduce": 2 * piece, "reducescatter": piece}  # of reduce, with results
    if operation not in ("allreduce", *sums):
        return 0
    kept = DIRECT_DEPTH + LAG + 1
    return WRITE * (contributions * (pieces - DIRECT_DEPTH) + sums.get(operation, 0) * (pieces - kept))


def _hierarchical_phases(
    operation: str, shape: JobShape, nbytes: int, is_symmetric: bool, is_piece: bool = False
) -> Traffic:
    """Return the traffic of an array, or of a piece of one, which takes the algorithms of large arrays."""
    ranks = shape.ranks_per_host
    shards = _shards(nbytes, ranks)
    # In symmetric memory other ranks read this one's array, so that its core has not yet seen all of it.
    result = WRITE if is_symmetric and nbytes > SMALL_BYTES else REWRITE
    match operation:
        case "allreduce" if nbytes <= min(SMALL_BYTES, WHOLE_BYTES // ranks):
            inside = reduce_in_host(ranks, nbytes, is_symmetric)
            return inside.then(_on_rails("allreduce", shape, [nbytes] * ranks))
        case "allreduce":
            inside = reduce_scatter_in_host(ranks, shards, is_symmetric, REWRITE)
            across = _on_rails("allreduce", shape, shards, is_piece)
            shared = share_in_host(ranks, shards, is_symmetric, result=result, is_kept=True, is_in_place=True)
            return inside.then(across).then(shared)
        case "reduce" if nbytes <= SMALL_BYTES:
            inside = reduce_in_host(ranks, nbytes, is_symmetric, has_root=True, result=WRITE)
            return inside.then(_between_leaders("reduce", shape, nbytes, is_cached=True))
        case "reduce":
            inside = reduce_scatter_in_host(ranks, shards, is_symmetric)
            across = _on_rails("reduce", shape, shards)
            # Between hosts, results do not replace an input; inside one host they do.
            results = Traffic(
                memory_bytes=(WRITE - REWRITE) * nbytes // (1 if shape.hosts == 2 else shape.hosts)
            )
            shared = share_in_host(ranks, shards, False, has_root=True, result=result, is_kept=True)
            return inside.then(across).then(results).then(shared)
        case "reducescatter":
            inside = _repeated(
                reduce_scatter_in_host(
                    ranks, messages.chunk_bytes(nbytes // shape.hosts, ranks), is_symmetric
                ),
                shape.hosts,
            )
            if nbytes <= SMALL_BYTES:
                inside = reduce_in_host(ranks, nbytes, is_symmetric, result=WRITE)
            return inside.then(_on_rails("reducescatter", shape, messages.chunk_bytes(nbytes, ranks)))
        case "allgather":
            block = nbytes // shape.ranks
            share = share_in_host(ranks, [block] * ranks, False, is_kept=True, is_in_place=is_piece)
            shares = _repeated(share, shape.hosts)
            return _on_rails("allgather", shape, messages.chunk_bytes(nbytes, ranks)).then(shares)
    segments = max(-(-nbytes // SEGMENT_BYTES), 1)
    share = share_in_host(ranks, [nbytes // segments] + [0] * (ranks - 1), is_symmetric, is_kept=True)
    between = Traffic(exchanges=1).then(_between_leaders("broadcast", shape, nbytes))
    return replace(between.then(_repeated(share, segments)), pieces=segments)


def _between_leaders(operation: str, shape: JobShape, nbytes: int, is_cached: bool = False) -> Traffic:
    return _over_links(operation, OVER_LINKS, JobShape(shape.hosts, 1), nbytes, is_cached=is_cached)


def _on_rails(operation: str, shape: JobShape, shards: list[int], is_piece: bool = False) -> Traffic:
    """Return the traffic of all rails together. `shards`: what each carries."""
    rail = JobShape(shape.hosts, 1)
    rails = shape.ranks_per_host
    is_cached = operation != "allgather"
    together = Traffic()
    for nbytes, count in Counter(shards).items():
        algorithm = "direct" if is_piece else select_allreduce(rail, nbytes * rails)
        if operation != "allreduce":
            algorithm = OVER_LINKS
        one = _over_links(operation, algorithm, rail, nbytes, rails, is_cached)
        together = Traffic(
            sent_bytes=together.sent_bytes + one.sent_bytes * count,
            busiest_bytes=together.busiest_bytes + one.busiest_bytes * count,
            steps=max(together.steps, one.steps),
            frames=max(together.frames, one.frames),
            memory_bytes=together.memory_bytes + one.memory_bytes * count,
            exchanges=1,  # the announcement of the call
        )
    return together


def _repeated(once: Traffic, times: int) -> Traffic:
    return Traffic(memory_bytes=once.memory_bytes * times, exchanges=once.exchanges * times)


def least_traffic(operation: str, shape: JobShape, nbytes: int) -> Traffic:
    """Return the least that any algorithm can move: `sent_bytes`, `busiest_bytes` and `memory_bytes` each for itself.

    Each host can first combine what its own ranks have, and distribute what it gets among them. So a sum needs one
    array from each host, and a copy one array for each host. An all-reduce is a reduce-scatter and an all-gather of the
    hosts' sums. Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 69(2),
    2009, section 2. Within a host, each input is read once and each result written once. The result of a reduction may
    replace an input.
    """
    hosts, ranks = shape.hosts, shape.ranks_per_host
    others = hosts - 1
    local_root = nbytes if hosts == 1 else nbytes // hosts
    results = {
        "allreduce": (2 * others * nbytes, 2 * others * nbytes // hosts, (READ + REWRITE) * nbytes * ranks),
        "reducescatter": (
            others * nbytes, others * nbytes // hosts, READ * nbytes * ranks + WRITE * nbytes // hosts,
        ),
        "allgather": (others * nbytes, others * nbytes // hosts, COPY * nbytes * ranks),
        "broadcast": (others * nbytes, nbytes if others else 0, COPY * nbytes * (ranks - 1)),
        "reduce": (others * nbytes, nbytes if others else 0, READ * nbytes * ranks + REWRITE * nbytes),
        "gather": (others * nbytes // hosts, others * nbytes // hosts, COPY * local_root),
        "scatter": (others * nbytes // hosts, others * nbytes // hosts, COPY * local_root),
        "alltoall": (
            ranks * nbytes * others, ranks * nbytes * others // hosts, COPY * nbytes * ranks,
        ),
    }  # fmt: skip
    sent, busiest, memory = results[operation]
    if shape.ranks == 1:
        memory = in_host(operation, 1, nbytes, is_symmetric=False).memory_bytes
    return Traffic(
        sent,
        busiest,
        steps=int(hosts > 1),
        frames=int(hosts > 1),
        memory_bytes=memory,
        exchanges=int(ranks > 1),
    )
