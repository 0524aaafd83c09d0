"""The state of an elastic training: its parts, its commits, and how a new process gets it.

`elastic/commit_protocol` says what a commit is and where ranks go after a loss; `elastic/running` calls it.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ronde.comm import world as comm
from ronde.elastic.batches import Batches, Positions, StreamBatches
from ronde.elastic.commit_barrier import BarrierKind, pass_barrier
from ronde.elastic.commit_protocol import NOTHING, Action, Decision, Standing, decide
from ronde.elastic.goodput import Goodput, Ledger
from ronde.elastic.neighbours import ShardsLostError
from ronde.elastic.safeguards import Safeguards, describe_process
from ronde.elastic.several_streams import SeveralStreams
from ronde.elastic.snapshots import Snapshots
from ronde.elastic.state_check import StateCheck
from ronde.elastic.state_parts import Part
from ronde.elastic.state_transfer import transfer
from ronde.elastic.step_times import StepRule
from ronde.elastic.step_watch import StepWatch
from ronde.errors import MismatchError, UsageError
from ronde.net.host import host_name
from ronde.process.membership_channel import membership

__all__ = [
    "HostsUpdatedInterrupt",
    "ObjectState",
    "Part",
    "State",
    "TrainingOverError",
    "goodput",
    "ledger",
]

_log = logging.getLogger("ronde.elastic")

ledger = Ledger(time.monotonic_ns())  # of this process


def goodput() -> Goodput:
    """Return what became of the time of this process since it entered `ronde.elastic.run` (see `Goodput`)."""
    return ledger.read(time.monotonic_ns())


class HostsUpdatedInterrupt(Exception):
    """The world changes without a loss: raised on all ranks at a commit, and handled by `ronde.elastic.run`.

    Args:
        skip_sync: Whether new processes need nothing from the state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the members of the job change")
        self.skip_sync = skip_sync


class TrainingOverError(MismatchError):
    """The other ranks are in a later training of the program than this process, so they have finished this one."""


class State:
    """What a training must not lose: named parts, and the position in its batches.

    `ronde.elastic.run` restores it after a loss, and gives it to new processes. Derive from it, or use `ObjectState`.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._standing = Standing()
        self._reset_callbacks: list[Callable[[], object]] = []
        self._hosts_updated = False  # a launcher has told this rank
        self._is_agreed = False  # all ranks know that they change at the end of the step
        self._is_in_step = False  # of `batches`
        self._is_copying = False  # `save` is called by this class
        self._agreed = NOTHING  # the commit on which the ranks of this world have agreed
        self._commits_reset = False  # all ranks make a commit of what reset callbacks have changed
        self._is_resetting = False  # reset callbacks run
        self._batches_begun: set[str] = set()  # by the present call of the training function
        self._positions = Positions()
        self._safeguards = Safeguards(self._parts, lambda: self._standing.copied)
        self.add_part("positions", self._positions)

    def add_part(self, name: str, part: Part) -> None:
        """Add a part, before the state is first used. All ranks add the same ones."""
        self._parts[name] = part

    # What a program calls

    def commit(self) -> None:
        """Make the present state the one to which all ranks go back after a loss.

        All ranks call it at the same place, usually after each step. It waits until all have come, then copies.

        Raises:
            HostsUpdatedInterrupt: the members of the job change; `ronde.elastic.run` handles it.
            PeerError: a rank was lost; `ronde.elastic.run` handles it.
            MismatchError: ranks are at different places of the training.
            UsageError: a reset callback calls it.
        """
        if self._is_resetting:
            raise UsageError("commit() in a reset callback: leave it out, a commit follows the callbacks")
        if self._commit():
            raise HostsUpdatedInterrupt

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks, if the members of the job change; the state is committed before.

        All ranks call it at the same place. In the body of a loop over `batches` it is raised when the step is done:
        by the next `commit`, or when the loop asks for the next batch.
        """
        if not self._meet(BarrierKind.CHECK, self._standing.copied + 1):
            return
        self._is_agreed = True
        if not self._is_in_step:
            self.commit()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these functions, on the processes that stay, once for each new world that has formed.

        They may change the state: a commit follows, before new processes get it. If another loss interrupts that, all
        ranks keep the changes or all take them back, and the functions are called again when the next world has formed.
        All ranks register the same functions.
        """
        self._reset_callbacks += callbacks

    def batches(
        self,
        data: Any,
        global_batch: int,
        *,
        seed: int | None = 0,
        epochs: int = 1,
        micro_batch: int | None = None,
        name: str = "",
    ) -> Iterator[Any]:
        """Yield this rank's share of each batch, from the position of the last commit on.

            for batch in state.batches((images, labels), global_batch=256, epochs=10):
                step(*batch)
                state.commit()

        The order follows from `seed`, epoch and step alone, so each sample is in one committed step of each epoch,
        whatever happens to the world. All ranks together get `global_batch` samples in each step; shares differ by one
        sample at most, and may be empty. The last batch of an epoch may be smaller.

        Args:
            data: an array, a tuple, list or dict of arrays of equal length, the number of samples (then the indices are
                yielded), or anything with a length whose items are samples (then a list of them is).
            global_batch: the number of samples in a step of all ranks.
            seed: of the order; None keeps the order of the data.
            epochs: how often all samples are taken, in all.
            micro_batch: if given, each batch is a `Pieces` with fixed pieces of so many samples, whose `sum` has the
                same bits for every size of the world.
            name: if a program goes through batches more than once, a name for each time.

        Raises:
            UsageError: an argument is invalid, or a call of the training function uses a name a second time.
        """
        self._begin_batches(name)
        yield from self._in_steps(
            Batches(self._positions, data, global_batch, seed, epochs, micro_batch, name)
        )

    def stream(
        self, source: Callable[[int], Iterable[Any]] | Iterable[Any], global_batch: int, *, name: str = ""
    ) -> Iterator[list[Any]]:
        """Yield this rank's share of each batch of a stream, from the position of the last commit on.

            for samples in state.stream(lambda start: read_records(files, start), global_batch=256):
                step(samples)
                state.commit()

        For readers without a length and an index, such as an IterableDataset of PyTorch. All ranks read equal samples
        in the same order, and each keeps its share of each batch, so each sample is in one committed step, whatever
        happens to the world. Shares differ by one sample at most, and may be empty. The last batch may be smaller.

        Args:
            source: a function that opens the stream at a sample's number, from 0; or an iterable that begins with the
                first sample each time: then samples before the position are read and dropped.
            global_batch: the number of samples in a step of all ranks.
            name: if a program goes through batches or streams more than once, a name for each time.

        Raises:
            UsageError: an argument is invalid, or the training function uses this name for the second time.
        """
        self._begin_batches(name)
        yield from self._in_steps(StreamBatches(self._positions, source, global_batch, name))

    def streams(
        self,
        sources: Sequence[Callable[[int], Iterable[Any]] | Iterable[Any]],
        global_batch: int,
        *,
        name: str = "",
    ) -> Iterator[list[Any]]:
        """Yield this rank's samples of each batch of several streams, from the positions of the last commit on.

            def reader(path):
                return lambda start: read_records(path, start)

            for samples in state.streams([reader(path) for path in paths], global_batch=256):
                step(samples)
                state.commit()

        For data in several files: one rank reads each of them, and another one goes on with it after a change. Each
        sample is in one committed step, whatever happens to the world. A batch takes equal numbers from all streams
        that have not ended, so the batches of all ranks together do not depend on the size of the world; only the last
        one may be smaller. A rank's share follows from the number of its streams, so let there be several times as many
        as ranks; it may be empty. So sum over the samples of all ranks: an average of the ranks' averages gives samples
        different weights. Ranks exchange a few numbers before each batch.

        Args:
            sources: one for each stream, as of `stream`; the same on all ranks, in the same order.
            global_batch: the number of samples in a step of all ranks.
            name: if a program goes through batches or streams more than once, a name for each time.

        Raises:
            MismatchError: ranks give different numbers of streams, or different global batches.
            PeerError: a rank was lost; `ronde.elastic.run` handles it.
            UsageError: an argument is invalid, or the training function uses this name for the second time.
        """
        self._begin_batches(name)
        yield from self._in_steps(SeveralStreams(self._positions, sources, global_batch, name))

    def keep_snapshots(self, folder: str | os.PathLike[str], every: int = 1, keep: int = 2) -> None:
        """Write a commit to disk now and then, beside the training, so that a job that has ended can be resumed.

            state.keep_snapshots("/shared/run-7", every=100)

        The new job may have another number of ranks. All ranks call it, before the training. If too few workers are
        left, the last commit is written, too. A snapshot is complete or does not count: a full disk or a kill leave the
        ones before it.

        Args:
            folder: on a file system that all hosts share; created if it does not exist.
            every: the number of commits from one snapshot to the next (1). One that is due while the disk is busy is
                skipped.
            keep: the number of complete snapshots to keep (2).

        Raises:
            UsageError: a number is less than 1.
        """
        self._safeguards.snapshots = Snapshots(folder, every, keep)

    def compare_ranks(self, every: int = 100, most_repairs: int = 1) -> None:
        """Compare the state over the ranks every few commits. A rank that differs from most gets their state.

        Bits that a defective machine has flipped are noticed, and so is a program whose ranks compute different things.
        If a rank differs again, its process ends with MismatchError, and the launcher replaces it. All ranks call it,
        before the training. Without a majority, all ranks raise MismatchError.

        Positions in the data of an `ElasticSampler` are not compared. Do not keep values that differ by rank in the
        state, such as the loss of this rank's batch: average them first.

        Args:
            every: the number of commits from one comparison to the next (100); one takes about 1 s for each GB.
            most_repairs: how often a process may be put right before it leaves (1).

        Raises:
            UsageError: a number is out of range.
        """
        self._safeguards.check = StateCheck(every, most_repairs)

    def end_stuck_steps(self, factor: float = 10.0, least_s: float = 30.0) -> None:
        """End this process, with its stacks, if a step takes too long and waits for no other rank.

        A step lasts from one commit to the next. The limit is learnt: `factor` times what nine tenths of the last steps
        took, and at least twice the longest step so far. The first 10 steps have none. The launcher replaces the
        process. All ranks call it, before the training.

        Args:
            factor: how many times as long as most steps one may take (10).
            least_s: the shortest limit, in seconds (30).

        Raises:
            UsageError: a number is out of range.
        """
        rule = StepRule(factor, round(least_s * 1e9))
        self._safeguards.watch = StepWatch(rule, describe_process)

    # What a program may call, and a state with other needs overrides

    def save(self) -> None:
        """Commit as `commit` does, but let a change of the members of the job wait for the next `commit`.

        All ranks call it at the same place, in the training. Before that it copies the state of this process only, and
        in a reset callback it does nothing, because a commit follows. A method that overrides it is also called by
        `commit`, when all ranks have come.

        Raises:
            PeerError: a rank was lost; `ronde.elastic.run` handles it.
            MismatchError: ranks are at different places of the training.
        """
        if self._is_resetting:
            return  # `commit_reset` follows, on all ranks
        if self._standing.copied != NOTHING and not self._is_copying:
            self.prepare_save()
            self._commit()
            return
        self._safeguards.before_copy()
        for part in self._parts.values():
            if not part.is_sharded:  # those are copied before the barrier
                part.save()

    def prepare_save(self) -> None:
        """Prepare the commit that `save` makes, with the other ranks if need be."""

    def restore(self) -> None:
        """Go back to the copies of all parts."""
        for part in self._parts.values():
            part.restore()

    def reset(self) -> None:
        """Prepare for a world of other ranks. `on_reset` calls it before the callbacks."""

    def sync(self) -> None:
        """Give the newest commit to ranks that lack it; all that have it send parts of large arrays.

        All ranks call it; `ronde.elastic.run` does when a world has formed. Ranks that have the commit keep their live
        state. If no rank has one, all get the live state of rank 0, as commit 0.
        """
        decision = decide(comm_standings(Standing(self._standing.copied))[0])
        mine = decision.actions[comm.rank()]
        if mine is Action.BEGIN:
            self._safeguards.begin_shards(0)
            if comm.rank() == decision.holders[0]:
                self._copy(0)
        senders = decision.holders
        receivers = [rank for rank in range(comm.size()) if rank not in senders]
        if receivers:
            payload = self.payload() if comm.rank() in senders else None
            received = transfer(payload, senders, receivers)
            if comm.rank() in receivers:
                self.load(received, decision.number)

    # What `ronde.elastic.run` and launchers call

    def on_reset(self) -> None:
        """Run the callbacks after the world has changed, on a process that stays."""
        self._hosts_updated = self._is_agreed = self._is_in_step = False
        self.reset()
        self._is_resetting = True
        try:
            for callback in self._reset_callbacks:
                callback()
        finally:
            self._is_resetting = False

    def commit_reset(self) -> None:
        """Commit what reset callbacks have changed. All ranks call it after the callbacks, and before `sync`.

        New processes have their shards of sharded parts, and nothing else of the state yet: they commit these.
        If a loss interrupts it, all ranks keep the changes, or all take them back.
        """
        if not self._commits_reset:
            return
        number = self._agreed + 1
        with self._safeguards.changing():
            self._safeguards.before_barrier(number)
            has_state = self._standing.copied != NOTHING
            if has_state:
                self._standing = Standing(self._standing.copied, number)
            comm.world().barrier()
            if has_state:
                self._copy(number)
            else:
                self._safeguards.accept()

    def on_hosts_updated(self, timestamp: float = 0, update_res: int = 0) -> None:
        """Ask for `HostsUpdatedInterrupt` at the next commit. Any thread may call it."""
        self._hosts_updated = True

    def payload(self) -> Mapping[str, object]:
        """Return what a new process needs of the copies of all parts that are the same on all ranks."""
        return {name: part.payload() for name, part in self._parts.items() if not part.is_sharded}

    def load(self, payload: Mapping[str, object], number: int) -> None:
        """Take the payload of commit `number` as the copies, and as the live state."""
        parts = {name: part for name, part in self._parts.items() if not part.is_sharded}
        if payload.keys() != parts.keys():
            raise UsageError(
                f"the state of this process has the parts {sorted(parts)}, the one that it receives has "
                f"{sorted(payload)}: all processes must make the same state"
            )
        for name, part in parts.items():
            part.load(payload[name])
        self._standing = Standing(number)

    @property
    def commit_number(self) -> int:
        """The number of the commit whose copy this process has (-1: none)."""
        return self._standing.copied

    @property
    def safeguards(self) -> Safeguards:
        """What protects the commits of this state."""
        return self._safeguards

    def agree(self) -> tuple[Decision, bool]:
        """Agree with all ranks of a new world on the commit, and go there; ranks that lack it get it in `sync`.

        Return the decision, and whether the survivors' work since the last copy counts.
        """
        self._batches_begun.clear()
        self._safeguards.before_copy()
        mine = self._standing._replace(may_advance=not self._safeguards.sharded)
        standings, has_callbacks = comm_standings(mine, bool(self._reset_callbacks))
        decision = decide(standings)
        self._agreed = decision.number
        advances = (
            all(each.copied < decision.number for each in standings)
            and decision.actions[0] is not Action.BEGIN
        )
        match decision.actions[comm.rank()]:
            case Action.RESTORE:
                self.restore()
                self._standing = Standing(decision.number)
            case Action.SAVE:
                self._copy(decision.number)
            case _:
                self._standing = Standing()
        if decision.actions[0] is Action.BEGIN:
            from_disk = self._safeguards.begin()
            if comm.rank() == 0:
                self._report_beginning(from_disk)
        else:
            from_disk = self._settle_shards(decision.number)
        # A new process has not registered its callbacks yet if the program does so in the training.
        self._commits_reset = has_callbacks and from_disk is None and decision.actions[0] is not Action.BEGIN
        if from_disk is not None:
            # The actions remain, for messages: they tell which processes are new.
            return decision._replace(number=self._go_on_from_disk(from_disk)), False
        return decision, advances

    def _settle_shards(self, number: int) -> int | None:
        """Bring the shards to their ranks; if some are lost, load a snapshot, and return its commit."""
        try:
            self._safeguards.settle(number)
        except ShardsLostError as error:
            self._standing = Standing()  # also if a loss interrupts what follows
            return self._safeguards.begin_without(error)
        return None

    def _report_beginning(self, from_disk: int | None) -> None:
        """Log where a training begins of which no process has a commit. `from_disk`: that of the snapshot, if any."""
        if from_disk is not None:
            assert self._safeguards.snapshots is not None
            folder = self._safeguards.snapshots.folder
            _log.warning(
                "no process has a commit in memory: the training goes on from commit %d in %s",
                from_disk,
                folder,
            )
        elif (mine := membership()) and mine.number > 0 and mine.training <= 1 and not mine.has_outlived:
            _log.warning(
                "no process of round %d has a commit of an earlier round: the training begins from its start%s",
                *(mine.number, self._safeguards.advise_snapshots()),
            )

    def _go_on_from_disk(self, number: int) -> int:
        """Take the snapshot that rank 0 has loaded as the state: others receive it in `sync`. Return its commit."""
        self._standing = Standing(number if comm.rank() == 0 else NOTHING)
        return decide(comm_standings(self._standing)[0]).number

    def finish(self) -> None:
        """Wait until all ranks have finished, as if for a commit.

        If the members of the job change, that comes first: the state is committed, and all ranks finish in the new
        world. Otherwise new members would wait there for ranks that have ended. Raises HostsUpdatedInterrupt then.
        """
        number = self._standing.copied + 1
        with self._safeguards.changing():
            self._safeguards.before_barrier(number)
            if self._pass_barrier(number, BarrierKind.END):
                self._copy(number)
                ledger.commit(time.monotonic_ns())
                self._safeguards.after_copy(number)
                raise HostsUpdatedInterrupt
        self.note_finished()

    def note_finished(self) -> None:
        """Note that all ranks have finished, and return when the last commit is on disk."""
        self._standing = Standing(self._standing.copied)
        ledger.end(time.monotonic_ns())
        self._safeguards.finish(self._standing.copied)

    # Private

    def _begin_batches(self, name: str) -> None:
        if name in self._batches_begun:
            raise UsageError(
                f"train goes through the batches {name!r} a second time: let batches() count the epochs "
                "(epochs=...), or give each loop a name (name=...)"
            )
        self._batches_begun.add(name)

    def _in_steps(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            ledger.begin_step()
            self._is_in_step = True
            yield batch
            self._is_in_step = False
            if self._is_agreed:
                self.commit()

    def _pass_barrier(self, number: int, kind: BarrierKind) -> bool:
        """Wait until all ranks have come to commit `number`; return whether the members of the job change."""
        self._standing = Standing(self._standing.copied, number)
        return self._meet(kind, number)

    def _meet(self, kind: BarrierKind, number: int) -> bool:
        return pass_barrier(kind, number, self._is_agreed or self._is_change_wanted())

    @property
    def _host_messages(self) -> _HostMessages:
        """Programs for Horovod, its own tests among them, wait here until a change of the hosts is known."""
        return _HostMessages(self._is_change_wanted)

    def _is_change_wanted(self) -> bool:
        mine = membership()
        return self._hosts_updated or (mine is not None and mine.change_wanted is not None)

    def _commit(self) -> bool:
        """Make a commit; return whether the members of the job change."""
        number = self._standing.copied + 1
        with self._safeguards.changing():
            self._safeguards.before_barrier(number)
            is_changing = self._pass_barrier(number, BarrierKind.COMMIT)
            self._copy(number)
            ledger.commit(time.monotonic_ns())
            self._safeguards.after_copy(number)
        return is_changing

    def _copy(self, number: int) -> None:
        self._is_copying = True
        try:
            self.save()
        finally:
            self._is_copying = False
        self._safeguards.accept()
        self._standing = Standing(number)


class _HostMessages:
    """The part of a queue by which Horovod's programs see that a change waits for the next commit."""

    def __init__(self, is_change_wanted: Callable[[], bool]) -> None:
        self._is_change_wanted = is_change_wanted

    def empty(self) -> bool:
        """Return whether no change is known."""
        return not self._is_change_wanted()


def comm_standings(mine: Standing, has_callbacks: bool = False) -> tuple[list[Standing], bool]:
    """Return the standings of all ranks, which all call it, and whether any of them has reset callbacks.

    Raises TrainingOverError if other ranks are in a later training of the program than this process. They wait until
    it comes to theirs, or is lost.
    """
    channel = membership()
    training = channel.training if channel else 0
    row = np.array([mine.copied, mine.point, mine.may_advance, has_callbacks, training], np.int64)
    while True:
        rows = comm.world().allgather(row).reshape(-1, 5)
        earliest, latest = int(rows[:, 4].min()), int(rows[:, 4].max())
        if training < latest:
            raise TrainingOverError(
                f"rank {comm.rank()} on {host_name()} begins training {training} of this program, and the other ranks "
                f"are in training {latest}: a process that starts in a later training than the first cannot take "
                "part. Let a program have one training"
            )
        if earliest == latest:
            break
    standings = [Standing(int(copied), int(point), bool(may)) for copied, point, may, *_ in rows]
    return standings, bool(rows[:, 3].any())


class ObjectState(State):
    """A state of Python objects and NumPy arrays, which are its attributes.

        state = ronde.elastic.ObjectState(weights=np.zeros(10), best=0.0)
        state.weights -= 0.1 * gradient

    A restored array keeps its memory, so other names of it stay valid.

    Args:
        attributes: Objects that `copy.deepcopy` and pickle can copy, by name.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            if hasattr(self, name):
                raise UsageError(f"a state has a method {name!r}: choose another name for the attribute")
            setattr(self, name, value)
        self.add_part("attributes", _Attributes(self, list(attributes)))

    if TYPE_CHECKING:  # the attributes

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


class _Attributes:
    """The attributes of an object, as a part."""

    is_sharded = False

    def __init__(self, owner: object, names: list[str]) -> None:
        self._owner, self._names = owner, names
        self._copy: dict[str, Any] | None = None

    def save(self) -> None:
        live = {name: getattr(self._owner, name) for name in self._names}
        self._copy = copy_into(self._copy, live)

    def restore(self) -> None:
        if self._copy is not None:
            for name in self._names:
                setattr(self._owner, name, copy_into(getattr(self._owner, name), self._copy[name]))

    def payload(self) -> object:
        return self._copy

    def load(self, payload: Any) -> None:
        self._copy = payload
        self.restore()


def copy_into(target: Any, value: Any) -> Any:
    """Return a deep copy of the value, in the memory of `target` as far as that fits."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        if (
            type(target) is type(value)
            and target is not value
            and (target.shape, target.dtype) == (value.shape, value.dtype)
            and target.flags.writeable
        ):
            np.copyto(target, value)
            return target
        return value.copy()
    if type(value) is dict:
        copied = {
            key: copy_into(target.get(key) if type(target) is dict else None, each)
            for key, each in value.items()
        }
        if type(target) is not dict or target is value:
            return copied
        target.clear()
        target.update(copied)
        return target
    if type(value) is list:
        old = target if type(target) is list and len(target) == len(value) else [None] * len(value)
        copied_items = [copy_into(place, each) for place, each in zip(old, value)]
        if type(target) is not list or target is value:
            return copied_items
        target[:] = copied_items
        return target
    return copy.deepcopy(value)
