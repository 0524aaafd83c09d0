"""Wrong, but alive: a comparison of the state over the ranks every few commits.

Every rank has a digest of each part that should be the same on all ranks, and the number of times that it was put right
before. The majority is right. A rank that differs gets the state of the majority; if it differs again, it leaves the
job, because its machine may compute wrongly.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ronde.comm.byte_exchange import allgather_bytes, receive_bytes, send_bytes
from ronde.elastic.payloads import digest_items, pack, unpack
from ronde.elastic.state_parts import Part
from ronde.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from ronde.comm.communicator import Communicator

__all__ = ["Judgement", "StateCheck", "StateReport", "judge"]

_log = logging.getLogger("ronde.elastic")

_PIECE_BYTES = 1 << 28  # of a message


class StateReport(NamedTuple):
    """What one rank has. `digests`: by part; `num_repairs`: how often it was put right."""

    digests: tuple[str, ...]
    num_repairs: int


class Judgement(NamedTuple):
    """What follows.

    `source`: the rank whose state is right, None if there is no majority; `repaired`: the ranks that get it;
    `expelled`: those that leave; `parts`: the numbers of the parts that differ on any rank.
    """

    source: int | None
    repaired: tuple[int, ...]
    expelled: tuple[int, ...]
    parts: tuple[int, ...]

    @property
    def all_equal(self) -> bool:
        """Whether all ranks have the same state."""
        return not self.parts


def judge(reports: Sequence[StateReport], most_repairs: int = 1) -> Judgement:
    """Return the judgement on the reports of all ranks. Every rank computes the same one."""
    counts = Counter(each.digests for each in reports)
    digests, votes = counts.most_common(1)[0]
    columns = list(zip(*(each.digests for each in reports)))
    parts = tuple(number for number, column in enumerate(columns) if len(set(column)) > 1)
    if 2 * votes <= len(reports):
        return Judgement(None, (), (), parts)
    wrong = [rank for rank, each in enumerate(reports) if each.digests != digests]
    source = next(rank for rank, each in enumerate(reports) if each.digests == digests)
    return Judgement(
        source,
        tuple(rank for rank in wrong if reports[rank].num_repairs < most_repairs),
        tuple(rank for rank in wrong if reports[rank].num_repairs >= most_repairs),
        parts,
    )


class StateCheck:
    """Compares the parts that are the same on all ranks. All ranks make one with the same arguments.

    Args:
        every: after how many commits (100).
        most_repairs: how often a rank may be put right before it has to leave the job (1).

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(self, every: int = 100, most_repairs: int = 1) -> None:
        if every < 1 or most_repairs < 0:
            raise UsageError(
                f"every={every}, most_repairs={most_repairs} is invalid: expected numbers from 1 and from 0"
            )
        self._every, self._most_repairs = every, most_repairs
        self.num_repairs = 0  # of this process

    def check(self, commit: int, parts: Mapping[str, Part], world: Communicator) -> None:
        """Compare the last copies if a comparison is due. All ranks call it after each commit.

        A rank whose state differs from that of most ranks loads theirs; one log line names it. The digests are those of
        arrays, numbers and texts.

        Args:
            commit: the number of the commit.
            parts: by name; sharded ones are left out, and those whose `may_differ` is true.
            world: the ranks that have committed.

        Raises:
            MismatchError: this rank differs again, and leaves the job; or no majority of the ranks agrees (then it is
                raised on all ranks).
            PeerError: a rank was lost.
        """
        if commit % self._every or world.size == 1:
            return
        compared = {name: part for name, part in parts.items() if not (part.is_sharded or _may_differ(part))}
        reports = [
            StateReport(tuple(digests), num_repairs)
            for digests, num_repairs in map(json.loads, allgather_bytes(world, self._report(compared)))
        ]
        judgement = judge(reports, self._most_repairs)
        if judgement.all_equal:
            return
        names = list(compared)
        differing = ", ".join(names[number] for number in judgement.parts)
        self._complain(commit, differing, judgement, reports, world)
        assert judgement.source is not None
        if judgement.source == world.rank:
            for rank in judgement.repaired:
                _send(compared, rank, world)
        elif world.rank in judgement.repaired:
            self.num_repairs += 1
            _receive(compared, judgement.source, world)

    def _report(self, parts: Mapping[str, Part]) -> bytes:
        return json.dumps([[_digest(part) for part in parts.values()], self.num_repairs]).encode()

    def _complain(
        self,
        commit: int,
        differing: str,
        judgement: Judgement,
        reports: Sequence[StateReport],
        world: Communicator,
    ) -> None:
        """Log which ranks differ. Raises MismatchError if this rank has to leave, or if nobody can say who is right."""
        if judgement.source is None:
            groups: dict[tuple[str, ...], list[int]] = {}
            for rank, report in enumerate(reports):
                groups.setdefault(report.digests, []).append(rank)
            told = "; ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in groups.values())
            raise MismatchError(
                f"the state differs between ranks at commit {commit} (in {differing}), and no majority agrees: {told}. "
                "Start the job again from a snapshot of before"
            )
        if world.rank in judgement.expelled:
            raise MismatchError(
                f"the state of rank {world.rank} on {world.hosts[world.rank]} differs from that of most ranks at "
                f"commit {commit} (in {differing}), again after {self.num_repairs} repairs: this process leaves the "
                "job. Its machine may compute wrongly"
            )
        if world.rank == judgement.source:
            for rank in judgement.repaired:
                _log.warning(
                    "the state of rank %d on %s differs from that of most ranks at commit %d (in %s): it goes back to "
                    "the state of rank %d",
                    *(rank, world.hosts[rank], commit, differing, world.rank),
                )


def _may_differ(part: Part) -> bool:
    return getattr(part, "may_differ", False)


def _digest(part: Part) -> str:
    digest = hashlib.sha256()  # processors have instructions for it
    for item in digest_items(part.payload()):
        digest.update(item)
    return digest.hexdigest()


def _send(parts: Mapping[str, Part], rank: int, world: Communicator) -> None:
    for part in parts.values():
        packed = pack(part.payload())
        send_bytes(world, json.dumps([packed.text, packed.num_bytes]).encode(), rank)
        data = memoryview(b"".join(packed.buffers))
        for begin in range(0, data.nbytes, _PIECE_BYTES):
            send_bytes(world, bytes(data[begin : begin + _PIECE_BYTES]), rank)


def _receive(parts: Mapping[str, Part], rank: int, world: Communicator) -> None:
    for part in parts.values():
        text, num_bytes = json.loads(receive_bytes(world, rank))
        data = bytearray()
        while len(data) < num_bytes:
            data += receive_bytes(world, rank)
        part.load(unpack(text, memoryview(data), takes_pickles=True))
