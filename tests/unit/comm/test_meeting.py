from __future__ import annotations

import os
import re
import threading

import pytest

from ronde.comm.identity import MeetingPoint
from ronde.comm.meeting import Meeting, meet, surroundings
from ronde.errors import AuthenticationError, TimeoutError, UsageError
from ronde.settings import JobKey, Settings
from ronde.stores import tcp
from ronde.stores.server import StoreServer

SECOND = 10**9
SETTINGS = Settings(start_timeout_ns=30 * SECOND)
POINT = MeetingPoint(f"unix:@ronde-test-meeting-{os.getpid()}", 0, "job of this test")


def test_rank_0_serves_and_the_others_come() -> None:
    meetings: list[Meeting] = []
    threads = [
        threading.Thread(target=lambda r=r: meetings.append(meet(POINT, r, SETTINGS))) for r in (1, 0, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(meeting.store.add("n", 1) for meeting in meetings) == [1, 2, 3]
    assert sum(meeting.server is not None for meeting in meetings) == 1
    for meeting in meetings:
        meeting.find_address(SETTINGS)
    assert {meeting.address for meeting in meetings} == {"127.0.0.1"}
    (key,) = {meeting.key for meeting in meetings}
    assert key != JobKey.derived_from(POINT.job)  # which strangers can compute
    for meeting in meetings:
        meeting.close()
        meeting.close()


def test_the_launcher_serves_and_gives_the_key() -> None:
    key = JobKey.generate()
    server = StoreServer("tcp:127.0.0.1:0", key)
    point = MeetingPoint(server.address, None, server.address)
    meeting = meet(point, 0, Settings(job_key=key, interface="lo"))
    assert meeting.server is None
    with pytest.raises(UsageError, match="no network interface 'eth77'"):
        meeting.find_address(Settings(interface="eth77"))
    meeting.find_address(SETTINGS)
    assert meeting.address == "127.0.0.1"
    meeting.close()
    with pytest.raises(AuthenticationError):
        meet(point, 0, SETTINGS)
    server.close()


def test_no_server_at_the_meeting_point() -> None:
    reason = f"for the store at {POINT.address}: Connection refused; rank 0 serves it in ronde.init()"
    with pytest.raises(TimeoutError, match=re.escape(reason)):
        meet(POINT, 1, Settings(start_timeout_ns=SECOND // 20))


def test_a_store_that_is_not_there_is_named_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp, "NOTICES_S", (0.2, 60))
    with pytest.raises(TimeoutError):
        meet(POINT, 1, Settings(start_timeout_ns=SECOND))
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert record.getMessage() == (
        f"waiting for the store at {POINT.address}: Connection refused; rank 0 serves it in ronde.init()"
    )


def test_surroundings_without_mpich() -> None:
    for environ in ({}, {"MPI_LOCALNRANKS": "2"}):
        assert surroundings(environ).uid == os.geteuid()
        assert surroundings(environ).hydra_pid == 0
