"""`init_method` as torch.distributed takes it."""

from __future__ import annotations

from typing import Any

import pytest

from ronde.comm.identity import MeetingPoint, Surroundings, identify
from ronde.comm.init_method import interpret_init_arguments
from ronde.errors import UsageError

HERE = Surroundings(uid=1000)
FOUND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "2000"}


def meet(
    init_method: str | None, environ: dict[str, str] | None = None, **arguments: Any
) -> tuple[int, int, Any]:
    given: dict[str, Any] = {"rank": None, "size": None, "world_size": None, "store": None} | arguments
    wish = interpret_init_arguments(init_method, environ=environ or {}, **given)
    found = identify(wish.environ, HERE, wish.rank, wish.size, wish.store)
    return found.rank, found.size, found.meeting


def served(address: str) -> MeetingPoint:
    return MeetingPoint(address, 0, address)


def test_a_place_to_meet() -> None:
    assert meet("tcp://a:1", rank=1, world_size=2) == (1, 2, served("tcp:a:1"))
    assert meet("tcp://a:1", rank=1, size=2) == meet("tcp://a:1?rank=1&world_size=2")
    assert meet("tcp://[fd00::1]:1/", rank=1, size=2) == (1, 2, served("tcp:[fd00::1]:1"))
    point = MeetingPoint("file:/tmp/x", None, "file:/tmp/x")
    assert meet("file:///tmp/x", rank=1, world_size=2) == (1, 2, point)


@pytest.mark.parametrize("init_method", ["tcp://a:1", "file:///x"])
def test_the_environment_says_what_arguments_do_not(init_method: str) -> None:
    whole = meet(init_method, rank=1, world_size=4)
    assert meet(init_method, FOUND) == whole
    assert meet(init_method, FOUND, rank=-1, world_size=-1) == whole
    assert meet(init_method, {"RANK": "1"}, world_size=4) == whole
    assert meet(init_method, {"WORLD_SIZE": "4"}, rank=1) == whole


def test_the_environment_alone() -> None:
    assert meet("env://", FOUND) == (1, 4, served("tcp:head:2000"))
    place = {"MASTER_ADDR": "head", "MASTER_PORT": "2000"}
    assert meet("env://", place, rank=1, world_size=4) == meet("env://?rank=1&world_size=4", place)
    assert meet("env://", {**FOUND, "RONDE_STORE": "unix:@s"})[2] == MeetingPoint("unix:@s", None, "unix:@s")
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert meet("env://", mpi) == (0, 1, None)
    assert meet(None, world_size=1, rank=0) == (0, 1, None)


@pytest.mark.parametrize(
    ("init_method", "arguments", "message"),
    [
        (
            "tcp://a",
            {},
            "init_method='tcp://a' is invalid: expected tcp://host:port, with a port from 1 to 65535",
        ),
        ("tcp://a:0", {}, "init_method='tcp://a:0' is invalid: expected tcp://host:port"),
        ("tcp://::1:5", {}, "init_method='tcp://::1:5' is invalid: expected tcp://host:port"),
        ("tcp://", {}, "init_method='tcp://' is invalid: expected env://, tcp://host:port or file:///path"),
        ("env://x", {}, "init_method='env://x' is invalid: expected env://, tcp"),
        ("udp://x:1", {}, "init_method='udp://x:1' is invalid: expected env://, tcp"),
        ("x", {}, "init_method='x' is invalid: expected env://, tcp"),
        (7, {}, "init_method=7 is invalid: expected env://, tcp"),
        ("file://x", {}, "init_method='file://x' is invalid: expected file:///path, with three slashes"),
        (
            "tcp://a:1?ranks=1",
            {},
            "init_method='tcp://a:1?ranks=1' is invalid: 'ranks=1' is neither rank=N nor",
        ),
        ("tcp://a:1?rank=1", {"rank": 0}, "rank=0 and rank in init_method=1 contradict each other"),
        ("tcp://a:1", {"size": 2, "world_size": 3}, "size=2 and world_size=3 contradict each other"),
        ("tcp://a:1", {"rank": 2, "world_size": 2}, "rank=2 does not fit size=2"),
        ("tcp://a:1", {"rank": 0}, "rank and size belong together"),
        (
            "tcp://a:1",
            {"store": "unix:@x"},
            "store='unix:@x' and init_method='tcp://a:1' contradict each other",
        ),
        (
            "env://",
            {},
            "init_method='env://' takes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment",
        ),
        (
            "tcp://a:1",
            {},
            "store='tcp:a:1' says where to meet, but neither arguments nor environment give rank",
        ),
    ],
)
def test_nonsense(init_method: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        meet(init_method, **arguments)
    assert str(caught.value).startswith(message)
