"""How a process meets the others again after it has lost the store."""

from __future__ import annotations

import time

import pytest

from ronde.comm import world
from ronde.comm.identity import Identity, MeetingPoint
from ronde.comm.meeting import Meeting
from ronde.errors import PeerLostError
from ronde.job_key import JobKey
from ronde.net.addresses import Address
from ronde.settings import Settings
from ronde.stores.memory import MemoryStore

SECOND = 10**9


class LostStore(MemoryStore):
    """A store whose client has lost its connection for good."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        raise PeerLostError("lost the store at memory")


def meeting_at(store: MemoryStore) -> Meeting:
    return Meeting(store, JobKey.generate(), Address(host="localhost"))


class Joining:
    """A process of rank 1 that calls `init`, 20 s before its deadline, with a meeting whose store it has lost."""

    def __init__(self, served_by: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.point = MeetingPoint("tcp:localhost:1", served_by, "job")
        self.limits_ns: list[int] = []
        monkeypatch.setattr(world, "_process", world._JobProcess())
        monkeypatch.setattr(world, "meet", self._meet)
        world._process.meeting, world._process.point = meeting_at(LostStore()), self.point

    def _meet(self, point: MeetingPoint, rank: int, settings: Settings, check: object) -> Meeting:
        self.limits_ns.append(settings.start_timeout_ns)
        return meeting_at(MemoryStore())

    def gather(self) -> None:
        identity, now_ns = Identity(1, 2, "", self.point), time.monotonic_ns()
        world._begin_attempt(identity, self.point, Settings(), now_ns - 280 * SECOND, now_ns + 20 * SECOND)


@pytest.mark.parametrize("served_by", [None, 0])
def test_it_connects_again_within_the_time_that_is_left(
    served_by: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = Joining(served_by, monkeypatch)
    joining.gather()
    assert len(joining.limits_ns) == 1
    assert 0 < joining.limits_ns[0] <= 20 * SECOND


def test_a_rank_that_has_lost_the_store_it_serves_itself_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerLostError, match="lost the store at memory"):
        Joining(1, monkeypatch).gather()
