"""Ranks that are threads share memory and bells over control connections, which are pairs of sockets here."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import pytest

from ronde import _native
from ronde.comm.shared_memory import share_bells, share_segment
from ronde.comm.topology import Topology, compute_topology
from ronde.errors import MismatchError, PeerLostError, TimeoutError

SECOND = 10**9
Result = TypeVar("Result")


class Rank:
    """One of some ranks: where it stands, and what carries its descriptors."""

    def __init__(self, number: int, size: int, controls: dict[int, int]) -> None:
        self.topology: Topology = compute_topology(number, ["here"] * size, ["here"] * size)
        wires = {peer: (descriptor, b"", b"", False) for peer, descriptor in controls.items()}
        self.connections = _native.SharedConnections(wires)
        self.watch = self.join("world")

    def join(self, name: str) -> _native.JoinedWatch:
        topology = self.topology
        return _native.JoinedWatch(
            self.connections, name, topology.rank, list(topology.hosts), list(range(topology.size))
        )

    def share(self, nbytes: int, seconds: float = 60) -> int:
        return share_segment(self.watch, self.topology, nbytes, deadline_in(seconds))


@contextmanager
def ranks(size: int) -> Iterator[list[Rank]]:
    controls: list[dict[int, int]] = [{} for _ in range(size)]
    for high in range(size):
        for low in range(high):
            ends = socket.socketpair()
            controls[high][low], controls[low][high] = ends[0].detach(), ends[1].detach()
    all_of_them = [Rank(number, size, controls[number]) for number in range(size)]
    try:
        yield all_of_them
    finally:
        for rank in all_of_them:
            rank.watch.give_up()


def deadline_in(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * SECOND)


def on_all(some: list[Rank], body: Callable[[Rank], Result]) -> list[Result | Exception]:
    """Return what each rank's body returned or raised."""
    results: dict[int, Result | Exception] = {}

    def run(rank: Rank) -> None:
        try:
            results[rank.topology.rank] = body(rank)
        except Exception as error:
            results[rank.topology.rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in some]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(some))]


@contextmanager
def opened(results: list[int | Exception]) -> Iterator[list[int]]:
    """All of them descriptors, which are closed afterwards."""
    with ExitStack() as stack:
        descriptors = [result for result in results if isinstance(result, int)]
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        assert len(descriptors) == len(results), results
        yield descriptors


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_have_the_same_private_memory_of_a_fixed_size(size: int) -> None:
    with ranks(size) as some:
        for nbytes in (4096, 10**6):
            with opened(on_all(some, partial(Rank.share, nbytes=nbytes))) as segments:
                os.pwrite(segments[0], b"hello", nbytes - 5)
                assert [os.pread(segment, 99, nbytes - 5) for segment in segments] == [b"hello"] * size
                for segment in segments:
                    assert stat.S_IMODE(os.fstat(segment).st_mode) == 0o600
                    assert not os.get_inheritable(segment)
                    for other in (1, 2 * nbytes):
                        with pytest.raises(OSError, match="not permitted"):
                            os.ftruncate(segment, other)


def test_a_bell_rings_at_its_rank_only() -> None:
    with ranks(3) as some, ExitStack() as stack:
        everyones = on_all(some, lambda rank: share_bells(rank.watch, rank.topology, deadline_in(60)))
        for bells in everyones:
            assert isinstance(bells, dict), bells
            for bell in bells.values():
                stack.callback(os.close, bell)
                assert not os.get_inheritable(bell)
                os.eventfd_write(bell, 1)
        for rank, bells in enumerate(everyones):
            assert isinstance(bells, dict)
            assert sorted(bells) == [0, 1, 2]
            assert os.eventfd_read(bells[rank]) == 3
            with pytest.raises(BlockingIOError):
                os.eventfd_read(bells[rank])


def test_another_size_is_an_error() -> None:
    with ranks(2) as some:
        segment, error = on_all(some, lambda rank: rank.share(4096 * (1 + rank.topology.rank)))
        assert isinstance(error, MismatchError)
        assert str(error) == "rank 0 made a segment of 4096 bytes, but this rank expects 8192"
        assert isinstance(segment, int)
        os.close(segment)


def test_a_leader_that_cannot_tells_the_others() -> None:
    with ranks(2) as some:
        results = on_all(some, partial(Rank.share, nbytes=-1))
        assert isinstance(results[0], OSError)
        assert "rank 0 could not make the shared memory" in str(results[1])


def test_a_leader_that_is_lost_or_never_comes_is_named() -> None:
    with ranks(2) as some:
        with pytest.raises(TimeoutError, match=r"waited 0\.0\d+ s for shared memory from rank 0") as late:
            some[1].share(4096, seconds=0.05)
        assert late.value.missing == (0,)
        some[0].watch.give_up()
        with pytest.raises(PeerLostError, match="rank 0 on here was lost") as lost:
            some[1].share(4096)
        assert lost.value.rank == 0


def test_communicators_have_their_own_memory_and_their_own_end() -> None:
    """What is sent for one is received there, in whatever order; one that ends leaves the others alone."""
    with ranks(2) as some:
        first, second = (some[0].join(name) for name in ("first", "second"))
        theirs = [some[1].join(name) for name in ("first", "second")]
        with open("/dev/null") as null, open("/dev/zero") as zero:
            first.send_descriptor(1, null.fileno())
            second.send_descriptor(1, zero.fileno())
            for watch, expected in zip(reversed(theirs), (zero, null)):
                received = watch.receive_descriptor(0, 60 * SECOND)
                assert received is not None
                assert os.path.sameopenfile(received, expected.fileno())
                os.close(received)
        first.give_up()
        with pytest.raises(PeerLostError, match="it has given up this communicator"):
            theirs[0].receive_descriptor(0, 60 * SECOND)
        second.send_descriptor(1, -1)
        assert theirs[1].receive_descriptor(0, 60 * SECOND) == -1
        theirs[1].check()
        for watch in (second, *theirs):
            watch.give_up()
        with opened(on_all(some, partial(Rank.share, nbytes=4096))):
            pass
