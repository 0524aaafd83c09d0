"""Ranks that are threads gather in a store in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest

from ronde.comm import world_attempt
from ronde.comm.world_attempt import EpochOverError, WorldAttempt, contest_rank
from ronde.comm.world_epochs import Epoch
from ronde.errors import MismatchError, PeerLostError, TimeoutError, UsageError
from ronde.stores.memory import MemoryStore

SECOND = 10**9


def gather(store: MemoryStore, rank: int, size: int, seconds: float) -> WorldAttempt:
    now_ns = time.monotonic_ns()
    return WorldAttempt(store, rank, size, now_ns, now_ns + int(seconds * SECOND))


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_attempt, "STORE_LOOK_NS", SECOND // 2)
    monkeypatch.setattr(world_attempt, "NOTICE_NS", SECOND)


def wait_in_vain(store: MemoryStore, rank: int, size: int) -> None:
    with pytest.raises(TimeoutError):
        gather(store, rank, size, 2).exchange(b"mine")


@pytest.mark.usefixtures("soon")
def test_the_lowest_rank_says_for_whom_all_of_them_wait(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    threads = [threading.Thread(target=wait_in_vain, args=(store, rank, 5)) for rank in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert notices(caplog) == [
        (
            "ranks 0, 2, 4 of 5 have not joined at memory after 1 s; each of 5 processes (WORLD_SIZE) must call "
            "ronde.init()"
        )
    ]


@pytest.mark.usefixtures("soon")
def test_ranks_with_different_sizes_hear_of_each_other(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    threads = [threading.Thread(target=wait_in_vain, args=(store, rank, 2 + rank)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(notices(caplog)) == [
        (
            "rank 1 of 2 has not joined at memory after 1 s; rank 1 there joined a world of 3, now or in an earlier "
            "job: is WORLD_SIZE wrong?"
        ),
        (
            "ranks 0, 2 of 3 have not joined at memory after 1 s; rank 0 there joined a world of 2, now or in an "
            "earlier job: is WORLD_SIZE wrong?"
        ),
    ]


@pytest.mark.usefixtures("soon")
def test_a_rank_that_waits_at_a_store_that_has_begun_anew_comes_again() -> None:
    store = MemoryStore()
    waiting = gather(store, 1, 2, 60)
    store.delete_prefix("world")
    gather(store, 0, 2, 60)
    with pytest.raises(EpochOverError):
        waiting.exchange(b"mine")


class CountingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.checks = 0

    def check(self, keys: Sequence[str]) -> bool:
        self.checks += 1
        return super().check(keys)


def test_ranks_that_give_up_find_the_missing_one_with_few_requests() -> None:
    store = CountingStore()
    last = gather(store, 999, 1000, 0)
    for rank in range(999):
        if rank != 700:
            store.set(f"{last.name}/0/{rank}", b"it")
    with pytest.raises(TimeoutError) as error:
        last.exchange(b"mine")
    assert error.value.missing == (700,)
    assert store.checks < 50


def test_the_lowest_rank_gives_up_for_all() -> None:
    store = CountingStore()
    lowest, highest = (gather(store, rank, 10_000, 0) for rank in (0, 9_999))
    thread = threading.Timer(0.1, lowest.end, [TimeoutError("waited in vain", missing=(1,))])
    thread.start()
    with pytest.raises(TimeoutError, match="waited in vain") as error:
        highest.exchange(b"mine")
    thread.join()
    assert error.value.missing == (1,)
    assert store.checks == 0


@pytest.mark.usefixtures("soon")
def test_a_rank_that_has_waited_for_long_soon_sees_that_the_store_has_begun_anew() -> None:
    store = MemoryStore()
    now_ns = time.monotonic_ns()
    waiting = WorldAttempt(store, 1, 2, now_ns - 15 * SECOND, now_ns + 40 * SECOND)
    store.delete_prefix("world")
    gather(store, 0, 2, 60)
    with pytest.raises(EpochOverError):
        waiting.exchange(b"mine")
    assert time.monotonic_ns() < now_ns + 20 * SECOND, "well before its deadline"


def test_a_rank_that_learns_at_its_deadline_that_the_store_has_begun_anew_says_so() -> None:
    store = MemoryStore()
    waiting = gather(store, 1, 2, 0.5)
    store.delete_prefix("world")
    other = gather(store, 0, 2, 60)
    with pytest.raises(
        TimeoutError, match=r"waited 0\.5 s to join: the store at memory has begun anew"
    ) as error:
        waiting.exchange(b"mine")
    assert waiting.end(error.value) is error.value
    other.check()
    assert not store.check([f"{other.name}/0/outcome"]), "it ends no attempt of the others"


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (
            TimeoutError("waited 1 s for rank 1 of 2 to join", "init", SECOND, (1,)),
            "waited 9 s to join: rank 0 gave up: waited 1 s for rank 1 of 2 to join",
        ),
        (None, "waited 9 s to join: process .* has come as rank 0"),
    ],
)
def test_a_rank_that_has_no_time_for_another_attempt_says_why_the_last_one_ended(
    ending: TimeoutError | None, told: str
) -> None:
    store = MemoryStore()
    now_ns = time.monotonic_ns()
    first = gather(store, 0, 2, 60)
    late = WorldAttempt(store, 1, 2, now_ns - 9 * SECOND, now_ns)
    if ending:
        first.end(ending)
    else:
        gather(store, 0, 2, 60)
    with pytest.raises(TimeoutError, match=told):
        late.exchange(b"mine")


@pytest.mark.usefixtures("soon")
def test_an_exchange_whose_last_rank_was_lost_before_it_was_complete() -> None:
    store = MemoryStore()
    waiting = gather(store, 0, 2, 60)
    lost = gather(store, 1, 2, 60)
    store.set(f"{lost.name}/0/1", b"one")  # and then it dies
    assert waiting.exchange(b"zero") == [b"zero", b"one"]


def test_ranks_that_connect_learn_that_another_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_attempt, "LOOK_NS", 1)
    store = MemoryStore()
    both = [gather(store, rank, 2, 60) for rank in range(2)]
    thread = threading.Thread(target=both[0].exchange, args=(b"zero",))
    thread.start()
    both[1].exchange(b"one")
    thread.join()
    both[0].check()
    both[0].check()
    error = OSError("no more memory")
    assert both[1].end(error) is error
    with pytest.raises(
        PeerLostError, match=r"rank 1 on .* failed in ronde.init\(\): OSError: no more memory"
    ) as lost:
        both[0].check()
    assert lost.value.rank == 1
    assert both[0].end(lost.value) is lost.value
    again = [WorldAttempt(store, rank, 2, 0, 0, both[rank].epoch) for rank in range(2)]
    assert again[0].name == again[1].name != both[0].name


def test_a_rank_that_has_come_and_cannot_be_reached_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_attempt, "LOOK_NS", 1)
    store = MemoryStore()
    both = [gather(store, rank, 2, 60) for rank in range(2)]
    thread = threading.Thread(target=both[0].exchange, args=(b"zero",))
    thread.start()
    both[1].exchange(b"one")
    thread.join()
    both[0].end(TimeoutError("waited 5 s for rank 1 of 2 to connect", "init", 5 * SECOND, (1,)))
    both[1].check()
    with pytest.raises(TimeoutError, match="rank 0 gave up: waited 5 s for rank 1 of 2 to connect") as told:
        both[1].check()
    assert told.value.missing == (1,)


def test_a_rank_that_loses_a_peer_names_the_one_that_has_failed() -> None:
    store = MemoryStore()
    both = [gather(store, rank, 2, 60) for rank in range(2)]
    both[1].end(ValueError("x"))
    cause = both[0].end(PeerLostError("cannot connect to rank 1", 1))
    assert "failed in ronde.init(): ValueError: x" in str(cause)


def test_records_of_a_job_that_was_killed_here_are_not_compared_with_those_of_the_next_job() -> None:
    store = MemoryStore()
    killed = gather(store, 0, 2, 60)
    store.set(f"{killed.name}/0/0", b"old settings")
    store.add(f"{killed.name}/0/arrivals", 1)
    first = gather(store, 1, 2, 60)
    assert first.exchange(b"new settings") == [b"old settings", b"new settings"]
    thread = threading.Timer(0.1, gather, (store, 0, 2, 60))
    thread.start()
    assert isinstance(first.end(MismatchError("settings differ")), EpochOverError)
    thread.join()


def test_a_rank_whose_settings_do_not_fit_raises_its_own_error_even_if_another_one_was_faster() -> None:
    store = MemoryStore()
    both = [gather(store, rank, 2, 60) for rank in range(2)]
    for each in both:
        error = MismatchError("settings differ")
        assert each.end(error) is error


def test_a_rank_that_is_given_twice_waits_for_the_other_process_to_come() -> None:
    store = MemoryStore()
    thread = threading.Timer(0.1, gather, (store, 0, 2, 60))
    thread.start()
    with pytest.raises(UsageError, match="two processes have rank 0 of this job"):
        contest_rank(store, 0, 2)
    thread.join()


def test_the_keys_of_earlier_worlds_are_deleted() -> None:
    store = MemoryStore()
    epochs: list[Epoch | None] = [None, None]
    for _ in range(4):
        both = [WorldAttempt(store, rank, 2, 0, 60 * SECOND, epochs[rank]) for rank in range(2)]
        both[1].end(ValueError("x"))
        epochs = [each.epoch for each in both]
    assert store.num_keys() > 12
    both[0].delete_earlier_epochs()
    assert store.num_keys() == 4, "of the last epoch two members and the outcome, and the counter"
