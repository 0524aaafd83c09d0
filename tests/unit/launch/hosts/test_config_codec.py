"""A launch configuration survives its way to another host, and nothing else comes out of a text."""

from __future__ import annotations

import json

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
from ronde.launch.hosts.config_codec import config_from_text, config_to_text

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


@pytest.mark.parametrize("config", [SMALL, FULL], ids=["small", "full"])
def test_a_configuration_comes_back_equal(config: LaunchConfig) -> None:
    text = config_to_text(config)
    assert "\n" not in text
    assert config_from_text(text) == config


@pytest.mark.parametrize(
    "change",
    [{"worker": None}, {"hosts": [["a"]]}, {"local_addr": 4}, {"nonsense": 1}, {"min_workers": "2"}],
)
def test_what_is_none_is_refused(change: dict[str, object]) -> None:
    text = json.dumps({**json.loads(config_to_text(FULL)), **change})
    with pytest.raises(UsageError, match="no launch configuration of this version"):
        config_from_text(text)


def test_what_is_no_text_of_ours_is_refused() -> None:
    for text in ("", "[]", "{", '"a"', "{}"):
        with pytest.raises(UsageError, match="no launch configuration"):
            config_from_text(text)
