"""What makes no sense is refused in a clear sentence, and nobody waits for ever.

A UsageError concerns one rank and one call: nothing was sent, or the error says that the other ranks have their
results; and the next call works. A MismatchError is raised on every rank; on one host the next call works.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.ranks import programs

import ronde
from ronde.testing import ranks

Call = Callable[[Any], Any]

X, MANY = np.ones(6, np.float32), np.ones(300_000, np.float32)
X46, X64 = np.ones((4, 6), np.float32), np.ones((6, 4), np.float32)
ROWS23, ROWS32 = np.ones((12, 2, 3), np.float32), np.ones((12, 3, 2), np.float32)
READ_ONLY = np.ones(6, np.float32)
READ_ONLY.flags.writeable = False
MASKED = np.ma.masked_array(X, [True] + [False] * 5)

# What a rank calls, and what it is told.
REFUSED: list[tuple[Call, str]] = [
    (lambda w: w.allreduce([1, 2]), "expected an array .* got list; convert it with numpy.asarray"),
    (lambda w: w.allreduce("text"), "expected an array .* got str"),
    (lambda w: w.allreduce(None), "expected an array .* got NoneType"),
    (lambda w: w.allreduce(1.5, out=2.5), "out must be a NumPy array or a PyTorch tensor, not float"),
    (lambda w: w.reducescatter(1.5), "reducescatter splits the first axis; a 0-d array has none"),
    (lambda w: w.allgather({1}), "expected an array .* got set"),
    (lambda w: w.broadcast((1, 2)), "expected an array .* got tuple; convert it with numpy.asarray"),
    (
        lambda w: w.allreduce(np.array([{}])),
        "the dtype object of the ndarray is not supported; convert it to bool, uint8",
    ),
    (lambda w: w.allgather(np.array(["a"])), "the dtype str\\w* of the ndarray is not supported"),
    (
        lambda w: w.broadcast(np.array(["2026-01-01"], "M8[D]")),
        r"the dtype datetime64\S* of the ndarray is not supported",
    ),
    (lambda w: w.allreduce(np.zeros(3, [("a", "f4")])), "is not supported; convert it to bool"),
    (lambda w: w.allreduce(np.ones(6, ">f4")), "the other byte order .*astype"),
    (lambda w: w.allgather(np.ones(6, ">i8")), "the other byte order .*astype"),
    (lambda w: w.allreduce(MASKED), r"the array is a masked array, whose mask .*: pass x.filled\(value\)"),
    (lambda w: w.allreduce(MASKED, out=X.copy()), "is a masked array"),
    (lambda w: w.allreduce(X, out=MASKED), "is a masked array"),
    (lambda w: w.broadcast(MASKED, out=MASKED), "is a masked array"),
    (lambda w: w.allgather(MASKED), "is a masked array"),
    (lambda w: w.reducescatter(MASKED, out=np.ones(3, np.float32)), "is a masked array"),
    (lambda w: w.reduce(MASKED, 1), "is a masked array"),
    (lambda w: w.gather(MASKED, 1), "is a masked array"),
    (lambda w: w.scatter(MASKED, 1), "is a masked array"),
    (lambda w: w.alltoall(MASKED), "is a masked array"),
    (lambda w: w.send(MASKED, 0), "is a masked array"),
    (lambda w: w.recv(MASKED, 0), "is a masked array"),
    (lambda w: w.allreduce(X, out=np.ones(6)), "out holds float64 values, the (result|input) float32"),
    (
        lambda w: w.allreduce(X, out=np.ones(7, np.float32)),
        r"out has shape \(7,\), the result has shape \(6,\)",
    ),
    (lambda w: w.allreduce(X, out=np.ones((2, 3), np.float32)), r"out has shape \(2, 3\), the result has"),
    (lambda w: w.allreduce(X, out=np.ones((6, 1), np.float32)), r"out has shape \(6, 1\), the result has"),
    (lambda w: w.allreduce(X, out=READ_ONLY), "out is read-only"),
    (lambda w: w.allreduce(X, out=[0] * 6), "expected an array .* got list"),
    (lambda w: w.allreduce(READ_ONLY, out=READ_ONLY), "out is read-only"),
    (lambda w: w.allreduce(MANY[1:], out=MANY[:-1]), "out overlaps the input"),
    (lambda w: w.reduce(MANY[1:], w.rank, out=MANY[:-1]), "out overlaps the input"),
    (lambda w: w.reduce(X, w.rank, out=READ_ONLY), "out is read-only"),
    (lambda w: w.broadcast(MANY[1:], w.rank, out=MANY[:-1]), "out overlaps the input"),
    (lambda w: w.reducescatter(X, out=X), r"out has shape \(6,\), the result has shape"),
    (
        lambda w: w.broadcast(X, out=np.ones(5, np.float32)),
        r"out has shape \(5,\), the result has shape \(6,\)",
    ),
    (lambda w: w.broadcast(X, root=1, out=READ_ONLY), "out is read-only"),
    (lambda w: w.recv(READ_ONLY, 1 - w.rank), "out is read-only|cannot write into this array"),
    (lambda w: w.recv(np.ones(6)[::-1].tolist(), 1 - w.rank), "expected an array .* got list"),
    (lambda w: w.broadcast(X, root=2), "root 2 is .* 0 to 1"),
    (lambda w: w.broadcast(X, root=-1), "root -1 is .* 0 to 1"),
    (lambda w: w.broadcast(X, root=1.0), "root 1.0 is .* 0 to 1"),
    (lambda w: w.gather(X, root=None), "root None is .* 0 to 1"),
    (lambda w: w.reduce(X, root="0"), "root 0 is .* 0 to 1"),
    (lambda w: w.reduce(X, root=2), "root 2 is .* 0 to 1"),
    (lambda w: w.gather(X, root=2), "root 2 is .* 0 to 1"),
    (lambda w: w.scatter(X, root=2), "root 2 is .* 0 to 1"),
    (lambda w: w.scatter(None, root=w.rank), "expected an array .* got NoneType"),
    (lambda w: w.scatter(np.float32(1), root=w.rank), "scatter splits the first axis; a 0-d array has none"),
    (lambda w: w.reducescatter(np.array(1.0)), "reducescatter splits the first axis; a 0-d array has none"),
    (lambda w: w.alltoall(np.array(1.0)), "alltoall splits the first axis; a 0-d array has none"),
    (lambda w: w.alltoall(X[:5]), "first dimension divisible by 2, not 5"),
    (lambda w: w.alltoall(X, [6]), r"splits needs 2 numbers >= 0 that add up to 6 .*, not \[6\]"),
    (lambda w: w.alltoall(X, [3, 4]), r"splits needs 2 numbers >= 0 that add up to 6 .*, not \[3, 4\]"),
    (lambda w: w.alltoall(X, [-1, 7]), r"splits needs 2 numbers >= 0 that add up to 6 .*, not \[-1, 7\]"),
    (lambda w: w.alltoall(X, out=X), "alltoall cannot work in place"),
    (lambda w: w.send(X, w.rank), "cannot send to or receive from rank"),
    (lambda w: w.recv(X.copy(), w.rank), "cannot send to or receive from rank"),
    (lambda w: w.send(X, 2), "cannot send to or receive from rank 2"),
    (lambda w: w.send(X, -1), "cannot send to or receive from rank -1"),
    (lambda w: w.send(X, 1 - w.rank, tag=-1), "a tag must be a number from 0 to 2147483647, not -1"),
    (
        lambda w: w.send(X, 1 - w.rank, tag=2**31),
        "a tag must be a number from 0 to 2147483647, not 2147483648",
    ),
    (lambda w: w.recv(X, 1 - w.rank, tag=-1), "a tag must be a number from 0 to 2147483647, not -1"),
    (lambda w: w.allreduce(np.ones(3, bool), op=ronde.Average), "there is no average of bool values"),
    (lambda w: w.reduce(np.ones(3, bool), 0, op=ronde.Average), "there is no average of bool values"),
    (lambda w: w.allreduce(np.ones(3, complex), op=ronde.Min), "there is no min of complex128 values"),
    (lambda w: w.reducescatter(np.ones(4, complex), op=ronde.Max), "there is no max of complex128 values"),
    (lambda w: w.allreduce(X, op=ronde.BitXor), "there is no bit-xor of float32 values"),
    (lambda w: w.allreduce(X, op=99), "op must be one of ronde.Sum, .*, not 99"),
    (lambda w: w.split(-1), "a color must be None or a whole number >= 0, not -1"),
    (lambda w: w.group([0, 0]), r"ranks must be distinct numbers from 0 to 1, not \[0, 0\]"),
]


def refuse_on_one_rank() -> list[str]:
    """Only rank 1 goes wrong: rank 0 must not notice. Returns what is not as it should be."""
    ronde.init()
    world: Any = ronde.world()
    wrong = []
    for number, (call, message) in enumerate(REFUSED):
        if world.rank == 1:
            try:
                call(world)
                wrong.append(f"{number}: no UsageError that says {message!r}")
            except ronde.UsageError as error:
                if not re.search(message, str(error)) or "have their results" in str(error):
                    wrong.append(f"{number}: {error!s} instead of {message!r}")
            except Exception as error:
                wrong.append(f"{number}: {error!r} instead of {message!r}")
        assert world.allreduce(np.array([number]))[0] == 2 * number
    ronde.shutdown()
    return wrong


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_nonsense_is_refused_on_the_rank_that_asks_for_it(transport: str) -> None:
    environ = {"RONDE_TRANSPORT": transport, "RONDE_TIMEOUT": "20"}
    assert ranks.run(refuse_on_one_rank, 2, environ=environ)[1] == []


def calling(function: Callable[..., Any], *arguments: Any) -> Call:
    return lambda w: function(w, *arguments)


# What is called on rank 0, what on the others, and how an error describes the two.
MISMATCHES: dict[str, tuple[Call, Call, str, str]] = {
    "operation": (
        lambda w: w.allreduce(X),
        lambda w: w.barrier(),
        "rank 0 called allreduce of 6 float32 by sum",
        "called barrier",
    ),
    "operation, large": (lambda w: w.allreduce(MANY), lambda w: w.broadcast(MANY), "allreduce", "broadcast"),
    "operation, of sizes first": (
        lambda w: w.allgather(X),
        lambda w: w.alltoall(ROWS23),
        "allgather",
        "alltoall",
    ),
    "memory": (lambda w: w.empty(6), lambda w: w.allreduce(X), "empty", "allreduce"),
    "size of memory": (lambda w: w.empty(6), lambda w: w.empty(60), "for 24 bytes", "for 240 bytes"),
    "dtype": (
        lambda w: w.allreduce(X),
        lambda w: w.allreduce(X.view(np.int32)),
        "6 float32 by",
        "6 int32 by",
    ),
    "dtype of rows": (lambda w: w.allgather(X), lambda w: w.allgather(X.view(np.int32)), "float32", "int32"),
    "count": (lambda w: w.allreduce(X), lambda w: w.allreduce(X[:5]), "of 6 float32", "of 5 float32"),
    "count, large": (
        lambda w: w.allreduce(MANY),
        lambda w: w.allreduce(MANY[1:]),
        "of 300000 ",
        "of 299999 ",
    ),
    "count, one small": (lambda w: w.allreduce(MANY), lambda w: w.allreduce(X), "of 300000 ", "of 6 "),
    "count, nothing": (lambda w: w.allreduce(X), lambda w: w.allreduce(X[:0]), "of 6 ", "of 0 "),
    "count of broadcast": (lambda w: w.broadcast(X), lambda w: w.broadcast(X[1:]), "of 6 ", "of 5 "),
    "op": (lambda w: w.allreduce(X), lambda w: w.allreduce(X, op=ronde.Max), "by sum", "by max"),
    "root": (lambda w: w.broadcast(X, 0), lambda w: w.broadcast(X, 1), "root 0", "root 1"),
    "root of reduce": (lambda w: w.reduce(X, 0), lambda w: w.reduce(X, 1), "root 0", "root 1"),
    "root of gather": (lambda w: w.gather(X, 0), lambda w: w.gather(X, 1), "root 0", "root 1"),
    "root of scatter": (
        lambda w: w.scatter(X, 0),
        lambda w: w.scatter(X if w.rank == 1 else None, 1),
        "root 0",
        "root 1",
    ),
    "row of allgather": (
        lambda w: w.allgather(np.ones((2, 3))),
        lambda w: w.allgather(np.ones((2, 4))),
        "of 3 float64",
        "of 4 float64",
    ),
    "row of gather": (
        lambda w: w.gather(np.ones((2, 3))),
        lambda w: w.gather(np.ones((2, 4))),
        "of 3 float64",
        "of 4 float64",
    ),
    "row of alltoall": (
        lambda w: w.alltoall(np.ones((12, 3))),
        lambda w: w.alltoall(np.ones((12, 4))),
        "(3,)",
        "(4,)",
    ),
    **{
        f"shape of {name}": (first, others, "(4, 6)", "(6, 4)")
        for name, first, others in (
            ("allreduce", lambda w: w.allreduce(X46), lambda w: w.allreduce(X64)),
            (
                "strided allreduce",
                lambda w: w.allreduce(MANY.reshape(4, -1)[:, :6]),
                lambda w: w.allreduce(X64),
            ),
            ("reduce", lambda w: w.reduce(X46), lambda w: w.reduce(X64)),
            ("reducescatter", lambda w: w.reducescatter(X46), lambda w: w.reducescatter(X64)),
            ("broadcast", lambda w: w.broadcast(X46), lambda w: w.broadcast(X64)),
        )
    },
    "shape, one axis more": (
        lambda w: w.allreduce(X),
        lambda w: w.allreduce(X.reshape(6, 1)),
        "(6,) on rank 0",
        "(6, 1) on rank ",
    ),
    "shape, too long to be told": (
        lambda w: w.allreduce(np.ones((1,) * 8)),
        lambda w: w.allreduce(np.ones((1,) * 9)),
        "different shapes",
        "different shapes",
    ),
    "shares of reducescatter": (
        lambda w: w.reducescatter(np.ones((w.size, 6))),
        lambda w: w.reducescatter(np.ones((2 * w.size, 3))),
        ", 6)",
        ", 3)",
    ),
    **{
        f"row's shape of {name}": (first, others, "(2, 3)", "(3, 2)")
        for name, first, others in (
            ("allgather", lambda w: w.allgather(ROWS23), lambda w: w.allgather(ROWS32)),
            ("gather", lambda w: w.gather(ROWS23), lambda w: w.gather(ROWS32)),
            ("alltoall", lambda w: w.alltoall(ROWS23), lambda w: w.alltoall(ROWS32)),
        )
    },
    **{
        f"{what} of {name}": (
            calling(call, *first),
            calling(call, *others),
            *descriptions,
        )
        for name, call in (
            ("reduce", lambda w, x, op: w.reduce(x, 0, op=op)),
            ("reducescatter", lambda w, x, op: w.reducescatter(x, op=op)),
        )
        for what, first, others, descriptions in (
            ("dtype", (X64, ronde.Sum), (X64.view(np.int32), ronde.Sum), ("24 float32", "24 int32")),
            ("count", (X64, ronde.Sum), (X64[:4], ronde.Sum), ("of 24 ", "of 16 ")),
            ("op", (X64, ronde.Sum), (X64, ronde.Average), ("by sum", "by average")),
        )
    },
    "16-bit and 32-bit floats": (
        lambda w: w.allreduce(X.astype(np.float16)),
        lambda w: w.allreduce(X),
        "6 float16",
        "6 float32",
    ),
    "dtype of broadcast": (
        lambda w: w.broadcast(X),
        lambda w: w.broadcast(X.view(np.int32)),
        "float32",
        "int32",
    ),
    "dtype of gather": (lambda w: w.gather(X), lambda w: w.gather(X.view(np.int32)), "float32", "int32"),
    "dtype of alltoall": (
        lambda w: w.alltoall(ROWS23),
        lambda w: w.alltoall(ROWS23.view(np.int32)),
        "float32",
        "int32",
    ),
}


def disagree(names: list[str], is_one_host: bool) -> list[str]:
    """Each mismatch in a communicator of its own. Returns what is not as it should be on this rank."""
    ronde.init()
    world: Any = ronde.world()
    wrong = []
    for name, group in [(name, world.split(0)) for name in names]:
        first, others, *descriptions = MISMATCHES[name]
        try:
            (first if group.rank == 0 else others)(group)
            if not is_one_host:
                group.barrier()  # whoever only sends may have done so before somebody objects
            wrong.append(f"{name}: no error")
        except ronde.MismatchError as error:
            # Between hosts it may be the next call that finds out.
            if not (all if is_one_host else any)(description in str(error) for description in descriptions):
                wrong.append(f"{name}: {error!s} instead of {descriptions}")
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
        if is_one_host:
            try:
                assert group.allreduce(np.array([1]))[0] == group.size
            except Exception as error:
                wrong.append(f"{name}: and then {error!r}")
    world.barrier()
    ronde.shutdown()
    return wrong


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_mismatch_is_told_to_every_rank(transport: str, n: int) -> None:
    environ = {"RONDE_TRANSPORT": transport, "RONDE_TIMEOUT": "3"}
    assert ranks.run(disagree, n, list(MISMATCHES), transport == "auto", environ=environ) == [[]] * n


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aab", "aabb"])
def test_a_mismatch_is_told_where_hosts_have_several_ranks(hosts: str) -> None:
    places = [ranks.Place(environ={"RONDE_HOST_ID": host, "RONDE_TIMEOUT": "3"}) for host in hosts]
    with ranks.start(disagree, len(hosts), list(MISMATCHES), False, places=places) as job:
        assert job.results() == [[]] * len(hosts)


MESSAGES: dict[str, tuple[Call, Call, str, str]] = {
    "tag": (lambda w: w.send(X, 1, tag=1), lambda w: w.recv(X.copy(), 0, tag=2), "with tag 1", "with tag 2"),
    "size": (lambda w: w.send(X, 1), lambda w: w.recv(X[1:].copy(), 0), "24 bytes", "20 bytes"),
    "dtype": (lambda w: w.send(X, 1), lambda w: w.recv(np.ones(6, np.int32), 0), "float32", "int32"),
}


def messages_that_disagree() -> list[str]:
    """Whose message fits into the link has sent it before anybody objects: the next call tells."""
    ronde.init()
    world: Any = ronde.world()
    wrong = []
    for name, group in [(name, world.split(0)) for name in MESSAGES]:
        *calls, sent, expected = MESSAGES[name]
        try:
            calls[group.rank](group)
            group.barrier()
            wrong.append(f"{name}: no error")
        except ronde.MismatchError as error:
            if sent not in str(error) or expected not in str(error):
                wrong.append(f"{name}: {error}")
    ronde.shutdown()
    return wrong


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_messages_must_agree(transport: str) -> None:
    environ = {"RONDE_TRANSPORT": transport, "RONDE_TIMEOUT": "5"}
    assert ranks.run(messages_that_disagree, 2, environ=environ) == [[]] * 2


def a_message_that_meets_a_collective() -> str:
    """They would wait for each other for ever: after a second they compare notes."""
    ronde.init()
    world: Any = ronde.world()
    call = (lambda: world.recv(np.ones(3), 1)) if world.rank == 0 else world.barrier
    with pytest.raises(ronde.MismatchError, match="barrier") as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_messages_do_not_meet_collectives(transport: str) -> None:
    for message in ranks.run(a_message_that_meets_a_collective, 2, environ={"RONDE_TRANSPORT": transport}):
        assert "rank 0 called send/recv of float64 with tag 0" in message


LATE: list[tuple[Call, Call, str]] = [
    (
        lambda w: w.allgather(X),
        lambda w: w.allgather(X, out=X),
        r"out has shape \(6,\), the result .* \(12,\)",
    ),
    (lambda w: w.gather(X, 1), lambda w: w.gather(X, 1, out=READ_ONLY), "out "),
    (lambda w: w.scatter(X, 0), lambda w: w.scatter(root=0, out=np.ones(3)), "out holds float64 values"),
    (lambda w: w.alltoall(X), lambda w: w.alltoall(X, out=X[:3].copy()), r"out has shape \(3,\)"),
]


def refuse_late() -> None:
    """An output whose shape depends on what the others pass: they are served, and the next call works."""
    ronde.init()
    world: Any = ronde.world()
    for good, bad, message in LATE:
        if world.rank == 0:
            good(world)
        else:
            with pytest.raises(
                ronde.UsageError, match=message + ".* other ranks, so they have made this call and have"
            ):
                bad(world)
        assert world.allreduce(np.array([1]))[0] == 2
    ronde.shutdown()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_who_passes_a_wrong_output_takes_part_nevertheless(transport: str) -> None:
    ranks.run(refuse_late, 2, environ={"RONDE_TRANSPORT": transport, "RONDE_TIMEOUT": "20"})


def ask_in_a_forked_child() -> int:
    """As workers of a DataLoader do. It is no rank itself."""
    ronde.init()
    answers = (ronde.rank(), ronde.size(), ronde.local_rank(), ronde.cross_size(), ronde.is_homogeneous())
    child = os.fork()
    if child == 0:
        with contextlib.suppress(ronde.NotInitializedError):
            ronde.world()
            os._exit(1)
        again = (ronde.rank(), ronde.size(), ronde.local_rank(), ronde.cross_size(), ronde.is_homogeneous())
        os._exit(0 if again == answers and ronde.is_initialized() else 2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ronde.barrier()
    ronde.shutdown()
    return code


def test_a_forked_child_may_ask_who_its_parent_is() -> None:
    assert ranks.run(ask_in_a_forked_child, 2) == [0, 0]


def before_and_after() -> None:
    assert not ronde.is_initialized()
    for question in (
        ronde.world,
        ronde.rank,
        ronde.size,
        ronde.local_rank,
        ronde.cross_size,
        ronde.is_homogeneous,
    ):
        with pytest.raises(ronde.NotInitializedError, match=r"call ronde\.init\(\) first"):
            question()
    ronde.shutdown()  # does nothing
    with pytest.raises(
        ronde.UsageError, match=r"size=3 contradicts WORLD_SIZE=2 of the environment .*leave size out"
    ):
        ronde.init(size=3)
    with pytest.raises(ronde.UsageError, match=r"rank=7 contradicts RANK=\d of the environment"):
        ronde.init(rank=7)
    with pytest.raises(ronde.UsageError, match="unknown setting 'tcp_stream'; did you mean tcp_streams"):
        ronde.init(tcp_stream=1)
    with pytest.raises(ronde.UsageError, match="tcp_streams=0 is invalid: expected a whole number from 1"):
        ronde.init(tcp_streams=0)
    ronde.init(size=2)
    ronde.init()  # does nothing
    assert ronde.is_initialized()
    world: Any = ronde.world()
    assert world.allreduce(X).sum() == 12
    array = world.empty(10)
    ronde.shutdown()
    ronde.shutdown()
    assert not ronde.is_initialized()
    with pytest.raises(ronde.NotInitializedError, match=r"call ronde\.init\(\) first"):
        ronde.world()
    for call in (world.barrier, lambda: world.allreduce(X), lambda: world.empty(3), lambda: world.split(0)):
        with pytest.raises(ronde.UsageError, match="this communicator has been shut down"):
            call()
    for call in (lambda: world.send(X, 1 - world.rank), lambda: world.recv(X.copy(), 1 - world.rank)):
        with pytest.raises(ronde.UsageError, match="this communicator has been shut down"):
            call()
    array[:] = 3  # still there
    assert array.sum() == 30


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_calls_before_and_after(transport: str) -> None:
    ranks.run(before_and_after, 2, environ={"RONDE_TRANSPORT": transport})


def init_with_different_settings() -> str:
    try:
        ronde.init(staging_bytes=4096 * (1 + programs.my_rank()))
    except ronde.MismatchError as error:
        return str(error)
    return "no error"


def test_settings_that_must_agree() -> None:
    told = ranks.run(init_with_different_settings, 2)
    assert (
        told == ["staging_bytes is 4096 on rank 0 and 8192 on rank 1: it must be the same on all ranks"] * 2
    )
