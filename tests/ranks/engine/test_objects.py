"""Python objects and numbers between ranks, without PyTorch."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.engine import objects
from ronde.engine.objects import OutgoingObject
from ronde.launch.templates.template import Template
from ronde.testing import ranks


def exchange_objects() -> bool:
    ronde.init()
    rank, size = ronde.rank(), ronde.size()
    mine = {"rank": rank, "rows": list(range(1000 * rank))}
    assert ronde.allgather_object(mine) == [{"rank": r, "rows": list(range(1000 * r))} for r in range(size)]
    for root in range(size):
        given = ("from", root) if rank == root else None
        received = ronde.broadcast_object(given, root)
        assert received == ("from", root)
        assert (received is given) == (rank == root)
    return "torch" in sys.modules


@pytest.fixture(scope="module")
def without_pytorch(template_of: Callable[..., Template]) -> Template:
    """A template of ranks that have not imported torch; the other tests have one that has, if it is installed."""
    return template_of("numpy", "ronde.engine.operations")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_objects_travel_without_pytorch(n: int, without_pytorch: Template) -> None:
    with ranks.copies_of(without_pytorch):
        assert ranks.run(exchange_objects, n) == [False] * n


def exchange_in_a_set() -> list[Any]:
    ronde.init()
    members = ronde.add_process_set([0, 2])
    if ronde.rank() == 1:
        return []
    told = ronde.broadcast_object(ronde.rank(), root=2, process_set=members)
    return [told, *ronde.allgather_object(ronde.rank() * 10, process_set=members)]


def test_objects_travel_within_a_process_set() -> None:
    assert ranks.run(exchange_in_a_set, 3) == [[2, 0, 20], [], [2, 0, 20]]


def gather_without_those_that_joined() -> list[Any]:
    ronde.init()
    if ronde.rank() in (0, 2):
        ronde.join()
        return []
    gathered = ronde.allgather_object({"rank": ronde.rank()})
    ronde.join()
    return gathered


def test_a_rank_that_has_joined_contributes_no_object() -> None:
    assert ranks.run(gather_without_those_that_joined, 4) == [[], [{"rank": 1}, {"rank": 3}]] * 2


def send_what_cannot_be_pickled(operation: str) -> tuple[str, str, int]:
    ronde.init()
    obj = threading.Lock() if ronde.rank() == 1 else "fine"
    try:
        if operation == "broadcast":
            ronde.broadcast_object(obj, root=1)
        else:
            ronde.allgather_object(obj)
    except Exception as error:
        assert ronde.broadcast_object("still works") == "still works"
        return type(error).__name__, str(error), getattr(error, "rank", -1)
    return "", "", -1


@pytest.mark.parametrize("operation", ["broadcast", "allgather"])
def test_an_object_that_cannot_be_pickled_fails_on_every_rank(operation: str) -> None:
    other, culprit, third = ranks.run(send_what_cannot_be_pickled, 3, operation)
    assert culprit[0] == "TypeError"
    assert other == third
    assert other[0] == "RemoteError"
    assert other[1].startswith("rank 1 cannot pickle its object: ")
    assert culprit[1] in other[1]
    assert other[2] == 1


def exchange_functions() -> list[Any]:
    ronde.init()

    class Local:
        number = 40

    offset = ronde.rank() + 1
    given: Callable[[int], int] | None = (lambda x: x + offset) if ronde.rank() == 1 else None
    add: Callable[[int], int] = ronde.broadcast_object(given, root=1)
    kind = ronde.broadcast_object(Local if ronde.rank() == 0 else None)

    def number() -> int:
        return 10 * offset

    functions = ronde.allgather_object(number)
    return [add(1), kind.number, [function() for function in functions]]


def test_lambdas_and_local_classes_travel_by_cloudpickle() -> None:
    pytest.importorskip("cloudpickle")
    assert ranks.run(exchange_functions, 2) == [[3, 40, [10, 20]]] * 2


def send_a_lambda_without_cloudpickle() -> tuple[str, str]:
    ronde.init()
    sys.modules["cloudpickle"] = None  # type: ignore[assignment] # as if it was not installed
    try:
        ronde.broadcast_object((lambda: None) if ronde.rank() == 0 else None)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_without_cloudpickle_the_error_says_how_to_install_it() -> None:
    culprit, other = ranks.run(send_a_lambda_without_cloudpickle, 2)
    assert culprit[0] == "PicklingError"
    assert other[0] == "RemoteError"
    assert "pip install cloudpickle" in culprit[1]
    assert culprit[1] in other[1]


def reduce_numbers() -> list[Any]:
    ronde.init()
    rank, world = ronde.rank(), ronde.world()
    results = [
        ronde.allreduce(rank + 0.5),
        ronde.allreduce(rank + 1, op=ronde.Sum),
        ronde.allreduce(complex(rank, 1), op=ronde.Sum),
        world.allreduce(rank + 1),
        world.broadcast(rank + 7, root=1),
    ]
    assert ronde.allgather(rank).tolist() == world.allgather(rank).tolist() == list(range(world.size))
    return [each.item() for each in results]


def test_a_number_counts_as_an_array_without_axes() -> None:
    assert ranks.run(reduce_numbers, 2) == [[1.0, 3, 1 + 2j, 3, 8]] * 2


def fall_into_traps() -> list[str]:
    ronde.init()
    said = []
    traps: list[Callable[[], Any]] = [
        lambda: ronde.allreduce(1.0, ronde.Sum),  # type: ignore[call-overload]
        lambda: ronde.world().bcast(1.0),  # type: ignore[attr-defined]
        lambda: ronde.world().Get_rank(),  # type: ignore[attr-defined]
    ]
    for trap in traps:
        with pytest.raises((ronde.UsageError, AttributeError)) as caught:
            trap()
        said.append(str(caught.value))
    return said


def test_habits_from_other_systems_are_answered_with_what_to_write() -> None:
    (said,) = ranks.run(fall_into_traps, 1)
    assert "write op=ronde.Sum" in said[0]
    assert said[1] == "'Communicator' object has no attribute 'bcast'; in Ronde it is communicator.broadcast"
    assert said[2].endswith("in Ronde it is communicator.rank")


def alter_an_object_on_its_way(place: int, of_header: bool) -> str:
    ronde.init()
    root = 1
    if ronde.rank() == root:  # what a relay between the hosts could do, or a library that carries tensors
        outgoing = OutgoingObject(["harmless", np.ones(10_000)], "told", root)
        header, content = (
            outgoing.header.packed("told").copy(),
            np.empty(outgoing.header.content_length, np.uint8),
        )
        outgoing.fill(content)
        (header if of_header else content)[place] ^= 1
        ronde.broadcast(header, root, "told.header")
        if not of_header:  # of what an altered header says, nothing is received
            ronde.broadcast(content, root, "told.content")
        return ""
    with pytest.raises(ronde.AuthenticationError) as caught:
        ronde.broadcast_object(None, root, "told")
    return str(caught.value)


@pytest.mark.parametrize(
    ("place", "of_header"),
    [(2, False), (5_000, False), (-40, False), (-1, False), (7, True), (8, True), (-1, True)],
)
def test_an_altered_object_is_not_unpickled(place: int, of_header: bool) -> None:
    """Its pickle, its buffers, its HMAC, and what the header says of them."""
    told, _ = ranks.run(alter_an_object_on_its_way, 2, place, of_header)
    sentence = "the object 'told' of rank 1 was altered in transit, so Ronde does not unpickle it"
    assert told.startswith("the header of the object 'told' was altered" if of_header else sentence)


def gather_arrays_behind_objects_of_odd_lengths() -> None:
    ronde.init()
    gathered = ronde.allgather_object(("x" * (1 + ronde.rank()), np.arange(20_000.0)))
    assert [len(text) for text, _ in gathered] == [rank + 1 for rank in range(ronde.size())]
    assert all(array.flags.aligned for _, array in gathered)
    for (_, array), (_, other) in zip(gathered, gathered[1:]):
        assert array.base is not other.base  # whoever keeps one does not keep the memory of all


def test_gathered_arrays_are_aligned_and_apart() -> None:
    ranks.run(gather_arrays_behind_objects_of_odd_lengths, 3)


def exchange_buffers() -> None:
    """Buffers of many kinds and sizes, which end within pieces, at their ends and behind them."""
    ronde.init()
    objects._PIECE_BYTES = 1 << 20
    rank, size = ronde.rank(), ronde.size()
    read_only = np.arange(20_000.0)
    read_only.flags.writeable = False
    for extra in (0, 1, 31, 32, 33, 64, 100):
        of_root: dict[str, Any] = {
            "large": np.arange((3 << 20) + extra, dtype=np.uint8),
            "columns": np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
            "every other": np.arange(50_000)[::2],
            "small": np.arange(5),
            "read only": read_only,
            "bytes": b"b" * 200_000,
            "array": bytearray(b"c" * 300_000),
            "texts": ["text"] * 10,
            "none": np.empty((0, 4)),
        }
        root = extra % size
        told = ronde.broadcast_object(of_root if rank == root else None, root)
        for received in (told, *ronde.allgather_object(of_root)):
            assert received.keys() == of_root.keys()
            for key, value in of_root.items():
                np.testing.assert_array_equal(received[key], value)
            assert received["columns"].flags.f_contiguous
            assert not received["read only"].flags.writeable
            assert received["large"].flags.writeable
        if rank != root:
            told["large"][:] = 0  # the object of this rank alone
        ronde.barrier()
        assert of_root["large"][1] == 1
    for length in range(
        objects._PIECE_BYTES - 70, objects._PIECE_BYTES + 2, 3
    ):  # its HMAC may lie in two pieces
        assert ronde.broadcast_object(b"x" * length) == b"x" * length
    ronde.shutdown()


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_large_buffers_arrive_as_they_were(n: int) -> None:
    ranks.run(exchange_buffers, n)


def peak_of_a_broadcast() -> list[float]:
    """How much memory an array of 64 MiB takes on its way, in its sizes, beyond what holds it."""
    ronde.init()
    x = np.ones(8 << 20) if ronde.rank() == 0 else None
    ronde.broadcast_object(x if x is None else x[:10])  # loads what it needs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    received: dict[str, Any] = ronde.broadcast_object({"x": x})
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert received["x"].sum() == 8 << 20
    return [(after - before) / (64 << 10)]


@pytest.mark.fresh_ranks
def test_a_broadcast_copies_a_large_array_once() -> None:
    (at_root,), (elsewhere,) = ranks.run(peak_of_a_broadcast, 2)
    assert at_root < 0.9  # one piece, and staging memory
    assert elsewhere < 1.9
