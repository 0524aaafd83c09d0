"""The optional protections of a state: snapshots, copies of shards, comparison of ranks, and the limit of a step.

`State` calls this module in a commit and after a change of the ranks:

    before_barrier      copies of shards go to other ranks (`neighbours`), if there are sharded parts
    before_copy         the memory of the last commit is about to change
    after_copy          comparison of the ranks (`state_check`), snapshots on disk (`snapshots`), time of the step
    begin               a job that starts continues from its newest snapshot
    settle              shards go where they belong in the new world
    awaiting            a job that waits for workers may end: the last commit goes to the disk
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from ronde.comm import world as comm
from ronde.elastic.neighbours import Neighbours, ShardsLostError
from ronde.elastic.termination_handler import TerminationHandler

if TYPE_CHECKING:
    from ronde.elastic.snapshots import Snapshots
    from ronde.elastic.state_check import StateCheck
    from ronde.elastic.state_parts import Part
    from ronde.elastic.step_watch import StepWatch

__all__ = ["Safeguards", "describe_process"]


class Safeguards:
    """The safeguards of one state.

    `parts`: of the state, by name; more may be added until it is first used. `last_commit`: returns the number of the
    commit whose copy is complete, -1 if there is none.
    """

    def __init__(self, parts: Mapping[str, Part], last_commit: Callable[[], int]) -> None:
        self._parts, self._last_commit = parts, last_commit
        self._neighbours = Neighbours()
        self.snapshots: Snapshots | None = None
        self.check: StateCheck | None = None
        self.watch: StepWatch | None = None
        self._termination = TerminationHandler(self._write_last_commit)

    def surviving(self) -> AbstractContextManager[None]:
        """The context of a whole elastic run: a process that is told to end writes its last commit first."""
        return nullcontext() if self.snapshots is None else self._termination.installed()

    def changing(self) -> AbstractContextManager[None]:
        """The context of changes of the state and its copies, which SIGTERM does not interrupt."""
        return self._termination.deferring()

    def _write_last_commit(self) -> None:
        if self.snapshots is not None:
            number = self._last_commit()
            self.snapshots.end(number, self._parts, lambda: self._neighbours.known_shards(number))

    @property
    def sharded(self) -> dict[str, Part]:
        """The parts of which each rank has another share."""
        return {name: part for name, part in self._parts.items() if part.is_sharded}

    def before_barrier(self, number: int) -> None:
        """Save the sharded parts, and give copies to other ranks. Raises PeerError."""
        self.before_copy()
        if sharded := self.sharded:
            self._neighbours.secure(number, sharded, comm.world())

    def before_copy(self) -> None:
        """Note that the memory of the last commit is about to change."""
        if self.snapshots is not None:
            self.snapshots.before_save()

    def accept(self) -> None:
        """Note that all ranks have come to the commit, and this one has copied its state."""
        if self.sharded:
            self._neighbours.accept(comm.size())

    def after_copy(self, number: int) -> None:
        """Compare the state of ranks, and write a snapshot, if either is due. Raises MismatchError and PeerError."""
        world = comm.world()
        if self.watch is not None:
            self.watch.note_step()
        if self.check is not None:
            self.check.check(number, self._parts, world)
        if self.snapshots is not None:
            self.snapshots.after_save(number, self._parts, world)

    def begin(self) -> int | None:
        """Load the newest snapshot, in a world in which no rank has a commit. Return the commit; None if there is none.

        Rank 0 has the parts then that are the same on all ranks, and each rank its shard.
        """
        number = None if self.snapshots is None else self.snapshots.restore(self._parts, comm.world())
        if number is not None and self.sharded:
            self._neighbours.adopt(number, self.sharded, comm.world())
        return number

    def begin_shards(self, number: int) -> None:
        """Make the live state of the sharded parts that of a first commit."""
        if sharded := self.sharded:
            for part in sharded.values():
                part.save()
            self._neighbours.adopt(number, sharded, comm.world())

    def settle(self, number: int) -> None:
        """Bring the shards of a commit to their ranks. Raises ShardsLostError on all ranks if some are lost."""
        if self.sharded:
            self._neighbours.settle(number, self.sharded, comm.world())

    def begin_without(self, error: ShardsLostError) -> int:
        """Load the newest snapshot, as shards are lost, and return its commit. Raises the error if there is none."""
        if (found := self.begin()) is not None:
            return found
        error.add_note(f"The job cannot go on{self.advise_snapshots()}.")
        raise error

    def advise_snapshots(self) -> str:
        """Return the end of a sentence about a state that is lost."""
        if self.snapshots is not None:
            return f": there is no complete snapshot in {self.snapshots.folder} either"
        return ": state.keep_snapshots(folder) keeps commits on disk for such a case"

    def awaiting(self) -> AbstractContextManager[None]:
        """The context in which this process waits for its place in a world."""
        if self.snapshots is None:
            return nullcontext()
        number = self._last_commit()
        return self.snapshots.securing(number, self._parts, lambda: self._neighbours.known_shards(number))

    @contextmanager
    def training(self) -> Iterator[None]:
        """The context in which the training function runs."""
        with nullcontext() if self.watch is None else self.watch.training():
            yield

    def finish(self, number: int) -> None:
        """Wait until the last commit is on the disk."""
        if self.snapshots is not None:
            self.snapshots.finish(number, self._parts)


def describe_process() -> str:
    """Return how messages call this process."""
    where = f"rank {comm.rank()}" if comm.is_initialized() else "a worker"
    return f"{where} (pid {os.getpid()})"
