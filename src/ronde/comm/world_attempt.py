"""Brings the ranks of a world together in a store, before they are connected: the shell of `comm/world_epochs`.

A `WorldAttempt` is one attempt of one rank. The ranks exchange small texts through it, and learn from it while they
connect that another rank has failed. The lowest rank that has come logs after a while for which ranks all of them wait.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ronde.comm.byte_exchange import framed, unframed
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
    end_value,
    judge_ending,
    put_record,
    read_outcome,
    take_records,
)
from ronde.errors import (
    MismatchError,
    PeerLostError,
    ProtocolError,
    RondeError,
    TimeoutError,
    UsageError,
    VersionError,
)
from ronde.net.connections import named_ranks
from ronde.net.host import host_name
from ronde.stores.store import Store, missing_of

__all__ = ["RECORD_LIMIT_BYTES", "EpochOverError", "WorldAttempt", "contest_rank"]

RECORD_LIMIT_BYTES = 4096
STORE_LOOK_NS = 5 * 10**9  # between looks of a waiting rank whether it is still the same store
NOTICE_NS = (
    10**10
)  # when the ranks say for the first time which ranks are missing; then after NOTICE_GROWTH times as long
NOTICE_GROWTH = 6
JITTER_NS = 10**6  # a store may wait a little less than it should
LOOK_NS = 5 * 10**8  # between looks at the epoch's end, while the ranks connect
CAUSE_NS = 3 * 10**8  # how long a rank that has lost a peer waits for its reason
STALE_NS = 10**9  # how long a rank whose record does not fit waits for a process that replaces another rank
CONTEST_NS = 10**9  # how long the process that serves the store may take to come
MOST_OF_REASON = 1000
MOST_SIZES = 256  # of worlds among which to look for missing ranks
TWICE_REMEDY = "give every process another rank (RANK), or every job another place to meet"

_log = logging.getLogger(__name__)


class EpochOverError(Exception):
    """This attempt has ended without a fault of this rank: it makes another one."""


class WorldAttempt:
    """One attempt to form the world, to which this rank has come with the constructor.

    `began_ns`, `deadline_ns`: of the monotonic clock; since when the rank waits, and how long it may. `last`: the last
    epoch to which this process has come. `has_formed`: whether that has become a world. `last_refusal` returns a phrase
    for errors about the last connection that the store refused, or "". `call`: the function that joins, for messages.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        began_ns: int,
        deadline_ns: int,
        last: Epoch | None = None,
        last_refusal: Callable[[], str] = str,
        has_formed: bool = False,
        call: str = "ronde.init()",
    ) -> None:
        self._call = call
        self._store = store
        self._rank = rank
        self._keys = WorldKeys(size)
        self._deadline_ns = deadline_ns
        self._last_refusal = last_refusal
        self._began_ns = began_ns
        self._stage = 0  # the first one whose outcome this rank does not know
        self._is_over = False
        self._look_ns = 0
        self._me = _describe_attempt()
        word = secrets.token_hex(4)
        self.epoch = self._perform(come_to_epoch(self._keys, rank, self._me, last, word, has_formed))

    @property
    def name(self) -> str:
        """The name of the world, which no other one has."""
        return self._keys.world(self.epoch)

    def exchange(self, mine: bytes) -> list[bytes]:
        """Return what all ranks have passed to this call, in rank order.

        Raises TimeoutError that names the missing ranks, PeerLostError if another rank has raised, UsageError if
        another process has this rank, EpochOverError, ProtocolError.
        """
        stage = self._stage
        outcome = self._perform(put_record(self._keys, self.epoch, stage, self._rank, mine, _packed))
        if outcome is None:
            outcome = self._await_outcome()
        packed = read_outcome(outcome)
        if isinstance(packed, Ending):
            raise self._error_of(packed)
        self._stage += 1
        return _unpacked(packed, self._keys.size)

    def check(self) -> None:
        """Raise as `exchange` if another rank has ended this attempt. Call this often while ranks connect."""
        now_ns = time.monotonic_ns()
        if not self._look_ns:
            self._look_ns = now_ns + LOOK_NS
        elif now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_NS
            if ending := self._ending(0):
                raise self._error_of(ending)
            self._check_store()

    def end(self, error: BaseException) -> BaseException:
        """End this attempt for all ranks, after this error; return the error to raise, perhaps that of its cause."""
        if self._is_over:
            return error
        try:
            # The rank that fails closes its connections just before it says why.
            if isinstance(error, PeerLostError) and (ending := self._ending(CAUSE_NS)):
                return self._error_of(ending)
            # Records that do not fit may be those of an earlier job that was killed here, whose ranks now come again.
            if isinstance(error, MismatchError | VersionError):
                ending = self._ending(STALE_NS)
                if ending and ending.kind is EndingKind.REPLACED:
                    return self._error_of(ending)
            self._perform(end_epoch(self._keys, self.epoch, self._stage, self._ending_after(error)))
        except RondeError:
            pass  # the store is gone; the others learn that, too
        return error

    def _ending_after(self, error: BaseException) -> Ending:
        """Return the ending for all ranks after an error of this one."""
        if not isinstance(error, TimeoutError):
            return Ending(EndingKind.FAILED, self._rank, _described(error), host=host_name())
        late = error.missing if self._stage == 0 else ()  # in later stages all ranks have come
        return Ending(EndingKind.TIMED_OUT, self._rank, str(error), error.missing, host_name(), late)

    def delete_earlier_epochs(self) -> None:
        """Delete the keys of earlier epochs. Rank 0 calls it when all ranks have connected."""
        with suppress(PeerLostError):  # all ranks have what they need of the store
            for number in range(self.epoch.number - 1, -1, -1):
                if not self._delete_epoch(Epoch(self.epoch.word, number)):
                    break

    def _delete_epoch(self, epoch: Epoch) -> bool:
        """Delete the keys of an epoch; return whether there were any."""
        try:
            return self._store.delete_prefix(f"{self._keys.world(epoch)}/") > 0
        except UsageError:  # torch's store cannot delete by prefix
            return sum(self._store.delete_key(key) for key in self._keys.of_epoch(epoch)) > 0

    def _perform(self, steps: Steps[Result]) -> Result:
        """Send the requests to the store; return the result of the steps."""
        store = self._store
        answer: Any = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as done:
                result: Result = done.value
                return result
            match request:
                case CompareSet():
                    answer = store.compare_set(*request)
                case SetValue():
                    answer = None
                    store.set(*request)
                case Add():
                    answer = store.add(request.key, 1)
                case MultiGet():
                    try:
                        answer = store.multi_get(request.keys, 0)
                    except TimeoutError:
                        self._check_store()
                        raise

    # Endings

    def _ending(self, timeout_ns: int) -> Ending | None:
        """Return how this attempt has ended, waiting for that; None if it has not, or has gone further."""
        try:
            found = read_outcome(self._store.get(self._keys.outcome(self.epoch, self._stage), timeout_ns))
        except TimeoutError:
            return None
        return found if isinstance(found, Ending) else None

    def _error_of(self, ending: Ending) -> Exception:
        """Return what this rank raises about an ending."""
        self._is_over = True
        reaction = judge_ending(ending, self._rank)
        if reaction is Reaction.GO_ON:
            if ending.kind is EndingKind.REPLACED:
                return self._over(f"{_process_of(ending.reason.encode())} has come as rank {ending.rank}")
            return self._over(f"rank {ending.rank} gave up: {ending.reason}")
        if reaction is Reaction.CONTEST:
            ending = self._contest(ending)
        if ending.kind is EndingKind.TWICE:
            message = f"two processes have rank {ending.rank} of this job, {ending.reason}: {TWICE_REMEDY}"
            return UsageError(message) if ending.rank == self._rank else PeerLostError(message, ending.rank)
        if ending.kind is EndingKind.TIMED_OUT:
            gave_up = f"rank {ending.rank} gave up: " if self._left_ns() > 10**9 else ""
            waited_ns = time.monotonic_ns() - self._began_ns
            return TimeoutError(f"{gave_up}{ending.reason}", "init", waited_ns, ending.missing)
        message = f"rank {ending.rank} on {ending.host} failed in {self._call}: {ending.reason}"
        return PeerLostError(message, ending.rank, ending.host)

    def _contest(self, ending: Ending) -> Ending:
        """End the epoch of the process that has come as this rank, too: it is not the only one."""
        twice = _given_twice(self._rank, self._me, ending.reason.encode())
        with suppress(RondeError):
            self._perform(end_epoch(self._keys, self.epoch.following, 0, twice))
        return twice

    # Waiting

    def _left_ns(self) -> int:
        return max(0, self._deadline_ns - time.monotonic_ns())

    def _await_outcome(self) -> bytes:
        """Return the stage's outcome, once another rank has set it."""
        key = self._keys.outcome(self.epoch, self._stage)
        # At the deadline the lowest rank looks which ranks are missing, and ends the attempt before all others look.
        give_up_ns = self._deadline_ns + self._rank * JITTER_NS
        while True:
            now_ns = time.monotonic_ns()
            notice_ns = self._began_ns + _next_notice_ns(now_ns + JITTER_NS - self._began_ns)
            try:
                look_ns = min(now_ns + STORE_LOOK_NS, notice_ns, give_up_ns)
                return self._store.get(key, max(0, look_ns - now_ns))
            except TimeoutError:
                pass
            self._check_store()
            is_late = give_up_ns - time.monotonic_ns() < JITTER_NS
            if is_late or (notice_ns - time.monotonic_ns() < JITTER_NS and self._is_first()):
                missing = self._missing()
                if not missing:  # the last rank has not set the outcome, and may be lost
                    return self._perform(take_records(self._keys, self.epoch, self._stage, _packed))
                if is_late:
                    raise self._timeout(missing)
                _log.warning("%s", self._notice(missing))

    def _check_store(self) -> None:
        """Raise EpochOverError if the store has begun anew."""
        try:
            word = Epoch.decode(self._store.get(self._keys.counter, 0)).word
        except TimeoutError:
            word = ""
        if word != self.epoch.word:
            self._is_over = True
            raise self._over(f"the store at {self._store.address} has begun anew")

    def _over(self, reason: str) -> Exception:
        """Return what ends this attempt only, or, with no time left for another one, says so."""
        if self._left_ns() >= JITTER_NS:
            return EpochOverError(reason)
        waited_ns = time.monotonic_ns() - self._began_ns
        return TimeoutError(f"waited {_seconds(waited_ns)} s to join: {reason}", "init", waited_ns)

    def _is_first(self) -> bool:
        """Return whether this is the lowest rank that has come."""
        lower = (self._keys.record(self.epoch, self._stage, rank) for rank in range(self._rank))
        return not any(self._store.check([key]) for key in lower)

    def _missing(self) -> list[int]:
        records = {self._keys.record(self.epoch, self._stage, rank): rank for rank in range(self._keys.size)}
        return [records[key] for key in missing_of(list(records), self._store.check)]

    def _notice(self, missing: Sequence[int]) -> str:
        """Return what to tell the user about ranks that have not come for a while."""
        waited_s = round((time.monotonic_ns() - self._began_ns) / 1e9)
        have = "has" if len(missing) == 1 else "have"
        notice = (
            f"{named_ranks(missing)} of {self._keys.size} {have} not joined at {self._store.address} after "
            f"{waited_s} s"
        )
        for size in range(2, min(2 * self._keys.size, MOST_SIZES) + 2):
            if size != self._keys.size and (elsewhere := self._waiting_elsewhere(size)):
                return (
                    f"{notice}; {named_ranks(elsewhere)} there joined a world of {size}, now or in an earlier job: "
                    "is WORLD_SIZE wrong?"
                )
        if refusal := self._last_refusal():
            return f"{notice}; the store {refusal}"
        return f"{notice}; each of {self._keys.size} processes (WORLD_SIZE) must call {self._call}"

    def _waiting_elsewhere(self, size: int) -> list[int]:
        """Return the ranks that wait for a world of another size."""
        keys = WorldKeys(size)
        if not self._store.check([keys.counter]):
            return []
        epoch = Epoch.decode(self._store.get(keys.counter, 0))
        if self._store.check([keys.outcome(epoch, 0)]):
            return []
        return [rank for rank in range(size) if self._store.check([keys.member(epoch, rank)])]

    def _timeout(self, missing: Sequence[int]) -> TimeoutError:
        waited_ns = time.monotonic_ns() - self._began_ns
        message = (
            f"waited {_seconds(waited_ns)} s for {named_ranks(missing)} of {self._keys.size} to join at "
            f"{self._store.address}"
        )
        if refusal := self._last_refusal():
            message += f"; the store {refusal}"
        else:
            limit = " (RONDE_START_TIMEOUT)" if self._call == "ronde.init()" else ""
            message += f"; every rank must call {self._call} within that time{limit}"
        return TimeoutError(message, "init", waited_ns, tuple(missing))


def _next_notice_ns(waited_ns: int) -> int:
    """Return after which time of waiting the next notice is due."""
    notice_ns = NOTICE_NS
    while notice_ns <= waited_ns:
        notice_ns *= NOTICE_GROWTH
    return notice_ns


def _seconds(duration_ns: int) -> str:
    return f"{round(duration_ns / 1e9, 1):g}"


def contest_rank(store: Store, rank: int, size: int) -> None:
    """Raise UsageError on all ranks if another process has come as this rank, and waits for others."""
    keys = WorldKeys(size)
    try:
        epoch = Epoch.decode(store.get(keys.counter, CONTEST_NS))
        other = store.get(keys.member(epoch, rank), CONTEST_NS)
    except TimeoutError:
        return
    twice = _given_twice(rank, other, _describe_attempt())
    ending = end_value(twice)
    if store.compare_set(keys.outcome(epoch, 0), b"", ending) == ending:
        raise UsageError(f"two processes have rank {rank} of this job, {twice.reason}: {TWICE_REMEDY}")


def _describe_attempt() -> bytes:
    """Return a new value for a member key: a random word, and this process."""
    return f"{secrets.token_hex(8)} process {os.getpid()} on {host_name()}".encode()


def _given_twice(rank: int, one: bytes, other: bytes) -> Ending:
    return Ending(EndingKind.TWICE, rank, f"{_process_of(one)} and {_process_of(other)}")


def _process_of(member: bytes) -> str:
    """Return the process that a member key describes."""
    return member.decode(errors="replace").partition(" ")[2]


def _described(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= MOST_OF_REASON else text[: MOST_OF_REASON - 3] + "..."


def _packed(records: Sequence[bytes]) -> bytes:
    """Return the records as one value. They have much in common, so they are compressed: 512 to a twentieth."""
    return zlib.compress(b"".join(framed(record).tobytes() for record in records), zlib.Z_BEST_SPEED)


def _unpacked(packed: bytes, count: int) -> list[bytes]:
    """Return the records of a value. Raises ProtocolError if it is malformed."""
    unzip = zlib.decompressobj()
    try:
        text = unzip.decompress(packed, count * 2 * RECORD_LIMIT_BYTES)
        records = unframed(np.frombuffer(text, np.uint8)) if unzip.eof else []
    except (zlib.error, ProtocolError):
        records = []
    if len(records) != count:
        raise ProtocolError(f"the start-up records of the ranks are malformed: expected {count}")
    return records
