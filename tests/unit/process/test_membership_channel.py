"""The channel of a worker to its agent, over real sockets."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ronde.errors import PeerLostError, TimeoutError
from ronde.process.membership_channel import (
    MAX_BYTES,
    Awaits,
    ChangeWanted,
    Completed,
    Continues,
    FromWorker,
    Membership,
    MembershipChannel,
    PlaceInRound,
    RoundLost,
    TrainingCompleted,
)

HANG_S = 30


class Ends:
    """Both ends, as the agent and a worker of round 3 have them."""

    def __init__(self) -> None:
        self.agent = MembershipChannel()
        self.worker = Membership(os.dup(self.agent.worker_fd), 3)
        self.agent.close_worker_end()

    def read(self, count: int) -> list[FromWorker]:
        """Return the next messages of the worker."""
        found: list[FromWorker] = []
        while len(found) < count:
            assert select.select([self.agent], [], [], HANG_S)[0], "nothing came"
            found += self.agent.read()
        return found


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    for name in ("RANK", "WORLD_SIZE", "RONDE_ROUND", "MASTER_PORT"):
        monkeypatch.setenv(name, "before")  # restored when the test ends
    made = Ends()
    yield made
    made.worker.close()
    made.agent.close()


def test_a_survivor_gets_its_place_and_its_variables(ends: Ends) -> None:
    ends.worker.announce_continues()
    first = PlaceInRound(
        4, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "5"}, "a reason", ("rank 2 on b",)
    )
    assert ends.agent.send(first)
    assert ends.worker.await_place(3, HANG_S * 10**9) == first
    assert ends.read(2) == [Continues(), Awaits(3)]
    assert (os.environ["RANK"], os.environ["RONDE_ROUND"], ends.worker.number) == ("1", "4", 4)
    assert ends.worker.taken == first
    ends.agent.send(PlaceInRound(6, {"RANK": "0", "WORLD_SIZE": "1"}))
    assert ends.worker.await_place(timeout_ns=HANG_S * 10**9).number == 6
    assert "MASTER_PORT" not in os.environ, "a variable of the earlier place only"
    assert (ends.worker.has_outlived, ends.worker.training) == (True, 1)
    ends.worker.announce_completed()
    assert ends.read(2) == [Awaits(4), Completed(1)]


def test_the_newest_place_wins_and_old_ones_do_not_count(ends: Ends) -> None:
    for number in (2, 5, 4):
        ends.agent.send(PlaceInRound(number, {"RANK": str(number)}))
    ends.agent.send(ChangeWanted(5, "a host was found"))
    wait_for(lambda: ends.worker.change_wanted is not None and ends.worker.newest == 5)
    assert ends.worker.await_place(3).number == 5
    wait_for(lambda: ends.worker.change_wanted == "a host was found")
    with pytest.raises(TimeoutError, match="got no place in a round after 5"):
        ends.worker.await_place(timeout_ns=1)


def test_a_change_is_wanted_until_its_round(ends: Ends) -> None:
    assert ends.worker.change_wanted is None
    ends.agent.send(ChangeWanted(3, "a host was found"))
    wait_for(lambda: ends.worker.change_wanted == "a host was found")
    ends.agent.send(PlaceInRound(4, {}, "with host-c"))
    wait_for(lambda: ends.worker.change_wanted == "with host-c")
    ends.worker.await_place()
    assert ends.worker.change_wanted is None


def test_a_lost_round_calls_back(ends: Ends) -> None:
    seen: list[RoundLost] = []
    came = threading.Event()

    def note(lost: RoundLost) -> None:
        seen.append(lost)
        came.set()

    ends.worker.on_lost(note)
    lost = RoundLost(3, "rank 1 was killed")
    ends.agent.send(lost)
    assert came.wait(HANG_S)
    late: list[RoundLost] = []
    ends.worker.on_lost(late.append)
    assert (seen, late) == ([lost], [lost]), "also for a callback that comes later"


def test_the_end_of_the_agent_ends_the_wait(ends: Ends) -> None:
    ends.agent.send(PlaceInRound(4, {}))
    ends.agent.close()
    assert ends.worker.await_place(3, HANG_S * 10**9).number == 4, "sent before the end"
    with pytest.raises(PeerLostError, match="the agent of this worker has ended"):
        ends.worker.await_place(4, HANG_S * 10**9)


def test_the_end_of_the_worker(ends: Ends) -> None:
    ends.worker.announce_completed()
    ends.worker.close()
    assert ends.read(1) == [Completed(0)]
    assert select.select([ends.agent], [], [], HANG_S)[0]
    assert (ends.agent.read(), ends.agent.has_ended) == ([], True)
    assert not ends.agent.send(RoundLost(3, "too late"))


def test_a_worker_that_reads_nothing_does_not_block_the_agent() -> None:
    agent = MembershipChannel()
    place = PlaceInRound(4, {"TEXT": "x" * (MAX_BYTES - 1000)})
    assert agent.send(place)
    assert not all(agent.send(place) for _ in range(100))
    with pytest.raises(ValueError, match="exceeds"):
        agent.send(PlaceInRound(4, {"TEXT": "x" * MAX_BYTES}))
    agent.close()


PROGRAM = """
import os, sys
from ronde.process.membership_channel import membership
mine = membership()
assert mine is membership() and not os.get_inheritable(int(sys.argv[1]))
child = os.fork()
if child == 0:
    os._exit(7 if membership() is None else 8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print(mine.number, mine.await_place().number, os.environ["RANK"])
"""


def test_a_process_finds_its_channel_and_its_children_do_not() -> None:
    agent = MembershipChannel()
    variables = {name: value for name, value in os.environ.items() if name != "RONDE_ROUND"}
    worker = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(agent.worker_fd)],
        env=variables | agent.environment,
        pass_fds=[agent.worker_fd],
        stdout=subprocess.PIPE,
        text=True,
    )
    agent.close_worker_end()
    assert select.select([agent], [], [], HANG_S)[0]
    assert agent.read() == [Awaits(-1)], "a spare has no round"
    agent.send(PlaceInRound(0, {"RANK": "5"}))
    assert (worker.communicate(timeout=HANG_S)[0], worker.returncode) == ("-1 0 5\n", 0)
    agent.close()


def wait_for(is_true: Callable[[], bool]) -> None:
    """Wait until the reading thread has made it true."""
    for _ in range(HANG_S * 1000):
        if is_true():
            return
        time.sleep(0.001)
    raise AssertionError("it did not come true")


def test_a_worker_that_has_finished_learns_that_the_others_have(ends: Ends) -> None:
    ends.worker.announce_continues()
    ends.agent.send(TrainingCompleted(1))
    assert ends.worker.await_place_or_end() is None
    ends.worker.announce_completed()
    ends.worker.announce_continues()
    ends.agent.send(TrainingCompleted(1))  # late: of the training before
    ends.agent.send(PlaceInRound(9, {}, "rank 1 was lost"))
    place = ends.worker.await_place_or_end()
    assert place is not None
    assert place.number == 9
