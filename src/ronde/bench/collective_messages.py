"""The messages of each algorithm over links: which rank sends how much to which other, in which step. Pure.

One generator per algorithm of `cpp/algorithms/over_links.h`. A message is (step, sender, receiver, bytes), with ranks
numbered like the members of the group. A rank begins a step when it has the messages of the step before; messages of
one step are under way at the same time. The segments of a pipeline count as one message. `cpp/tests/traffic` counts the
messages of the real algorithms, and a test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = [
    "ALLREDUCE",
    "SEGMENT_BYTES",
    "Message",
    "broadcast",
    "chunk_bytes",
    "gather",
    "pairwise",
    "reduce",
    "share",
]

SEGMENT_BYTES = 256 << 10
SMALL_REDUCE_BYTES = 16 << 10  # up to here the root of a reduce gets all contributions itself
SMALL_SHARE_BYTES = 64 << 10  # up to here an all-gather takes one step

Message = tuple[int, int, int, int]


def chunk_bytes(nbytes: int, size: int) -> list[int]:
    """Return the sizes of `size` chunks that differ by at most one byte."""
    return [nbytes // size + (index < nbytes % size) for index in range(size)]


def pairwise(size: int, nbytes: int, step: int = 0) -> Iterator[Message]:
    """Yield the messages by which each rank sends its chunk for every other: an all-to-all, or half of `direct`."""
    chunks = chunk_bytes(nbytes, size)
    for sender in range(size):
        for receiver in range(size):
            if sender != receiver:
                yield step, sender, receiver, chunks[receiver]


def exchange(size: int, nbytes: int, step: int = 0) -> Iterator[Message]:
    """Yield the messages by which each rank sends its chunk of the whole to all others."""
    chunks = chunk_bytes(nbytes, size)
    for sender in range(size):
        for receiver in range(size):
            if sender != receiver:
                yield step, sender, receiver, chunks[sender]


def circle(size: int, nbytes: int, steps: int) -> Iterator[Message]:
    """Yield the messages of `steps` steps in which each rank sends a chunk to the next rank."""
    chunks = chunk_bytes(nbytes, size)
    for step in range(steps):
        for rank in range(size):
            yield step, rank, (rank + 1) % size, chunks[(rank - 1 - step) % size]


def direct(size: int, nbytes: int) -> Iterator[Message]:
    """Yield those of `allreduce_direct`: contributions to the owners of chunks, and their results to all."""
    yield from pairwise(size, nbytes)
    yield from exchange(size, nbytes, 1)


def ring(size: int, nbytes: int) -> Iterator[Message]:
    """Yield those of `allreduce_ring`."""
    yield from circle(size, nbytes, 2 * (size - 1))


def doubling(size: int, nbytes: int) -> Iterator[Message]:
    """Yield those of `allreduce_doubling`. Ranks beyond a power of two begin and end with a message to a partner."""
    players = 1 << (size.bit_length() - 1)
    extra = size - players
    ranks = [2 * player + 1 if player < extra else player + extra for player in range(players)]
    for folded in range(0, 2 * extra, 2):
        yield 0, folded, folded + 1, nbytes
    first = 1 if extra else 0
    steps = players.bit_length() - 1
    for step in range(steps):
        for player, rank in enumerate(ranks):
            yield first + step, rank, ranks[player ^ (1 << step)], nbytes
    for folded in range(0, 2 * extra, 2):
        yield first + steps, folded + 1, folded, nbytes


ALLREDUCE: dict[str, Callable[[int, int], Iterator[Message]]] = {
    "direct": direct,
    "ring": ring,
    "doubling": doubling,
}


def share(size: int, nbytes: int) -> Iterator[Message]:
    """Yield those of `allgatherv` with equal blocks, `nbytes` in all: one exchange, or a ring."""
    if nbytes <= SMALL_SHARE_BYTES or size <= 2:
        return exchange(size, nbytes)
    return circle(size, nbytes, size - 1)


def broadcast(size: int, nbytes: int) -> Iterator[Message]:
    """Yield those of `broadcast` from rank 0: along a chain, or a binomial tree.

    A rank of the tree serves its children one after the other, so each of them is a step.
    """
    if size > 2 and nbytes >= (size - 2) * SEGMENT_BYTES:
        for rank in range(size - 1):
            yield rank, rank, rank + 1, nbytes
        return
    waiting = [(0, 1 << (size - 1).bit_length(), 0)]
    while waiting:
        rank, span, step = waiting.pop()
        while (span := span // 2) > 0:
            if rank + span < size:
                yield step, rank, rank + span, nbytes
                step += 1
                waiting.append((rank + span, span, step))


def reduce(size: int, nbytes: int, rails: int = 1) -> Iterator[Message]:
    """Yield those of `reduce_to_root` to rank 0: by one step, or by owners of chunks that send it their results.

    `rails`: how many such reductions share the links.
    """
    if size <= 2 or nbytes <= SMALL_REDUCE_BYTES // rails:
        for rank in range(1, size):
            yield 0, rank, 0, nbytes
        return
    yield from pairwise(size, nbytes)
    for rank, chunk in enumerate(chunk_bytes(nbytes, size)):
        if rank:
            yield 1, rank, 0, chunk


def gather(size: int, nbytes: int) -> Iterator[Message]:
    """Yield those of `gatherv` to rank 0 with equal blocks, `nbytes` in all. A scatter sends the same, turned round."""
    for rank, chunk in enumerate(chunk_bytes(nbytes, size)):
        if rank:
            yield 0, rank, 0, chunk
