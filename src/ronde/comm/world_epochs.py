"""Decides which ranks form a world together: those that come to one *epoch* of the store where they meet. Pure.

Ranks that call `ronde.init` may have different pasts: one has been in five worlds, another is a fresh process that
takes the place of a lost one, a third has just raised in `ronde.init` and calls it again. So no rank counts epochs:
the store has the number of the current epoch, and every rank reads it there.

The protocol, for worlds of one size (worlds of different sizes have different keys):

  1. The *counter* holds the current epoch: a number, and a random word of the rank that has created the counter. A rank
     that has never been in an epoch takes the counter as it is, or creates it with 0. A rank that has been in epoch e
     moves the counter from e to e + 1, by compare-and-set: one rank succeeds, the others find e + 1 or more. So a
     process never comes to an epoch twice. If e has not become a world, the rank ends it before, as replaced: when it
     failed, it may not have reached the store.
  2. A rank *comes* to the epoch by setting its member key, unless it is set. If another process has set it, that one
     was this rank earlier: the rank ends the epoch as replaced, moves the counter, and tries the next epoch.
  3. The ranks of an epoch exchange records in up to two stages. Each stores its record and counts itself. The last one
     decides the stage: it sets the *outcome*, by compare-and-set, to the records of all ranks. All others wait for it.
  4. An epoch that cannot become a world is *ended*: the outcome of the first stage without one becomes an `Ending`,
     also by compare-and-set. So a stage is either complete for all ranks or for none, and waiting ranks learn it at
     once. After the last exchange, while they connect, ranks look at the outcome of the next stage: only an ending
     gets there.
  5. What an ending means to a rank of the epoch, also to one that comes later (`judge_ending`):
     - *failed*: a rank has raised. All others raise, too, and name it and its reason.
     - *timed out*: a rank has waited too long for others. All raise, except those that had not come: they come late,
       and go on to the next epoch, where ranks that try again will be.
     - *replaced*: another process has come as one of the ranks. All go on to the next epoch. If the process that was
       replaced is alive and reads this, two processes have one rank: it ends the next epoch as *given twice*, which
       both of them and all others raise.
  6. Once all ranks have connected, the keys of earlier epochs are deleted; those of this one stay until the next world.
     So a rank that has read an old counter still finds the member key that tells it.

What follows: no two worlds have one name; a rank that is late comes to an epoch that is still open, or learns how it
ended; and if all ranks keep calling, they meet, because the counter never moves back, and moves on only from an epoch
that has become a world or has ended. If the store itself begins again (rank 0 served it and has been started again), so
does the counter, with another word; a waiting rank looks at it now and then, and comes again.

Each step is a generator of requests to the store, which gets their answers: `comm/world_attempt` does them, and
`tests/sim/test_world_epochs.py` simulates many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from ronde.errors import ProtocolError
from ronde.typed_json import TypedJson

__all__ = [
    "Add",
    "CompareSet",
    "Ending",
    "Epoch",
    "EndingKind",
    "MultiGet",
    "Request",
    "SetValue",
    "Steps",
    "Reaction",
    "WorldKeys",
    "come_to_epoch",
    "end_epoch",
    "end_value",
    "judge_ending",
    "put_record",
    "read_outcome",
    "take_records",
]

MOST_STAGES = 2  # of exchanges, before the ranks connect

Result = TypeVar("Result")


class CompareSet(NamedTuple):
    """Ask for `Store.compare_set`."""

    key: str
    expected: bytes
    desired: bytes


class SetValue(NamedTuple):
    """Ask for `Store.set`."""

    key: str
    value: bytes


class Add(NamedTuple):
    """Ask for `Store.add` of 1."""

    key: str


class MultiGet(NamedTuple):
    """Ask for `Store.multi_get` of keys that exist."""

    keys: list[str]


Request = CompareSet | SetValue | Add | MultiGet
Steps = Generator[Request, Any, Result]


class Epoch(NamedTuple):
    """One epoch. `word`: that of the counter, which distinguishes the epochs of two stores."""

    word: str
    number: int

    @property
    def following(self) -> Epoch:
        """The next epoch."""
        return Epoch(self.word, self.number + 1)

    def encode(self) -> bytes:
        """Return the value of the counter."""
        return f"{self.word}-{self.number}".encode()

    @staticmethod
    def decode(value: bytes) -> Epoch:
        """Return the epoch of a counter's value. Raises ProtocolError if it is malformed."""
        word, _, number = value.decode(errors="replace").partition("-")
        if not word.isalnum() or not number.isdecimal():
            raise ProtocolError(f"the number of the current world is malformed: {value[:40]!r}")
        return Epoch(word, int(number))


class WorldKeys(NamedTuple):
    """The names of the keys of all worlds of `size` ranks."""

    size: int

    @property
    def counter(self) -> str:
        """The key of the current epoch."""
        return f"world {self.size}/epoch"

    def world(self, epoch: Epoch) -> str:
        """Return the name of the world, with which the keys of its epoch begin."""
        return f"world {self.size}/{epoch.word}-{epoch.number}"

    def member(self, epoch: Epoch, rank: int) -> str:
        """Return the key of the process that has come as this rank."""
        return f"{self.world(epoch)}/rank {rank}"

    def record(self, epoch: Epoch, stage: int, rank: int) -> str:
        """Return the key of a rank's record."""
        return f"{self.world(epoch)}/{stage}/{rank}"

    def arrivals(self, epoch: Epoch, stage: int) -> str:
        """Return the key of the number of records."""
        return f"{self.world(epoch)}/{stage}/arrivals"

    def outcome(self, epoch: Epoch, stage: int) -> str:
        """Return the key of the stage's outcome."""
        return f"{self.world(epoch)}/{stage}/outcome"

    def of_epoch(self, epoch: Epoch) -> list[str]:
        """Return all keys of an epoch, whether or not they exist."""
        ranks, stages = range(self.size), range(MOST_STAGES)
        return [
            *(self.member(epoch, rank) for rank in ranks),
            *(self.record(epoch, stage, rank) for stage in stages for rank in ranks),
            *(self.arrivals(epoch, stage) for stage in stages),
            *(self.outcome(epoch, stage) for stage in range(MOST_STAGES + 1)),
        ]


class EndingKind(Enum):
    """How an epoch has ended without a world."""

    FAILED = "failed"
    TIMED_OUT = "timed out"
    REPLACED = "replaced"
    TWICE = "given twice"


@dataclass(frozen=True)
class Ending:
    """Why an epoch has not become a world.

    `rank`: the one that failed, timed out, was replaced, or was given twice. `reason`: the text of its error, or the
    process that replaces it. `missing`: the ranks for which it waited. `host`: where it was. `late`: the ranks that had
    not yet come.
    """

    kind: EndingKind
    rank: int
    reason: str
    missing: tuple[int, ...] = ()
    host: str = ""
    late: tuple[int, ...] = ()


_ENDING: TypedJson[Ending] = TypedJson(Ending, "end of an attempt to form the world")
_RECORDS, _ENDED = b"records ", b"ended "


class Reaction(Enum):
    """What a rank does about an ending."""

    RAISE = "raise"
    GO_ON = "go on to the next epoch"
    CONTEST = "end the next epoch, too: two processes have this rank"


def come_to_epoch(
    keys: WorldKeys, rank: int, member: bytes, last: Epoch | None, word: str, has_formed: bool = False
) -> Steps[Epoch]:
    """Come to the current epoch, or to the next one if this rank has been in it; return it.

    `member`: describes this attempt of this process, and is never used again. `last`: the last epoch to which this
    process has come. `word`: for the counter if there is none, never used again. `has_formed`: whether `last` has
    become a world, for this process.
    """
    epoch = last
    replaced = Ending(EndingKind.REPLACED, rank, member.decode(errors="replace"))
    while True:
        epoch = yield from _current_epoch(keys, epoch, None if has_formed else replaced, word)
        found = yield CompareSet(keys.member(epoch, rank), b"", member)
        if found == member:
            return epoch
        yield from end_epoch(keys, epoch, 0, replaced)
        has_formed = False


def _current_epoch(keys: WorldKeys, last: Epoch | None, ending: Ending | None, word: str) -> Steps[Epoch]:
    """Return the current epoch, after moving it on from `last`; `ending`: of `last` unless it has become a world."""
    if last is not None:
        current = last.encode()
        if ending and (yield CompareSet(keys.counter, current, current)) == current:
            yield from end_epoch(keys, last, 0, ending)  # no effect if it has ended
        found = yield CompareSet(keys.counter, current, last.following.encode())
        if found:
            return Epoch.decode(found)
    # There is no counter: no rank has come, or it is another store.
    found = yield CompareSet(keys.counter, b"", Epoch(word, 0).encode())
    return Epoch.decode(found)


def put_record(
    keys: WorldKeys,
    epoch: Epoch,
    stage: int,
    rank: int,
    mine: bytes,
    pack: Callable[[Sequence[bytes]], bytes],
) -> Steps[bytes | None]:
    """Store this rank's record; return the stage's outcome if this was the last one, else None.

    `pack`: makes one value of all records.
    """
    yield SetValue(keys.record(epoch, stage, rank), mine)
    if (yield Add(keys.arrivals(epoch, stage))) < keys.size:
        return None
    return (yield from take_records(keys, epoch, stage, pack))


def take_records(
    keys: WorldKeys, epoch: Epoch, stage: int, pack: Callable[[Sequence[bytes]], bytes]
) -> Steps[bytes]:
    """Return the outcome of a stage in which all records are there; they are it, unless the epoch has ended."""
    records = yield MultiGet([keys.record(epoch, stage, rank) for rank in range(keys.size)])
    outcome: bytes = yield CompareSet(keys.outcome(epoch, stage), b"", _RECORDS + pack(records))
    return outcome


def end_epoch(keys: WorldKeys, epoch: Epoch, stage: int, ending: Ending) -> Steps[None]:
    """End the epoch, unless it has ended. `stage`: the first one that may have no outcome."""
    value = end_value(ending)
    for each in range(stage, MOST_STAGES + 1):
        outcome: bytes = yield CompareSet(keys.outcome(epoch, each), b"", value)
        if not outcome.startswith(_RECORDS):
            return


def end_value(ending: Ending) -> bytes:
    """Return the outcome of a stage in which the epoch has ended."""
    return _ENDED + _ENDING.encode(ending)


def read_outcome(outcome: bytes) -> bytes | Ending:
    """Return the packed records of a stage, or how its epoch has ended. Raises ProtocolError if it is malformed."""
    if outcome.startswith(_RECORDS):
        return outcome[len(_RECORDS) :]
    return _ENDING.decode(outcome.removeprefix(_ENDED))


def judge_ending(ending: Ending, rank: int) -> Reaction:
    """Return what this rank does, which has come to the epoch."""
    if ending.kind is EndingKind.REPLACED:
        return Reaction.CONTEST if ending.rank == rank else Reaction.GO_ON
    if ending.kind is EndingKind.TIMED_OUT and rank in ending.late:
        return Reaction.GO_ON
    return Reaction.RAISE
