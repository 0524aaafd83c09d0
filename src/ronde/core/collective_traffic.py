"""What each algorithm of a collective moves: bytes between hosts, bytes through the memory of a host, and how often
ranks wait for each other. Pure.

A size in bytes is that of the array of a rank; in an all-gather and a gather, that of all ranks' arrays together.
Memory counts cache lines as the processor moves them: a line read is one, a line written two (fetched, then written
back), and one if it was read just before. So a copy counts three bytes for each byte. `core/cost_model` converts the
counts to seconds.
"""

from __future__ import annotations

from collections.abc import Iterable

from ronde.core import collective_messages as messages
from ronde.core.collective_messages import SEGMENT_BYTES, Message
from ronde.light_dataclasses import dataclass

__all__ = [
    "OPERATIONS",
    "JobShape",
    "Traffic",
    "algorithms_of",
    "least_traffic",
    "select_allreduce",
    "traffic_of",
]

OPERATIONS = (
    "allreduce", "reducescatter", "allgather", "broadcast", "reduce", "gather", "scatter", "alltoall",
)  # fmt: skip
IN_HOST, HIERARCHICAL, OVER_LINKS = "in-host", "hierarchical", "over links"

# As in cpp/: `host_segment.h`, `host_segment.cc`, `in_host_reduce.cc`, `over_links.h`, `direct.cc`, `select.h`.
SMALL_BYTES = 4 << 10  # travel inside the announcement
WHOLE_BYTES = 16 << 10  # what rails may send that carry whole messages
STAGING_BYTES = 256 << 10
SMALLEST_WINDOW_BYTES = 16 << 10
WINDOWS_WANTED = 4
DIRECT_SCRATCH_BYTES, DIRECT_DEPTH, SMALLEST_SEGMENT_BYTES = 32 << 20, 8, 32 << 10
DOUBLING_BYTES = 64 << 10
DIRECT_RANKS = 16
RING_CHUNK_BYTES = 64 << 10

READ, WRITE, REWRITE = 1, 2, 1  # of a line; a rewrite follows its read
COPY = READ + WRITE
THROUGH_PIPE = 2 * COPY  # a message between two ranks of a host: into shared memory, and out of it
ARRIVAL = WRITE + READ  # a message from another host: written to memory, then read


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
    """

    sent_bytes: int = 0
    busiest_bytes: int = 0
    lead_bytes: int = 0
    steps: int = 0
    frames: int = 0
    memory_bytes: int = 0
    exchanges: int = 0

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
    """Return the algorithm that `auto` takes: the rule of cpp/algorithms/select.h, with its defaults."""
    if shape.hosts == 1:
        return IN_HOST
    if shape.ranks_per_host > 1:
        return HIERARCHICAL
    is_many, is_power_of_two = shape.hosts > DIRECT_RANKS, shape.hosts.bit_count() == 1
    if nbytes <= DOUBLING_BYTES // (1 if is_many or is_power_of_two else 4):
        return "doubling"
    return "ring" if is_many and nbytes >= shape.hosts * RING_CHUNK_BYTES else "direct"


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
        return _in_host(operation, shape.ranks_per_host, nbytes, is_symmetric)
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
    return messages.gather(size, nbytes)  # a scatter is the same, turned round


def _segment_bytes(algorithm: str, operation: str, size: int) -> int | None:
    """Return the largest message; None: messages are not cut."""
    if algorithm == "direct" or operation in ("reducescatter", "reduce"):
        return min(SEGMENT_BYTES, max(DIRECT_SCRATCH_BYTES // (DIRECT_DEPTH * size), SMALLEST_SEGMENT_BYTES))
    return SEGMENT_BYTES if algorithm == "ring" or operation in ("allgather", "broadcast") else None


def _over_links(operation: str, algorithm: str, shape: JobShape, nbytes: int, rails: int = 1) -> Traffic:
    """Return the traffic among all ranks as if each pair had a link. `rails`: how many such groups share the hosts."""
    segment_bytes = _segment_bytes(algorithm, operation, shape.ranks)
    out, into, memory = [0] * shape.hosts, [0] * shape.hosts, [0] * shape.hosts
    frames = [0] * shape.ranks
    steps = 0
    for step, sender, receiver, size in _messages(operation, algorithm, shape.ranks, nbytes, rails):
        here, there = sender // shape.ranks_per_host, receiver // shape.ranks_per_host
        if here == there:
            memory[here] += THROUGH_PIPE * size
            continue
        pieces = 1 if segment_bytes is None else max(-(-size // segment_bytes), 1)
        frames[sender] += pieces
        frames[receiver] += pieces
        out[here] += size
        into[there] += size
        memory[here] += READ * size
        memory[there] += ARRIVAL * size
        steps = max(steps, step + 1)
    lead = (steps - 1) * min(SEGMENT_BYTES, nbytes) if operation == "broadcast" else 0
    return Traffic(sum(out), max(out + into), lead, steps, max(frames), max(memory))


def _hierarchical(operation: str, shape: JobShape, nbytes: int, is_symmetric: bool) -> Traffic:
    ranks = shape.ranks_per_host
    shard = -(-nbytes // ranks)
    match operation:
        case "allreduce" if nbytes <= min(SMALL_BYTES, WHOLE_BYTES // ranks):
            return _reduce_in_host(ranks, nbytes, is_symmetric).then(_on_rails("allreduce", shape, nbytes))
        case "allreduce":
            inside = _reduce_scatter_in_host(ranks, nbytes, is_symmetric)
            across = _on_rails("allreduce", shape, shard)
            return inside.then(across).then(_share_in_host(ranks, [shard] * ranks, is_symmetric))
        case "reduce" if nbytes <= SMALL_BYTES:
            inside = _reduce_in_host(ranks, nbytes, is_symmetric, has_root=True)
            return inside.then(_between_leaders("reduce", shape, nbytes))
        case "reduce":
            inside = _reduce_scatter_in_host(ranks, nbytes, is_symmetric)
            across = _on_rails("reduce", shape, shard)
            return inside.then(across).then(_share_in_host(ranks, [shard] * ranks, False, has_root=True))
        case "reducescatter":
            # One reduce-scatter inside the host for the ranks of each host.
            inside = _repeated(
                _reduce_scatter_in_host(ranks, nbytes // shape.hosts, is_symmetric), shape.hosts
            )
            return inside.then(_on_rails("reducescatter", shape, shard))
        case "allgather":
            block = nbytes // shape.ranks
            shares = _repeated(_share_in_host(ranks, [block] * ranks, False), shape.hosts)
            return _on_rails("allgather", shape, shard).then(shares)
    shares = _share_in_host(ranks, [nbytes] + [0] * (ranks - 1), is_symmetric)
    return Traffic(exchanges=1).then(_between_leaders("broadcast", shape, nbytes)).then(shares)


def _between_leaders(operation: str, shape: JobShape, nbytes: int) -> Traffic:
    return traffic_of(operation, OVER_LINKS, JobShape(shape.hosts, 1), nbytes)


def _on_rails(operation: str, shape: JobShape, nbytes: int) -> Traffic:
    """Return the traffic of all rails together; `nbytes`: of one."""
    rail = JobShape(shape.hosts, 1)
    rails = shape.ranks_per_host
    algorithm = select_allreduce(rail, nbytes * rails) if operation == "allreduce" else OVER_LINKS
    one = _over_links(operation, algorithm, rail, nbytes, rails)
    return Traffic(
        sent_bytes=one.sent_bytes * rails,
        busiest_bytes=one.busiest_bytes * rails,
        steps=one.steps,
        frames=one.frames,
        memory_bytes=one.memory_bytes * rails,
        exchanges=1,  # the announcement of the call
    )


def _repeated(once: Traffic, times: int) -> Traffic:
    return Traffic(memory_bytes=once.memory_bytes * times, exchanges=once.exchanges * times)


def _in_host(operation: str, ranks: int, nbytes: int, is_symmetric: bool) -> Traffic:
    if ranks == 1:
        return Traffic(memory_bytes=0 if operation in ("allreduce", "broadcast") else COPY * nbytes)
    match operation:
        case "allreduce" | "reduce":
            return _reduce_in_host(ranks, nbytes, is_symmetric, has_root=operation == "reduce")
        case "reducescatter":
            return _reduce_scatter_in_host(ranks, nbytes, is_symmetric)
        case "allgather":
            return _share_in_host(ranks, messages.chunk_bytes(nbytes, ranks), is_symmetric)
        case "gather":
            return _share_in_host(ranks, messages.chunk_bytes(nbytes, ranks), False, has_root=True)
        case "broadcast":
            return _share_in_host(ranks, [nbytes] + [0] * (ranks - 1), is_symmetric)
    dealt = nbytes * (ranks if operation == "alltoall" else 1)
    foreign = dealt * (ranks - 1) // ranks
    windows = _windows(-(-nbytes // ranks), _lane_bytes(ranks))
    memory = COPY * (dealt - foreign) + (COPY + COPY + REWRITE) * foreign
    return Traffic(memory_bytes=memory, exchanges=1 + windows)


def _lane_bytes(ranks: int) -> int:
    return max(SMALL_BYTES, -(-2 * STAGING_BYTES // max(ranks, 2) // 4096) * 4096)


def _windows(nbytes: int, room: int) -> int:
    """Return in how many windows so many bytes of a rank pass through lanes with this room."""
    window = min(max(nbytes // WINDOWS_WANTED, SMALLEST_WINDOW_BYTES), room)
    return -(-nbytes // window)


def _reduce_in_host(ranks: int, nbytes: int, is_symmetric: bool, has_root: bool = False) -> Traffic:
    """Return the traffic of a reduction in place, with the result on all ranks or on one."""
    if nbytes <= SMALL_BYTES:
        readers = 1 if has_root else ranks
        announced = (READ + WRITE) * nbytes * ranks
        return Traffic(memory_bytes=announced + (READ * ranks + REWRITE) * nbytes * readers, exchanges=1)
    if is_symmetric and not has_root:
        return Traffic(memory_bytes=(READ + REWRITE) * nbytes * ranks, exchanges=2)
    foreign = nbytes * (ranks - 1) // ranks
    staged = (COPY * foreign + (READ + REWRITE) * nbytes) * ranks
    collected = (READ + 2 * REWRITE) * foreign * (1 if has_root else ranks)
    return Traffic(
        memory_bytes=staged + collected, exchanges=1 + 2 * _windows(nbytes // ranks, _lane_bytes(ranks))
    )


def _reduce_scatter_in_host(ranks: int, nbytes: int, is_symmetric: bool) -> Traffic:
    reduced = READ * nbytes * ranks + WRITE * nbytes
    if is_symmetric:
        return Traffic(memory_bytes=reduced, exchanges=2)
    foreign = nbytes * (ranks - 1) // ranks * ranks
    windows = _windows(nbytes // ranks, _lane_bytes(ranks))
    return Traffic(memory_bytes=reduced + (COPY + REWRITE) * foreign, exchanges=1 + 2 * windows)


def _share_in_host(ranks: int, parts: list[int], is_symmetric: bool, has_root: bool = False) -> Traffic:
    """Return the traffic of parts that all ranks get, or one."""
    total, largest = sum(parts), max(parts)
    readers = 1 if has_root else ranks
    # A broadcast copies nothing of its own.
    own = parts[0] if has_root else total if len(set(parts)) == 1 else 0
    foreign = total * (ranks - 1) if not has_root else total - parts[0]
    if is_symmetric and largest > SMALL_BYTES:
        return Traffic(memory_bytes=COPY * (own + foreign), exchanges=2)
    is_sole_reader = readers == 1 or ranks == 2
    memory = COPY * (own + total) + (COPY + (REWRITE if is_sole_reader else 0)) * foreign
    windows = 0 if largest <= SMALL_BYTES else _windows(largest, ranks * _lane_bytes(ranks))
    return Traffic(memory_bytes=memory, exchanges=1 + 2 * windows)


def least_traffic(operation: str, shape: JobShape, nbytes: int) -> Traffic:
    """Return the least that any algorithm can move: `sent_bytes`, `busiest_bytes` and `memory_bytes` each for itself.

    Each host can first combine what its own ranks have, and distribute what it gets among them. So a sum needs one
    array from each host, and a copy one array for each host. An all-reduce is a reduce-scatter and an all-gather of the
    hosts' sums. Patarasuk, Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 69(2),
    2009, section 2. Within a host, each input is read once and each result written once.
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
        "reduce": (others * nbytes, nbytes if others else 0, READ * nbytes * ranks + WRITE * nbytes),
        "gather": (others * nbytes // hosts, others * nbytes // hosts, COPY * local_root),
        "scatter": (others * nbytes // hosts, others * nbytes // hosts, COPY * local_root),
        "alltoall": (
            ranks * nbytes * others, ranks * nbytes * others // hosts, COPY * nbytes * ranks,
        ),
    }  # fmt: skip
    sent, busiest, memory = results[operation]
    if shape.ranks == 1:
        memory = _in_host(operation, 1, nbytes, is_symmetric=False).memory_bytes
    return Traffic(
        sent,
        busiest,
        steps=int(hosts > 1),
        frames=int(hosts > 1),
        memory_bytes=memory,
        exchanges=int(ranks > 1),
    )
