"""What an agent is told survives its way to another host, and nothing else comes out of a text."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from ronde.errors import UsageError
from ronde.launch.config import (
    Binding,
    Discovery,
    LaunchConfig,
    Outputs,
    RendezvousConfig,
    Ssh,
    Std,
    WorkerSpec,
)
from ronde.launch.driver.driver_messages import Assignment, hello
from ronde.launch.driver.ring import RingPlan

SMALL = LaunchConfig(WorkerSpec(("/bin/true",)))
FULL = LaunchConfig(
    worker=WorkerSpec(
        ("/usr/bin/python", "-c", "print('ä\n')"),
        slots=3,
        max_restarts=2,
        environment={"A": "1", "B": ""},
        preload=("torch", "numpy"),
        binding=Binding.NUMA,
    ),
    rendezvous=RendezvousConfig("tcp", "[fd00::1]:80", "job", 2, 4, options={"a": "b"}),
    outputs=Outputs("logs", {0: Std.OUT, -1: Std.ALL}, {1: Std.ERR}, frozenset({0, 2}), "[{rank}]"),
    interface="eth0",
    hosts=(("a", 2), ("b", 1)),
    discovery=Discovery("./find", 2),
    ssh=Ssh(22, "id"),
    min_workers=2,
    cooldown_ns=(1, 2),
)


SECRET = "ab" * 32
RING = RingPlan(0, 1, True, ("eth0",))
FIELDS = LaunchConfig.__match_args__


def assignment(config: LaunchConfig) -> Assignment:
    return Assignment("1", SECRET, ("tcp:a:1", "tcp:[::1]:2"), "/tmp", {"A": "ä\n"}, True, RING, config)


@pytest.mark.parametrize("config", [SMALL, FULL], ids=["small", "full"])
def test_an_assignment_comes_back_equal_and_keeps_its_secret(config: LaunchConfig) -> None:
    sent = assignment(config)
    line = sent.encode()
    assert line.count(b"\n") == 1
    assert Assignment.decode(line) == sent
    assert SECRET not in repr(sent)


@pytest.mark.parametrize(
    ("field", "value"),
    [("worker", None), ("hosts", [["a"]]), ("local_addr", 4), ("min_workers", "2"), ("min_workers", True)],
)
def test_a_wrong_value_is_refused(field: str, value: object) -> None:
    plain = json.loads(assignment(FULL).encode())
    plain[-1][FIELDS.index(field)] = value
    refuse(json.dumps(plain).encode())


def test_what_has_more_or_fewer_fields_is_refused() -> None:
    plain = json.loads(assignment(FULL).encode())
    refuse(json.dumps([*plain, 1]).encode())
    refuse(json.dumps(plain[:-1]).encode())
    refuse(json.dumps([*plain[:-1], plain[-1][:-1]]).encode())
    refuse(json.dumps([*plain[:-1], [*plain[-1], 1]]).encode())


@pytest.mark.parametrize("line", [b"", b"[]\n", b"{", b'"a"\n', b"{}\n", b"nonsense\n"])
def test_what_is_no_assignment_is_refused(line: bytes) -> None:
    refuse(line)


def refuse(line: bytes) -> None:
    with pytest.raises(UsageError, match="an agent is started by `ronde run -H`") as caught:
        Assignment.decode(line)
    assert SECRET not in str(caught.value)


def test_a_greeting_names_the_installed_version() -> None:
    assert hello().split()[2].decode() == metadata.version("ronde")
