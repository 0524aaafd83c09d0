from __future__ import annotations

import pytest

from ronde.comm.world_epochs import (
    Add,
    CompareSet,
    Ending,
    EndingKind,
    Epoch,
    MultiGet,
    Reaction,
    Result,
    SetValue,
    Steps,
    WorldKeys,
    come_to_epoch,
    end_epoch,
    judge_ending,
    put_record,
    read_outcome,
)
from ronde.errors import ProtocolError

KEYS = WorldKeys(2)
ZERO = Epoch("word", 0)


class Content(dict[str, bytes]):
    """A store, which performs steps at once."""

    def perform(self, steps: Steps[Result]) -> Result:
        answer: object = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as done:
                result: Result = done.value
                return result
            match request:
                case CompareSet(key, expected, desired):
                    if self.get(key, b"") == expected:
                        self[key] = desired
                    answer = self.get(key, b"")
                case SetValue(key, value):
                    answer = self[key] = value
                case Add(key):
                    self[key] = b"%d" % (int(self.get(key, b"0")) + 1)
                    answer = int(self[key])
                case MultiGet(keys):
                    answer = [self[key] for key in keys]

    def come(self, rank: int, member: bytes, last: int | None = None, has_formed: bool = False) -> int:
        before = None if last is None else Epoch("word", last)
        return self.perform(come_to_epoch(KEYS, rank, member, before, "word", has_formed)).number

    def put(self, epoch: Epoch, rank: int, record: bytes) -> bytes | None:
        return self.perform(put_record(KEYS, epoch, 0, rank, record, b"+".join))


def test_ranks_with_different_pasts_come_to_one_epoch() -> None:
    store = Content()
    assert [store.come(0, b"a"), store.come(1, b"b")] == [0, 0]
    assert store.put(ZERO, 1, b"one") is None
    assert store.put(ZERO, 0, b"zero") == b"records zero+one"
    assert store.come(0, b"c", last=0) == 1
    assert store.come(1, b"of a fresh process") == 1, (
        "it has been in no epoch, and comes to that of the survivor"
    )


def test_a_fresh_process_that_comes_first_opens_the_next_epoch() -> None:
    store = Content()
    store.come(0, b"a")
    store.come(1, b"b")
    assert store.come(1, b"fresh") == 1
    assert store.come(0, b"c", last=0) == 1
    ended = read_outcome(store[KEYS.outcome(ZERO, 0)])
    assert ended == Ending(EndingKind.REPLACED, 1, "fresh"), "who still waits there learns it"


def test_a_rank_that_comes_again_first_ends_an_epoch_that_nobody_has_ended() -> None:
    store = Content()
    store.come(0, b"a")
    store.put(ZERO, 0, b"zero")
    store.come(1, b"b")  # the store does not answer when it fails
    assert store.come(1, b"process 7", last=0) == 1
    ended = read_outcome(store[KEYS.outcome(ZERO, 0)])
    assert ended == Ending(EndingKind.REPLACED, 1, "process 7"), "rank 0 still waits there"
    before = store.copy()
    assert store.come(0, b"c", last=0) == 1
    assert store == before | {KEYS.member(Epoch("word", 1), 0): b"c"}


def test_an_epoch_that_has_become_a_world_is_not_ended_by_ranks_that_come_again() -> None:
    store = Content()
    for stage in range(2):
        for rank in range(2):
            store.perform(put_record(KEYS, ZERO, stage, rank, b"it", b"+".join))
    store[KEYS.counter] = ZERO.encode()
    assert store.come(1, b"c", last=0, has_formed=True) == 1
    assert KEYS.outcome(ZERO, 2) not in store, "a slower rank may still look there"


def test_a_store_that_has_begun_anew_gets_no_ending_of_an_old_epoch() -> None:
    store = Content({KEYS.counter: Epoch("other", 3).encode()})
    store.come(0, b"a", last=7)
    assert set(store) == {KEYS.counter, KEYS.member(Epoch("other", 3), 0)}


def test_an_epoch_is_complete_or_ended_and_never_both() -> None:
    store = Content()
    ending = Ending(EndingKind.FAILED, 1, "ValueError")
    store.put(ZERO, 0, b"zero")
    store.perform(end_epoch(KEYS, ZERO, 0, ending))
    outcome = store.put(ZERO, 1, b"one")
    assert outcome is not None
    assert read_outcome(outcome) == ending
    store.perform(end_epoch(KEYS, ZERO, 0, Ending(EndingKind.FAILED, 0, "another")))
    assert read_outcome(store[KEYS.outcome(ZERO, 0)]) == ending, "the first one counts"


def test_an_epoch_with_records_ends_in_its_next_stage() -> None:
    store = Content()
    store.put(ZERO, 0, b"zero")
    store.put(ZERO, 1, b"one")
    ending = Ending(EndingKind.FAILED, 1, "ValueError")
    store.perform(end_epoch(KEYS, ZERO, 0, ending))
    assert read_outcome(store[KEYS.outcome(ZERO, 0)]) == b"zero+one"
    assert read_outcome(store[KEYS.outcome(ZERO, 1)]) == ending


def test_a_store_that_has_begun_anew_begins_its_epochs_anew() -> None:
    store = Content()
    assert store.come(0, b"a", last=7) == 0
    other = store.perform(come_to_epoch(KEYS, 1, b"b", Epoch("other", 0), "third"))
    assert other == ZERO, "its epoch 0 was that of another store"


def test_a_counter_that_is_no_number() -> None:
    store = Content({KEYS.counter: b"x"})
    with pytest.raises(ProtocolError, match="the number of the current world is malformed: b'x'"):
        store.come(0, b"a")
    with pytest.raises(ProtocolError, match="malformed end of an attempt to form the world"):
        read_outcome(b"ended x")


def test_what_an_ending_means_to_a_rank() -> None:
    for how, rank, reaction in [
        (EndingKind.FAILED, 0, Reaction.RAISE),
        (EndingKind.TIMED_OUT, 0, Reaction.RAISE),
        (EndingKind.TIMED_OUT, 2, Reaction.GO_ON),  # it comes late
        (EndingKind.TIMED_OUT, 3, Reaction.RAISE),  # it has come, and could not be reached
        (EndingKind.REPLACED, 0, Reaction.GO_ON),
        (EndingKind.REPLACED, 1, Reaction.CONTEST),
        (EndingKind.TWICE, 0, Reaction.RAISE),
        (EndingKind.TWICE, 1, Reaction.RAISE),
    ]:
        assert judge_ending(Ending(how, 1, "", missing=(2, 3), late=(2,)), rank) is reaction
