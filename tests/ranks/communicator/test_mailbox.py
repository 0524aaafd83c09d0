"""Messages with tags between real ranks, posted in any order: what matches, and how each kind of end looks."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ronde
from ronde import _native
from ronde.testing import faults, ranks
from ronde.testing.ranks import tell

ON_BOTH = pytest.mark.parametrize("transport", ["auto", "tcp"])
EAGER = 64 * 1024
LONG_NS = 60_000_000_000  # against hanging
CONTEXT = 2**63 + 5
Array = np.ndarray[Any, Any]


class Post:
    """A mailbox on a duplicate of the world, and messages from and to arrays, which it keeps alive."""

    def __init__(self) -> None:
        ronde.init()
        self.world: Any = ronde.world()
        self.rank: int = self.world.rank
        self.size: int = self.world.size
        self.communicator = self.world.duplicate()
        self.box = _native.Mailbox(self.communicator.native)
        self._kept: list[Array] = []

    def send(self, peer: int, tag: int, data: Array, context: int = CONTEXT) -> _native.Message:
        self._kept.append(data)
        return self.box.send(peer, context, tag, data.ctypes.data, data.nbytes)

    def receive(
        self, peer: int, tag: int, data: Array, peers: tuple[int, ...] = (), context: int = CONTEXT
    ) -> _native.Message:
        self._kept.append(data)
        return self.box.receive(peer, context, tag, data.ctypes.data, data.nbytes, peers)

    def end(self) -> None:
        """Leave together with all other ranks, which got everything."""
        self.world.barrier()
        self.box.close("the test is over")
        ronde.shutdown()


def done(*messages: _native.Message) -> None:
    for message in messages:
        assert message.wait(LONG_NS), "hangs"
        assert message.is_done()
        assert not message.has_failed()


def error_of(message: _native.Message) -> ronde.RondeError:
    try:
        assert message.wait(LONG_NS), "hangs"
    except ronde.RondeError as error:
        assert message.is_done()
        assert message.has_failed()
        return error
    raise AssertionError("the message has not failed")


def filled(nbytes: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def run(program: Callable[..., Any], n: int, *args: Any, transport: str = "auto") -> list[Any]:
    values: list[Any] = ranks.run(program, n, *args, environ={"RONDE_TRANSPORT": transport})
    return values


# What matches


def _exchange_sizes() -> None:
    post = Post()
    other = 1 - post.rank
    for nbytes in (0, 1, EAGER - 1, EAGER, EAGER + 1, 8 << 20):
        for sends_first in (True, False):
            got = np.zeros(nbytes, np.uint8)
            if sends_first:
                sent = post.send(other, 2**32 - 1, filled(nbytes, post.rank))
                received = post.receive(other, 2**32 - 1, got)
            else:
                received = post.receive(other, 2**32 - 1, got)
                sent = post.send(other, 2**32 - 1, filled(nbytes, post.rank))
            done(received, sent)
            assert received.source() == other
            assert np.array_equal(got, filled(nbytes, other)), nbytes
    post.end()


@ON_BOTH
def test_messages_of_all_sizes_arrive(transport: str) -> None:
    run(_exchange_sizes, 2, transport=transport)


def _overtake() -> None:
    post = Post()
    if post.rank == 0:
        messages = [
            post.send(1, tag, filled(nbytes, tag)) for tag in range(6) for nbytes in (10, EAGER + tag)
        ]
        done(*messages)
    else:
        for tag in reversed(range(6)):
            for nbytes in (10, EAGER + tag):
                got = np.zeros(nbytes, np.uint8)
                done(post.receive(0, tag, got))
                assert np.array_equal(got, filled(nbytes, tag))
    post.end()


@ON_BOTH
def test_messages_with_other_tags_overtake(transport: str) -> None:
    run(_overtake, 2, transport=transport)


def _contexts() -> None:
    post = Post()
    other = 1 - post.rank
    one, two = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    messages = [post.receive(other, 0, one, context=1), post.receive(other, 0, two, context=2)]
    messages += [post.send(other, 0, np.full(1, context, np.uint8), context=context) for context in (2, 1)]
    done(*messages)
    assert (one[0], two[0]) == (1, 2)
    post.end()


def test_messages_match_within_their_context() -> None:
    run(_contexts, 2)


def _receive_from_any(times: int) -> list[int]:
    post = Post()
    sources = []
    if post.rank > 0:
        done(*[post.send(0, 5, np.array([i], np.int64)) for i in range(times)])
    else:
        peers = tuple(range(1, post.size))
        count: dict[int, int] = defaultdict(int)
        for _ in range(times * len(peers)):
            got = np.zeros(1, np.int64)
            message = post.receive(-1, 5, got, peers)
            done(message)
            assert got[0] == count[message.source()]
            count[message.source()] += 1
            sources.append(message.source())
    post.end()
    return sources


@ON_BOTH
def test_receives_from_any_rank_take_every_message_in_its_senders_order(transport: str) -> None:
    sources = run(_receive_from_any, 3, 300, transport=transport)[0]
    assert sources.count(1) == sources.count(2) == 300


def _send_to_oneself() -> None:
    post = Post()
    for nbytes in (0, 1, EAGER, EAGER + 1):
        got = np.zeros(nbytes, np.uint8)
        sent = post.send(0, 1, filled(nbytes, 1))
        assert sent.is_done() == (nbytes <= EAGER)
        received = post.receive(-1, 1, got, (0,))
        done(sent, received)
        assert np.array_equal(got, filled(nbytes, 1))
        assert received.source() == 0
    post.end()


def test_a_rank_sends_to_itself() -> None:
    run(_send_to_oneself, 1)


def _disagree(sent: int, received: int) -> str:
    post = Post()
    if post.rank == 0:
        done(post.send(1, 7, np.zeros(sent, np.uint8)), post.send(1, 7, np.ones(4, np.uint8)))
        post.end()
        return ""
    bad = post.receive(0, 7, np.zeros(received, np.uint8))
    got = np.zeros(4, np.uint8)
    done(post.receive(0, 7, got))
    assert got.all()
    error = error_of(bad)
    assert isinstance(error, ronde.MismatchError)
    post.end()
    return str(error)


@ON_BOTH
@pytest.mark.parametrize(("sent", "received"), [(8, 12), (EAGER + 1, 12), (8, 2 * EAGER)])
def test_different_sizes_fail_only_the_receive(transport: str, sent: int, received: int) -> None:
    text = run(_disagree, 2, sent, received, transport=transport)[1]
    assert text == (
        f"rank 0 sends {sent} bytes with tag 7, but rank 1 receives {received} bytes: the sizes must agree"
    )


def _misuse() -> None:
    post = Post()
    for peer, tag in ((2, 0), (-1, 0), (0, -1), (0, 2**32)):
        with pytest.raises(ronde.UsageError):
            post.box.receive(peer, 0, tag, 0, 0)
    pending = post.receive(1 - post.rank, 0, np.zeros(1, np.uint8))
    with pytest.raises(ronde.UsageError, match="has a source"):
        pending.source()
    assert not pending.wait(0)
    assert not pending.wait(1_000_000)
    with pytest.raises(ronde.UsageError, match="carries the messages of a mailbox"):
        post.communicator.barrier()
    with pytest.raises(ronde.UsageError, match="carries the messages of a mailbox"):
        _native.Mailbox(post.communicator.native)
    post.end()


def test_misuse_is_refused() -> None:
    run(_misuse, 2)


# Schedules


def _flood(count: int, nbytes: int) -> None:
    post = Post()
    peers = range(post.size)
    messages = [post.send(peer, 0, filled(nbytes, post.rank)) for _ in range(count) for peer in peers]
    got = {(i, peer): np.zeros(nbytes, np.uint8) for i in range(count) for peer in peers}
    messages += [post.receive(peer, 0, data) for (_, peer), data in got.items()]
    done(*messages)
    for (_, peer), data in got.items():
        assert np.array_equal(data, filled(nbytes, peer))
    post.end()


@ON_BOTH
@pytest.mark.parametrize(("count", "nbytes"), [(200, EAGER), (10, 1 << 20)])
def test_floods_in_both_directions(transport: str, count: int, nbytes: int) -> None:
    run(_flood, 2, count, nbytes, transport=transport)


SIZES = (0, 1, 100, EAGER - 1, EAGER, EAGER + 1, 5 * EAGER)


def _follow_schedules(seeds: range) -> None:
    """Every rank knows all messages, and posts its own in an order that keeps only that of each sender and tag."""
    post = Post()
    for seed in seeds:
        try:
            _follow_schedule(post, seed)
        except BaseException:
            print(f"seed {seed} on rank {post.rank}", flush=True)
            raise
    post.end()


def _follow_schedule(post: Post, seed: int) -> None:
    plan, own = random.Random(seed), random.Random(seed * 100 + post.rank)
    sends: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # by sender, receiver, tag: the sizes
    for _ in range(plan.randrange(1, 15)):
        key = (plan.randrange(post.size), plan.randrange(post.size), plan.randrange(3))
        sends[key].append(plan.choice(SIZES))
    actions = [(key, is_send) for key, sizes in sends.items() for _ in sizes for is_send in (True, False)]
    own.shuffle(actions)
    posted: dict[Any, int] = defaultdict(int)
    messages, checks = [], []
    for key, is_send in actions:
        sender, receiver, tag = key
        if (sender if is_send else receiver) != post.rank:
            continue
        number = posted[key, is_send]
        posted[key, is_send] += 1
        nbytes = sends[key][number]
        expected = filled(nbytes, number)
        if is_send:
            messages.append(post.send(receiver, tag, expected, context=seed))
        else:
            got = np.zeros(nbytes, np.uint8)
            checks.append((got, expected))
            messages.append(post.receive(sender, tag, got, context=seed))
        if own.random() < 0.2:
            own.choice(messages).wait(100_000)
    own.shuffle(messages)
    done(*messages)
    for got, expected in checks:
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_random_schedules(transport: str) -> None:
    run(_follow_schedules, 3, range(1000), transport=transport)


def test_random_schedules_over_sockets() -> None:
    run(_follow_schedules, 3, range(1000, 1100), transport="tcp")


def _use_two_threads() -> None:
    post = Post()
    other = 1 - post.rank
    errors: list[BaseException] = []

    def talk(tag: int) -> None:
        try:
            for i in range(200):
                got = np.zeros(1, np.int64)
                sent = post.send(other, tag, np.array([i], np.int64))
                done(post.receive(other, tag, got), sent)
                assert got[0] == i
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    post.end()


@ON_BOTH
def test_two_threads(transport: str) -> None:
    run(_use_two_threads, 2, transport=transport)


# Ends


def _cancel() -> str:
    post = Post()
    other = 1 - post.rank
    kept = post.receive(other, 3, np.zeros(1, np.uint8), context=9)
    never = post.receive(other, 1, np.zeros(4, np.uint8))
    unwanted = post.send(other, 2, np.zeros(8 << 20, np.uint8))
    waiting = threading.Thread(target=lambda: error_of(never))
    waiting.start()
    post.world.barrier()
    post.box.cancel(CONTEXT, "the group was aborted")
    waiting.join()
    texts = {str(error_of(post.receive(other, 1, np.zeros(4, np.uint8)))), str(error_of(never))}
    # The other rank may refuse the message first: then it is done.
    if unwanted.wait(LONG_NS) if not unwanted.has_failed() else False:
        assert unwanted.is_done()
    done(post.send(other, 3, np.zeros(1, np.uint8), context=9), kept)
    post.end()
    (text,) = texts
    return text


@ON_BOTH
def test_a_cancelled_context(transport: str) -> None:
    assert run(_cancel, 2, transport=transport) == ["the group was aborted"] * 2


def _close_in_order(order: str) -> None:
    post = Post()
    pending = post.receive(post.rank, 0, np.zeros(1, np.uint8))  # the other rank may leave first
    if order == "box":
        post.box.close("closed first")
        assert isinstance(error_of(pending), ronde.AbortedError)
        post.box.close("again")
    elif order == "communicator":
        post.communicator.shutdown()
        assert isinstance(error_of(pending), ronde.AbortedError)
    elif order == "garbage":
        del pending
        del post.box, post.communicator, post.world
        gc.collect()
    if order != "exit":
        ronde.shutdown()


@pytest.mark.parametrize("order", ["box", "communicator", "garbage", "exit"])
@ON_BOTH
def test_ends_in_any_order(transport: str, order: str) -> None:
    run(_close_in_order, 2, order, transport=transport)


def _send_and_leave() -> list[str]:
    post = Post()
    if post.rank == 0:
        done(post.send(1, 0, np.full(100, 3, np.uint8)))
        done(post.receive(1, 0, np.zeros(1, np.uint8)))
        post.box.close("rank 0 goes")
        ronde.shutdown()
        return []
    done(post.send(0, 0, np.zeros(1, np.uint8)))
    messages = [
        post.receive(0, 1, np.zeros(1, np.uint8)),
        post.receive(-1, 1, np.zeros(1, np.uint8), (0,)),
        post.send(0, 1, np.zeros(8 << 20, np.uint8)),
    ]
    errors = [error_of(message) for message in messages]
    assert all(isinstance(error, ronde.PeerLostError) for error in errors)
    got = np.zeros(100, np.uint8)
    done(post.receive(0, 0, got))
    assert (got == 3).all()
    post.box.close("over")
    ronde.shutdown()
    return [str(error) for error in errors]


@ON_BOTH
def test_a_rank_leaves(transport: str) -> None:
    texts = run(_send_and_leave, 2, transport=transport)[1]
    assert set(texts) == {f"rank 0 on {socket.gethostname()} has shut down"}


def _wait_for_a_dead_rank() -> tuple[str, int, str]:
    post = Post()
    peers = tuple(peer for peer in range(post.size) if peer != post.rank)
    message = post.receive(-1, 0, np.zeros(1, np.uint8), peers)
    tell()
    error = error_of(message)
    assert isinstance(error, ronde.PeerLostError)
    assert str(error_of(post.send(peers[0], 0, np.zeros(1, np.uint8)))) == str(error)
    return str(error), error.rank, error.host


@ON_BOTH
def test_a_killed_rank_is_named(transport: str) -> None:
    with ranks.start(_wait_for_a_dead_rank, 3, environ={"RONDE_TRANSPORT": transport}) as job:
        for rank in range(3):
            job.told(rank)
        time.sleep(0.1)
        faults.kill(job.pids[1])
        outcomes = job.outcomes()
    host = socket.gethostname()
    for rank in (0, 2):
        text = f"rank 1 on {host} was lost: its process ended without shutting down"
        assert outcomes[rank].value == (text, 1, host), outcomes[rank].traceback_text


def _interrupt() -> None:
    post = Post()
    pending = post.receive(0, 0, np.zeros(1, np.uint8))
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        pending.wait(-1)
    done(post.send(0, 0, np.zeros(1, np.uint8)), pending)
    post.end()


@ON_BOTH
def test_a_signal_interrupts_a_wait(transport: str) -> None:
    run(_interrupt, 1, transport=transport)


def _fork() -> None:
    post = Post()
    other = 1 - post.rank
    pending = post.receive(other, 0, np.zeros(1, np.uint8))
    pid = os.fork()
    if pid == 0:
        try:
            post.box.abandon()
            with pytest.raises(ronde.UsageError, match="forked"):
                post.send(other, 0, np.zeros(1, np.uint8))
            with pytest.raises(ronde.UsageError, match="forked"):
                pending.wait(-1)
            del pending, post
            gc.collect()
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    done(post.send(other, 0, np.zeros(1, np.uint8)), pending)
    post.end()


@ON_BOTH
def test_a_forked_child_abandons_it(transport: str) -> None:
    run(_fork, 2, transport=transport)
