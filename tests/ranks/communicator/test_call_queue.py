"""The native call queue: every collective from raw memory, in the order of the posts, and how calls and queues end."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ranks.engine.test_stall import LIMIT_NS, Reports, stay_in_user_code

import ronde
from ronde import _native
from ronde.comm import world as comm
from ronde.testing import faults, ranks
from ronde.testing.ranks import tell
from ronde.types import DType, Kind, ReduceOp

Arrays = np.ndarray[Any, Any] | Sequence[np.ndarray[Any, Any]]
MIB = 1 << 20
NEVER_NS = 60 * 10**9


def memory(arrays: Arrays | None) -> list[tuple[int, int]]:
    if arrays is None:
        return []
    parts = [arrays] if isinstance(arrays, np.ndarray) else arrays
    return [(part.ctypes.data, part.nbytes) for part in parts]


class Queue:
    """A call queue that takes arrays."""

    def __init__(self, world: ronde.Communicator) -> None:
        self.native = _native.CallQueue(world._native)

    def post(
        self,
        kind: Kind,
        inputs: Arrays | None = None,
        outputs: Arrays | None = None,
        *,
        op: ReduceOp = ronde.Sum,
        root: int = -1,
        in_sizes: Sequence[int] = (),
        out_sizes: Sequence[int] = (),
        factor: float = 1.0,
        timeout_ns: int = 0,
        at_once: bool = False,
    ) -> _native.QueuedCall:
        example = inputs if inputs is not None else outputs
        first = example if isinstance(example, np.ndarray) or example is None else example[0]
        dtype = DType.uint8 if first is None else DType[str(first.dtype)]
        return self.native.post(
            *(kind, dtype, op, root, memory(inputs), memory(outputs), in_sizes, out_sizes),
            *(factor, timeout_ns, at_once),
        )

    def finish(self, *arguments: Any, **options: Any) -> None:
        assert self.post(*arguments, **options).wait(NEVER_NS)


def apart(values: np.ndarray, parts: int) -> list[np.ndarray]:
    """The values in arrays that are not adjacent."""
    spaced = [np.concatenate([part, part[:1]]) for part in np.array_split(values, parts)]
    return [each[:-1] for each in spaced]


def whole(values: np.ndarray) -> list[np.ndarray]:
    return [values.copy()]


def adjacent(values: np.ndarray) -> list[np.ndarray]:
    return np.array_split(values.copy(), 3)


def separate(values: np.ndarray) -> list[np.ndarray]:
    return apart(values, 3)


LAYOUTS: list[Callable[[np.ndarray], list[np.ndarray]]] = [whole, adjacent, separate]


def empty_like(parts: list[np.ndarray]) -> list[np.ndarray]:
    return [np.full_like(part, -1) for part in parts]


def rows(rank: int) -> int:
    """Different on every rank; none on rank 1."""
    return 0 if rank == 1 else 3 + 2 * rank


def all_operations(transport: str) -> None:
    ronde.init()
    world = ronde.world()
    queue = Queue(world)
    for at_once in (False, True):
        for layout in LAYOUTS:
            for out_layout in LAYOUTS:
                check_reductions(queue, world, layout, out_layout, at_once)
                check_exchanges(queue, world, layout, out_layout, at_once)
                check_uneven_reduce_scatter(queue, world, layout, out_layout, at_once)
    queue.finish(Kind.barrier)
    queue.native.close("the test ends")


def values_of(rank: int, count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float64) * (rank + 1) + 7 * rank


def check_reductions(queue: Queue, world: Any, layout: Any, out_layout: Any, at_once: bool) -> None:
    rank, size, root = world.rank, world.size, world.size - 1
    everyone = [values_of(each, 12) for each in range(size)]
    total: np.ndarray = np.sum(everyone, axis=0)
    x, out = layout(everyone[rank]), out_layout(np.zeros(12))
    queue.finish(Kind.allreduce, x, out, at_once=at_once)
    assert np.array_equal(np.concatenate(out), total)
    assert np.array_equal(np.concatenate(x), everyone[rank])
    queue.finish(Kind.allreduce, x, out, factor=0.5, at_once=at_once)
    assert np.array_equal(np.concatenate(out), total / 2)
    assert np.array_equal(np.concatenate(x), everyone[rank])
    queue.finish(Kind.reduce, x, out if rank == root else None, root=root, factor=2.0, at_once=at_once)
    assert np.array_equal(np.concatenate(x), everyone[rank])
    queue.finish(Kind.allreduce, x, x, op=ronde.Average, factor=2.0, at_once=at_once)
    assert np.array_equal(np.concatenate(x), total * 2 / size)
    if rank == root:
        assert np.array_equal(np.concatenate(out), total * 2)
    y = layout(everyone[rank])
    queue.finish(Kind.reduce, y, y, op=ronde.Max, root=root, at_once=at_once)
    assert np.array_equal(np.concatenate(y), everyone[rank] if rank != root else np.max(everyone, axis=0))
    y = layout(everyone[rank])
    queue.finish(Kind.broadcast, y, y, root=root, at_once=at_once)
    assert np.array_equal(np.concatenate(y), everyone[root])


def check_uneven_reduce_scatter(
    queue: Queue, world: Any, layout: Any, out_layout: Any, at_once: bool
) -> None:
    rank, size = world.rank, world.size
    counts = [rows(each) for each in range(size)]
    everyone = [values_of(each, sum(counts)) for each in range(size)]
    begin = sum(counts[:rank])
    x, out = layout(everyone[rank]), out_layout(np.zeros(counts[rank]))
    queue.finish(
        Kind.reducescatter, x, out, in_sizes=[8 * count for count in counts], factor=0.25, at_once=at_once
    )
    total: np.ndarray = np.sum(everyone, axis=0)
    assert np.array_equal(np.concatenate(out), total[begin : begin + counts[rank]] / 4)
    assert np.array_equal(np.concatenate(x), everyone[rank])


def check_exchanges(queue: Queue, world: Any, layout: Any, out_layout: Any, at_once: bool) -> None:
    rank, size, root = world.rank, world.size, world.size - 1
    everyone = [values_of(each, rows(each)) for each in range(size)]
    together = np.concatenate(everyone)
    sizes = [each.nbytes for each in everyone]
    x, out = layout(everyone[rank]), out_layout(np.zeros_like(together))
    queue.finish(Kind.allgather, x, out, out_sizes=sizes, at_once=at_once)
    assert np.array_equal(np.concatenate(out), together)
    begin = sum(sizes[:rank]) // 8
    in_place = np.zeros_like(together)
    in_place[begin : begin + rows(rank)] = everyone[rank]
    queue.finish(
        Kind.allgather, in_place[begin : begin + rows(rank)], in_place, out_sizes=sizes, at_once=at_once
    )
    assert np.array_equal(in_place, together)
    out = empty_like(out)
    queue.finish(Kind.gather, x, out if rank == root else None, root=root, out_sizes=sizes, at_once=at_once)
    if rank == root:
        assert np.array_equal(np.concatenate(out), together)
    x, out = layout(together), out_layout(np.zeros(rows(rank)))
    queue.finish(Kind.scatter, x if rank == root else None, out, root=root, in_sizes=sizes, at_once=at_once)
    assert np.array_equal(np.concatenate(out), everyone[rank])
    # Rank p sends rows(q) + p elements to rank q.
    sent = [[values_of(10 * p + q, rows(q) + p) for q in range(size)] for p in range(size)]
    mine = np.concatenate(sent[rank])
    theirs = np.concatenate([sent[each][rank] for each in range(size)])
    x, out = layout(mine), out_layout(np.zeros_like(theirs))
    splits = {
        "in_sizes": [block.nbytes for block in sent[rank]],
        "out_sizes": [sent[each][rank].nbytes for each in range(size)],
    }
    queue.finish(Kind.alltoall, x, out, **splits, at_once=at_once)
    assert np.array_equal(np.concatenate(out), theirs)
    assert np.array_equal(np.concatenate(x), mine)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_operation_on_parts_of_memory(n: int, transport: str) -> None:
    ranks.run(all_operations, n, transport, environ={"RONDE_TRANSPORT": transport})


def coalesced() -> None:
    ronde.init()
    world = ronde.world()
    rank, size = world.rank, world.size
    queue = Queue(world)
    lengths = [5, MIB, 7, 9, 2 * MIB, 3]
    parts = [values_of(rank, length).astype(np.float32) for length in lengths]
    expected = [np.sum([values_of(p, n).astype(np.float32) for p in range(size)], axis=0) for n in lengths]
    out = empty_like(parts)
    queue.finish(Kind.allreduce, parts, out)
    for each, total in zip(out, expected, strict=True):
        np.testing.assert_allclose(each, total)
    # Adjacent on one rank only: the ranks make the same calls nevertheless.
    together = np.ones(2 * MIB, np.float32)
    halves = np.split(together, 2) if rank == 0 else [np.ones(MIB, np.float32) for _ in range(2)]
    queue.finish(Kind.broadcast, parts, parts, root=0)
    queue.finish(Kind.allreduce, halves, halves)
    assert all((half == size).all() for half in halves)
    assert all(
        np.array_equal(a, values_of(0, n).astype(np.float32)) for a, n in zip(parts, lengths, strict=True)
    )


def test_large_parts() -> None:
    ranks.run(coalesced, 2)


def two_threads(posts: int) -> None:
    """Two threads post calls; then one of them posts calls that it makes itself if the queue is empty."""
    ronde.init()
    world = ronde.world()
    queue = Queue(world)
    results = np.zeros(2 * posts)
    calls: list[_native.QueuedCall] = []
    lock = threading.Lock()

    def post() -> None:
        for _ in range(posts):
            with lock:  # the call whose memory comes first is posted first
                place = results[len(calls) : len(calls) + 1]
                place[0] = len(calls)
                calls.append(queue.post(Kind.allreduce, place, place))

    threads = [threading.Thread(target=post) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for call in calls:
        assert call.wait(NEVER_NS)
        assert call.is_done()
        assert not call.has_failed()
    assert np.array_equal(results, np.arange(2 * posts) * world.size)
    at_once = [threading.Thread(target=post_barriers, args=(queue, each, posts)) for each in (True, False)]
    for thread in at_once:
        thread.start()
    for thread in at_once:
        thread.join()
    queue.finish(Kind.barrier)


EMPTY_BARRIER = (Kind.barrier, DType.uint8, ReduceOp.Sum, -1, (), (), (), (), 1.0, 0)


def post_barriers(queue: Queue, at_once: bool, posts: int) -> None:
    for _ in range(posts):
        queue.native.post(*EMPTY_BARRIER, at_once)


def test_posts_of_two_threads() -> None:
    ranks.run(two_threads, 2, 200)


def refuse() -> list[str]:
    ronde.init()
    queue = Queue(ronde.world())
    x = np.ones(4, np.float32)
    wrong: list[tuple[Any, ...]] = [
        (Kind.allreduce, x, x[:3], {}),
        (Kind.allreduce, np.ones(4, np.int32), np.ones(4, np.int32), {"factor": 2.0}),
        (Kind.broadcast, x, x, {"root": 2}),
        (Kind.broadcast, x, x, {"root": 0, "factor": 2.0}),
        (Kind.allgather, x, np.ones(8, np.float32), {"out_sizes": [16]}),
        (Kind.allgather, x, np.ones(8, np.float32), {"out_sizes": [16, 18]}),
        (Kind.alltoall, x, x, {"in_sizes": [8, 8], "out_sizes": [8, 16]}),
        (Kind.sendrecv, x, x, {}),
    ]
    texts = []
    for kind, inputs, outputs, options in wrong:
        for at_once in (False, True):
            with pytest.raises(ronde.UsageError) as refused:
                queue.post(kind, inputs, outputs, at_once=at_once, **options)
            texts.append(str(refused.value))
    queue.finish(Kind.allreduce, x, x)
    assert (x == 2).all()
    return texts


def test_wrong_arguments_are_refused_and_do_not_fail_the_queue() -> None:
    texts = ranks.run(refuse, 2)[0]
    assert texts[0] == "the output of allreduce has 12 bytes but must have 16"
    assert texts[::2] == texts[1::2]


def mismatched() -> None:
    ronde.init()
    world = ronde.world()
    queue = Queue(world)
    x = np.ones(2 + world.rank)
    call = queue.post(Kind.allreduce, x, x)
    for _ in range(2):
        with pytest.raises(ronde.MismatchError, match="rank 0 called allreduce of 2 float64"):
            call.wait(0)
    assert call.is_done()
    assert call.has_failed()
    y = np.ones(1)
    queue.finish(Kind.allreduce, y, y)
    assert y[0] == 2


def test_a_mismatch_on_one_host_does_not_fail_the_queue() -> None:
    ranks.run(mismatched, 2)


def wait_too_long(at_once: bool) -> tuple[str, str, int]:
    ronde.init()
    world = ronde.world()
    queue = Queue(world)
    x = np.ones(1)
    queue.finish(Kind.allreduce, x, x, timeout_ns=NEVER_NS)
    if world.rank == 1:
        wait_until(world._native.has_failed)
    try:
        call = queue.post(Kind.allreduce, x, x, timeout_ns=200 * 10**6, at_once=at_once)
        assert world.rank == 1 or not call.wait(1)
        call.wait(0)
    except ronde.TimeoutError as error:
        with pytest.raises(ronde.TimeoutError, match="waited 200 ms in allreduce"):
            queue.finish(Kind.barrier)
        return str(error), error.operation, error.waited_ns
    raise AssertionError("no error")


@pytest.mark.parametrize("at_once", [False, True])
def test_the_time_limit_of_one_call(at_once: bool) -> None:
    first, second = ranks.run(wait_too_long, 2, at_once)
    assert first[0].startswith("timed out: waited 200 ms in allreduce of 1 float64 by sum for rank 1 on ")
    assert first[1:] == ("allreduce", 200 * 10**6)
    assert second[0] == first[0]


def lose_a_peer(at_once: bool) -> tuple[str, int]:
    ronde.init()
    world = ronde.world()
    queue = Queue(world)
    x = np.ones(1)
    queue.finish(Kind.allreduce, x, x)
    tell()
    if world.rank == 1:
        time.sleep(100)
    later = [] if at_once else [queue.post(Kind.allreduce, x, x) for _ in range(3)]
    try:
        for call in later or [queue.post(Kind.allreduce, x, x, at_once=True)]:
            call.wait(NEVER_NS)
    except ronde.PeerLostError as error:
        for call in later:
            with pytest.raises(ronde.PeerLostError, match=r"rank 1 on .* was lost"):
                call.wait(NEVER_NS)
        queue.native.close("the test ends")
        with pytest.raises(ronde.PeerLostError):
            queue.post(Kind.allreduce, x, x)
        return str(error), error.rank
    raise AssertionError("no error")


@pytest.mark.parametrize("at_once", [False, True])
def test_a_lost_peer_is_named(at_once: bool) -> None:
    with ranks.start(lose_a_peer, 2, at_once) as job:
        job.told(0)
        job.told(1)
        time.sleep(0.1)
        faults.kill(job.pids[1])
        outcome = job.outcomes()[0]
    assert outcome.error is None, outcome.traceback_text
    assert outcome.value[1] == 1


def wait_until(condition: Callable[[], bool]) -> None:
    """As a rank that computes, and so is not in the call that the other one waits in."""
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def close_early() -> list[str]:
    ronde.init()
    world = ronde.world()
    queue = Queue(world)
    x = np.ones(1)
    if world.rank == 1:
        wait_until(world._native.has_failed)
        with pytest.raises(ronde.AbortedError, match=r"rank 0 on .* aborted: the group is destroyed"):
            world.barrier()
        return []
    calls = [queue.post(Kind.allreduce, x, x) for _ in range(3)]
    texts = []

    def wait() -> None:
        with pytest.raises(ronde.RondeError) as refused:
            calls[1].wait(0)
        texts.append(str(refused.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not calls[0].wait(10**6)
    queue.native.close("the group is destroyed")
    queue.native.close("this does nothing")
    waiting.join()
    with pytest.raises(ronde.AbortedError) as refused:
        calls[2].wait(0)
    texts.append(str(refused.value))
    return texts


def test_closing_aborts_what_does_not_end() -> None:
    texts = ranks.run(close_early, 2)[0]
    assert len(texts) == 2
    assert all(text.endswith("aborted: the group is destroyed") for text in texts)


def threads_of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def many_queues(count: int) -> None:
    ronde.init()
    world = ronde.world()
    x = np.ones(1)
    world.allreduce(x)
    before = threads_of_this_process()
    for each in range(count):
        queue = Queue(world)
        queue.finish(Kind.allreduce, x, x)
        if each % 2:
            queue.native.close("done")
    del queue
    wait_until(lambda: threads_of_this_process() <= before)  # the kernel lists an ended thread for a moment
    native = world._native
    queue = Queue(world)
    queue.finish(Kind.barrier)
    world.shutdown()
    with pytest.raises(ronde.UsageError, match="has been shut down"):
        queue.finish(Kind.barrier)
    del world, native, queue


def test_a_thousand_queues_leave_no_threads() -> None:
    ranks.run(many_queues, 2, 1000)


def fork_while_running() -> int:
    ronde.init()
    world = ronde.world()
    queue = Queue(world)
    x = np.ones(1)
    queue.finish(Kind.barrier)
    pending = queue.post(Kind.allreduce, x, x) if world.rank == 0 else None
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if pending is not None:
                assert pending.is_done()
                assert pending.has_failed()
                with pytest.raises(ronde.UsageError, match="belongs to the parent"):
                    pending.wait(0)
            with pytest.raises(ronde.UsageError, match="belongs to the parent"):
                queue.finish(Kind.barrier)
            queue.native.close("in a child")
            if world.rank == 0:
                queue.native.abandon()
            del queue
            status = 0
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    if pending is None:
        queue.finish(Kind.allreduce, x, x)
    else:
        assert pending.wait(NEVER_NS)
    assert x[0] == 2
    return status


def test_a_forked_child_leaves_the_queue_alone() -> None:
    assert ranks.run(fork_while_running, 2) == [0, 0]


def interrupted(how: str, path: str) -> str:
    ronde.init()
    world = ronde.world()
    queue = Queue(world)
    x, done = np.ones(1), Path(path)
    queue.finish(Kind.barrier)
    if world.rank == 1:
        if how == "queued":
            wait_until(done.exists)
            queue.finish(Kind.allreduce, x, x)
            return ""
        wait_until(world._native.has_failed)
        with pytest.raises(ronde.AbortedError) as aborted:
            queue.finish(Kind.barrier)
        return str(aborted.value)
    call = queue.post(Kind.allreduce, x, x) if how != "at once" else None
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        wait_for(call if how == "queued" else None, queue)
    done.touch()
    if call is not None and how == "queued":
        assert call.wait(NEVER_NS)
    return ""


def wait_for(call: _native.QueuedCall | None, queue: Queue) -> None:
    if call is not None:
        call.wait(0)
    x = np.ones(1)
    queue.post(Kind.allreduce, x, x, at_once=True)


@pytest.mark.parametrize("how", ["queued", "at once", "at once behind others"])
def test_ctrl_c_ends_a_wait(how: str, tmp_path: Path) -> None:
    error = ranks.run(interrupted, 2, how, str(tmp_path / "done"))[1]
    assert error == "" if how == "queued" else error.endswith("aborted: interrupted by a signal")


def post_in_a_signal_handler(path: str) -> list[str]:
    ronde.init()
    world = ronde.world()
    queue = Queue(world)
    x, done, seen = np.ones(1), Path(path), []

    def post(*_: object) -> None:
        with pytest.raises(ronde.UsageError) as refused:
            queue.post(Kind.barrier, at_once=True)
        seen.append(str(refused.value))
        done.touch()

    if world.rank == 1:
        wait_until(done.exists)
    else:
        signal.signal(signal.SIGUSR1, post)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    queue.post(Kind.allreduce, x, x, at_once=True)
    assert x[0] == 2
    return seen


def test_a_signal_handler_that_posts_in_the_middle_of_a_call(tmp_path: Path) -> None:
    texts = ranks.run(post_in_a_signal_handler, 2, str(tmp_path / "done"))
    assert texts == [
        ["this communicator is in the middle of a call, which a signal handler has interrupted"],
        [],
    ]


def wait_for_a_rank_that_does_not_come(path: str) -> list[str]:
    comm.init(stall_warning_ns=LIMIT_NS)
    pipe = os.open(path, os.O_RDWR)
    told = Reports(pipe, logger="ronde.comm")
    world = comm.world()
    queue = Queue(world)
    x = np.ones(3)
    if world.rank == 1:
        stay_in_user_code("sleeps", pipe)
    queue.finish(Kind.allreduce, x, x)
    comm.shutdown()
    os.close(pipe)
    return told.texts


def test_a_stall_report_tells_which_line_has_posted_the_call(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (report,), _ = ranks.run(wait_for_a_rank_that_does_not_come, 2, str(tmp_path / "pipe"))
    lines = inspect.getsourcelines(Queue.post)
    posted = [lines[1] + index for index, line in enumerate(lines[0]) if "self.native.post(" in line]
    place = f"{Path(__file__).parent.name}/{Path(__file__).name}:{posted[0]}"
    assert "call 1 on world: allreduce of 3 float64 by sum, posted at " in report
    assert place in report
    assert "begun by rank 0, not by rank 1" in report


def end_in_the_middle(how: str) -> None:
    """The interpreter ends while a call waits, for another rank that does not come."""
    ronde.init()
    world = ronde.world()
    queue = Queue(world)
    x = np.ones(1)
    if world.rank == 1:
        wait_until(world._native.has_failed)
        return
    call = queue.post(Kind.allreduce, x, x)
    if how == "alive":
        KEPT.extend((queue.native, call, x))
    elif how == "in a cycle":
        cycle: list[Any] = [queue.native, call, x]
        cycle.append(cycle)


KEPT: list[object] = []


@pytest.mark.fresh_ranks
@pytest.mark.parametrize("how", ["alive", "in a cycle", "dropped"])
def test_the_end_of_the_interpreter(how: str) -> None:
    ranks.run(end_in_the_middle, 2, how)
