"""The engines of this process, from `init` to `shutdown`: that of all ranks, and those of process sets.

Every process set has a separate engine (coordinator, cache, communicator, thread), so sets do not wait for each other.
All ranks of the world add and remove sets together, in the same order.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ronde import settings
from ronde._native import Handle
from ronde.comm import world as comm
from ronde.comm.affinity import core_of
from ronde.comm.arrays import ResultT
from ronde.comm.byte_exchange import framed, require_equal, unframed
from ronde.comm.communicator import Communicator
from ronde.engine.engine import Engine
from ronde.engine.timeline import Timeline
from ronde.errors import NotInitializedError, PeerError, RondeError, TimeoutError, UsageError
from ronde.process.resources import shortage
from ronde.process.uncaught import announce_departure
from ronde.settings import Settings
from ronde.types import Allgather, Kind, ReduceOp, Sum

__all__ = [
    "ProcessSet",
    "ProcessSets",
    "add_process_set",
    "engine",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "init",
    "init_again",
    "join",
    "place_of_root",
    "remove_process_set",
    "shutdown",
    "start_timeline",
    "stop_timeline",
    "submit",
]


_log = logging.getLogger("ronde.engine")


class ProcessSet:
    """Some ranks of the world. Add it before use, by `init(process_sets=...)` or `add_process_set`.

        even = ronde.add_process_set(ronde.ProcessSet([0, 2]))
        ronde.allreduce(x, process_set=even)  # on ranks 0 and 2

    Args:
        ranks: Ranks of the world, in any order.

    Attributes:
        ranks: The ranks in ascending order.
        process_set_id: 0 for the set of all ranks; None if the set is not added.

    Raises:
        UsageError: A rank is not a whole number.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks: list[int] = sorted(_whole_numbers(ranks))
        self.process_set_id: int | None = None
        self._engine: Engine | None = None
        self._own_rank = -1

    def __repr__(self) -> str:
        state = "not added" if self.process_set_id is None else f"id {self.process_set_id}"
        return f"ProcessSet(ranks={self.ranks}, {state})"

    def __deepcopy__(self, _: object) -> ProcessSet:
        return self  # a copied module uses the same ranks

    def __reduce__(self) -> tuple[type[ProcessSet], tuple[list[int]]]:
        return ProcessSet, (self.ranks,)  # the other process adds the set

    def initialized(self) -> bool:
        """Return whether the set has been added. Raises no error."""
        return self.process_set_id is not None

    def included(self) -> bool:
        """Return whether this process is one of the ranks. Raises UsageError if the set is not added."""
        self._check_added()
        return self._own_rank in self.ranks

    def rank(self) -> int:
        """Return the place of this process in the set, from 0 on. Raises UsageError if it is not in the set."""
        self._check_added()
        self._check_included()
        return self.ranks.index(self._own_rank)

    def size(self) -> int:
        """Return the number of ranks. Raises UsageError if the set is not added."""
        self._check_added()
        return len(self.ranks)

    def place_of(self, rank: int) -> int:
        """Return the place in the set of a rank of the world. Raises UsageError if it is not in the set."""
        if rank not in self.ranks:
            raise UsageError(f"rank {rank} is not in the process set of ranks {self.ranks}")
        return self.ranks.index(rank)

    def engine(self) -> Engine:
        """Return the set's engine. Raises UsageError if the set is not added or this process is not in it."""
        self._check_added()
        if self._engine is None:
            self._check_included()
            raise NotInitializedError(f"{self!r} is being added or removed by another thread")
        return self._engine

    def _check_added(self) -> None:
        if self.process_set_id is None:
            raise UsageError(
                f"the process set of ranks {self.ranks} is not added: pass it to ronde.init(process_sets=[...]) or "
                "ronde.add_process_set()"
            )

    def _check_included(self) -> None:
        if self._own_rank not in self.ranks:
            raise UsageError(f"rank {self._own_rank} is not in the process set of ranks {self.ranks}")

    # For ProcessSets

    def mark_added(self, process_set_id: int, ranks: list[int], own_rank: int, engine: Engine | None) -> None:
        """Record that the set is added. `engine`: None on ranks outside the set."""
        self.process_set_id, self.ranks, self._own_rank, self._engine = (
            process_set_id,
            ranks,
            own_rank,
            engine,
        )

    def mark_removed(self) -> Engine | None:
        """Record that the set is removed; return its engine, which the caller closes."""
        self.process_set_id, engine, self._engine = None, self._engine, None
        return engine


class ProcessSets:
    """The process sets of this process, besides that of all ranks."""

    def __init__(self, world: Communicator, engine: Engine, settings: Settings, core: int | None) -> None:
        self._world = world
        self._of_all = engine
        self._settings = settings
        self._core = core
        self._sets: dict[int, ProcessSet] = {}
        self._added = 0

    def ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of every set by id; id 0 is the set of all ranks."""
        return {
            0: list(range(self._world.size)),
            **{number: each.ranks for number, each in self._sets.items()},
        }

    def add(self, wanted: ProcessSet) -> None:
        """Add a set. All ranks call it with the same ranks.

        Raises, on all ranks, MismatchError if the ranks differ, and UsageError (a ValueError) if a rank does not exist
        or the set exists.
        """
        if wanted.process_set_id is not None:
            raise UsageError(f"{wanted!r} is added already")
        self._require_equal("add", wanted.ranks)
        ranks = list(wanted.ranks)
        if not ranks or len(set(ranks)) != len(ranks) or not 0 <= ranks[0] <= ranks[-1] < self._world.size:
            raise UsageError(
                f"a process set needs distinct ranks from 0 to {self._world.size - 1}, at least one, not {ranks}"
            )
        for number, known in self.ids_and_ranks().items():
            if ranks == known:
                raise UsageError(f"there is a process set of ranks {ranks} already, with id {number}")
        members = self._world.group(ranks)
        self._added += 1
        engine = None if members is None else self._engine_of(members, ranks)
        wanted.mark_added(self._added, ranks, self._world.rank, engine)
        self._sets[self._added] = wanted

    def _engine_of(self, members: Communicator, ranks: list[int]) -> Engine:
        label = f"set {self._added}: "
        return Engine(members, self._settings, self._core, self._of_all.timeline, label, ranks)

    def remove(self, unwanted: ProcessSet) -> bool:
        """Remove a set; return False if it was not added. All ranks call it, when none uses the set any more."""
        number = unwanted.process_set_id
        if number == 0:
            raise UsageError("the process set of all ranks cannot be removed")
        self._require_equal("remove", unwanted.ranks)
        if number is None or self._sets.get(number) is not unwanted:
            return False
        del self._sets[number]
        engine = unwanted.mark_removed()
        if engine is not None:
            engine.close()
        # No rank continues before all have removed the set.
        self._require_equal("remove", unwanted.ranks)
        return True

    def close(self) -> None:
        """Leave all sets."""
        for each in list(self._sets.values()):
            engine = each.mark_removed()
            if engine is not None:
                engine.close()
        self._sets.clear()

    def abandon(self) -> None:
        """In a forked child: refuse all operations."""
        for each in self._sets.values():
            engine = each.mark_removed()
            if engine is not None:
                engine.abandon()
        self._sets.clear()

    def _require_equal(self, verb: str, ranks: Sequence[int]) -> None:
        """Wait until all ranks have called it. Raises MismatchError on all of them if they name different sets."""

        def exchange(mine: bytes) -> list[bytes]:
            name = f"ronde.process_set.{verb}"
            return unframed(self._of_all.submit(Allgather, framed(mine), name, waits=True).wait())

        require_equal(exchange, {f"the process set to {verb}": list(ranks)})


def _whole_numbers(ranks: Iterable[int]) -> list[int]:
    try:
        return [operator.index(rank) for rank in ranks]
    except TypeError:
        raise UsageError(f"a process set needs a list of ranks, not {ranks!r}") from None


global_process_set = ProcessSet([])  # of all ranks; it knows them after `init`


class _EngineProcess:
    """The state of this process; one instance, below."""

    engine: Engine | None = None
    sets: ProcessSets | None = None
    timeline: Timeline | None = None
    asked: tuple[list[ProcessSet | Sequence[int]], dict[str, Any]] = ([], {})  # process sets, settings
    inherited: Engine | None = None  # in a forked child: the parent's engine, kept alive and never used


_process = _EngineProcess()


def init(
    rank: int | None = None,
    size: int | None = None,
    store: str | None = None,
    *,
    init_method: str | None = None,
    world_size: int | None = None,
    process_sets: Iterable[ProcessSet | Sequence[int]] | str | None = None,
    **overrides: object,
) -> None:
    """Join the world: connect this process with all other ranks of the job, and start the engine.

        ronde.init()
        print("rank", ronde.rank(), "of", ronde.size())

    All ranks call it, before any other function. It returns when all have joined; a second call does nothing. Without
    arguments, rank and size come from the launcher's environment; without a launcher, the world has one rank. After 10
    seconds it logs which ranks are missing.

    Args:
        rank: this process's rank, from 0, if there is no launcher.
        size: the number of ranks, if there is no launcher.
        store: where the ranks meet: `tcp:host:port` or `unix:@name`, which rank 0 serves, or `file:/path`.
        init_method: the same in torch.distributed's form: `env://`, `tcp://host:port` or `file:///path`.
        world_size: another name of `size`.
        process_sets: process sets, or lists of their ranks, to add (None or "dynamic": none yet).
        overrides: settings by name (docs/settings.md), which override `RONDE_*` variables: `timeout_ns=10**10`.

    Raises:
        UsageError: an argument or variable is invalid, the machine lacks a resource, two processes have this rank, or
            a second call has other arguments than the first.
        TimeoutError: ranks are missing after `start_timeout_ns` (default: 300 s); the error names them.
        PeerLostError: another rank has raised in this call; the error names it and its reason.
        AuthenticationError: another rank has another job key.
        MismatchError: ranks have different settings that must be the same.
    """
    try:
        _init(rank, size, store, init_method, world_size, process_sets, overrides)
    except RondeError:
        raise
    except (OSError, RuntimeError, MemoryError) as error:
        if not (sentence := shortage(error)):
            raise
        raise UsageError(sentence) from error


def _init(
    rank: int | None,
    size: int | None,
    store: str | None,
    init_method: str | None,
    world_size: int | None,
    process_sets: Iterable[ProcessSet | Sequence[int]] | str | None,
    overrides: Mapping[str, object],
) -> None:
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise UsageError(f'process_sets must be a list of process sets, or "dynamic", not {process_sets!r}')
    has_joined = comm.has_joined()
    sets = () if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    while True:
        began_ns = time.monotonic_ns()
        try:
            comm.init(rank, size, store, init_method=init_method, world_size=world_size, **overrides)
            if not has_joined:
                _start_all_engines(began_ns, sets, overrides)
                _process.asked = [*sets], {**overrides}
            return
        except PeerError as error:
            if isinstance(error, TimeoutError) or not comm.await_next_round(began_ns):
                raise
            _log.info("this process goes on to the next round: %s", error)


def init_again() -> None:
    """Join the world again after `shutdown`, or the first time, with the settings and process sets of the last `init`.

    Does nothing if this process has joined. Process sets with ranks that the world does not have are left out.
    """
    if comm.has_joined():
        return
    sets, overrides = _process.asked
    init(None, None, None, process_sets=None, **overrides)
    _process.asked = sets, overrides
    for each in sets:
        wanted = each if isinstance(each, ProcessSet) else ProcessSet(each)
        if max(wanted.ranks, default=0) < comm.size():
            add_process_set(wanted)
        else:
            _log.warning("this world of %d ranks has no process set of ranks %s", comm.size(), wanted.ranks)


def _start_all_engines(
    began_ns: int, sets: Iterable[ProcessSet | Sequence[int]], overrides: Mapping[str, object]
) -> None:
    wanted = settings.resolve(settings.environment(), **overrides)
    world = comm.world()
    try:
        with world.connecting_by(began_ns + wanted.start_timeout_ns):
            _start_engines(world, wanted, sets)
    except BaseException:
        shutdown()
        raise


def _start_engines(
    world: Communicator, wanted: settings.Settings, sets: Iterable[ProcessSet | Sequence[int]]
) -> None:
    core = core_of(wanted.thread_affinity, world.local_rank, world.local_size)
    _process.timeline = Timeline(world.rank, world.size, world.hosts[world.rank], comm.later_round())
    _process.engine = Engine(world.duplicate(), wanted, core, _process.timeline)
    _process.timeline.start_as_set(wanted)
    _process.sets = ProcessSets(world, _process.engine, wanted, core)
    global_process_set.mark_added(0, list(range(world.size)), world.rank, _process.engine)
    for each in sets:
        add_process_set(each)


def shutdown() -> None:
    """Leave the world. Operations of other ranks that still need this rank raise PeerLostError there.

    Every rank calls it, at any time; it does not wait for the others. Before `init` it does nothing. Raises no error.
    """
    if comm.has_joined():
        announce_departure()
    leaving, _process.engine = _process.engine, None
    sets, _process.sets = _process.sets, None
    global_process_set.mark_removed()
    if sets is not None:
        sets.close()
    if leaving is not None:
        leaving.close()
    timeline, _process.timeline = _process.timeline, None
    if timeline is not None:
        timeline.stop()
    comm.shutdown()


def engine(process_set: ProcessSet | None = None) -> Engine:
    """Return the engine of all ranks, or of a process set.

    Raises NotInitializedError before `init`, UsageError if this process is not in the set.
    """
    if process_set is not None and process_set is not global_process_set:
        if not isinstance(process_set, ProcessSet):
            raise UsageError(f"process_set must be a ProcessSet, not {process_set!r}")
        return process_set.engine()
    if _process.engine is None:
        comm.world()  # raises, with the reason
        raise NotInitializedError("Ronde is being initialized or shut down by another thread")
    return _process.engine


def submit(
    kind: Kind,
    x: ResultT,
    *,
    name: str | None = None,
    op: ReduceOp = Sum,
    root: int = -1,
    prescale: float = 1.0,
    postscale: float = 1.0,
    splits: Sequence[int] | None = None,
    out: Any = None,
    waits: bool = False,
    device: str = "cpu",
    process_set: ProcessSet | None = None,
) -> Handle[ResultT]:
    """Submit a tensor (see Engine.submit). `root` is a rank of the world."""
    members = engine(process_set)
    if root >= 0:
        root = place_of_root(root, process_set)
    return members.submit(kind, x, name, op, prescale, postscale, out, waits, root, splits, device)


def place_of_root(root: int, process_set: ProcessSet | None) -> int:
    """Return the place of a rank of the world in the process set. Raises UsageError if it is not in the set."""
    if process_set is None or process_set is global_process_set:
        return root
    return process_set.place_of(root)


def join() -> int:
    """Wait, without data, until all ranks have called `join`; return the last rank that called it, on all ranks.

    Until then this rank contributes neutral values to the operations of the other ranks, so that they need not wait:
    zero to a sum or average (the setting `join_average` chooses the divisor), the largest value to Min, the lowest to
    Max, one to Product, no rows to an all-gather. An all-to-all raises MismatchError on all ranks, and so does a
    broadcast whose root has joined. Operations that this rank submitted before run as usual.

    Raises:
        UsageError: another thread has called it.
        PeerLostError: a rank died, left or cannot be reached.
        NotInitializedError: before `ronde.init()`.
    """
    return engine().join()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set of some ranks of the world, and return it.

        even = ronde.add_process_set([0, 2])

    All ranks of the world call it, also ranks outside the set, in the same order as other changes of process sets.

    Args:
        process_set: a `ProcessSet`, or a list of ranks of the world.

    Raises:
        MismatchError: ranks name different ranks; raised on all ranks.
        UsageError: a rank does not exist, or there is such a set already.
        NotInitializedError: before `ronde.init()`.
    """
    engine()
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _sets().add(wanted)
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, and return whether it existed.

    All ranks of the world call it, when no rank uses the set any more.

    Args:
        process_set: returned by `add_process_set`, or added by `init`.

    Raises:
        MismatchError: ranks name different sets; raised on all ranks.
        UsageError: it is the set of all ranks.
        NotInitializedError: before `ronde.init()`.
    """
    engine()
    return _sets().remove(process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return a dict from the id of each process set to its ranks. Id 0 is the set of all ranks.

    Raises NotInitializedError before `init`.
    """
    engine()
    return _sets().ids_and_ranks()


def _sets() -> ProcessSets:
    if _process.sets is None:
        raise NotInitializedError("Ronde is being initialized or shut down by another thread")
    return _process.sets


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start to record this rank's timeline (docs/timeline.md). The other ranks need not take part.

    Args:
        file_path: a directory, which gets `rank-N.json`; a file, to whose name the rank is added if there are several
            (`run.json`: `run-0.json`); or a path with `{rank}`. An existing file is replaced.
        mark_cycles: whether to mark each negotiation round (default: False).

    Raises:
        UsageError: a timeline is being recorded already.
        OSError: the file cannot be created.
        NotInitializedError: before `ronde.init()`.
    """
    engine().timeline.start(file_path, mark_cycles)


def note_in_timeline(track: str, text: str, facts: dict[str, object]) -> None:
    """Note an event at this moment, if this rank records a timeline (see `Timeline.note`)."""
    timeline = _process.timeline
    if timeline is not None:
        timeline.note(track, text, facts)


def stop_timeline() -> None:
    """Complete this rank's timeline, if one is being recorded; `shutdown` does this, too.

    Raises NotInitializedError before `init`.
    """
    engine().timeline.stop()


def _forget() -> None:
    global_process_set.mark_removed()
    if _process.sets is not None:
        _process.sets.abandon()
        _process.sets = None
    if _process.timeline is not None:
        _process.timeline.native.abandon()
        _process.timeline = None
    if _process.engine is not None:
        _process.engine.abandon()
        _process.inherited, _process.engine = _process.engine, None


os.register_at_fork(after_in_child=_forget)
atexit.register(shutdown)
