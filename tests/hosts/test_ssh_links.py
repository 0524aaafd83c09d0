"""`ronde run -H` where hosts cannot be reached, or not any more: who is named, who goes on, and nothing stays."""

from __future__ import annotations

import pytest
from tests.hosts.ssh_jobs import make_world, wait_for

from ronde.testing import ssh

pytestmark = pytest.mark.skipif(bool(ssh.require()), reason=ssh.require())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("down", "cannot be reached by ssh: connect to host {name} port 22: Connection refused"),
        ("another key", "cannot be reached by ssh: Host key verification failed."),
    ],
)
def test_a_host_that_cannot_be_reached_is_named(wrong: str, says: str) -> None:
    with make_world(2) as world:
        world.servers.stop(1)
        if wrong == "another key":
            world.servers.change_key(1)
            world.servers.start(1)
        code, out, err = world.run("-H", world.listed(0, 1), str(world.program), "sleep")
        wait_for(world.is_empty)
        name = world.name(1)
    assert (code, out) == (2, "")
    assert err == f"ronde: host {name}: {says.format(name=name)}\n"


def test_a_host_that_says_nothing_is_given_up() -> None:
    with make_world(2) as world:
        world.hosts.disconnect(1)
        hosts = world.listed(0, 1)
        code, out, err = world.run("--start-timeout", "5", "-H", hosts, str(world.program), "sleep")
        wait_for(world.is_empty)
        name = world.name(1)
    assert (code, out) == (2, "")
    assert err == f"ronde: host {name}: did not answer within 5 s\n"
