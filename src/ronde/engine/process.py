"""The engine of this process, and its process sets: begins with `init`, ends with `shutdown`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ronde import settings
from ronde._native import Handle
from ronde.comm import world as comm
from ronde.comm.affinity import core_of
from ronde.engine.engine import Engine
from ronde.engine.process_sets import ProcessSet, ProcessSets
from ronde.engine.timeline import Timeline
from ronde.errors import NotInitializedError, RondeError, UsageError
from ronde.net.shortages import shortage
from ronde.types import Kind, ReduceOp, Sum

__all__ = [
    "add_process_set",
    "engine",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "init",
    "join",
    "prepare",
    "remove_process_set",
    "shutdown",
    "start_timeline",
    "stop_timeline",
    "submit",
]

global_process_set = ProcessSet([])  # of all ranks; it knows them after `init`


class _Process:
    """What this process has; one instance, below."""

    engine: Engine | None = None
    sets: ProcessSets | None = None
    timeline: Timeline | None = None
    parents: Engine | None = None  # of a forked child: kept, but never to be touched


_process = _Process()


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
    """Join the world; returns when all ranks have joined. All ranks call it; a second call does nothing.

    Without arguments, the launcher's environment says who this process is; without a launcher it is alone, of size 1.
    `rank`, `size` (or `world_size`): instead of a launcher. `store`: where the ranks meet then, `tcp:host:port` or
    `unix:@name`, which rank 0 serves, or `file:/path`. `init_method`: the same in the words of torch.distributed,
    `env://`, `tcp://host:port` or `file:///path`. `process_sets`: added at once (see `add_process_set`); the word
    "dynamic" stands for none, as more can be added at any time. `overrides`: settings by name (docs/settings.md),
    before `RONDE_*` variables. Raises UsageError for nonsense and contradictions, and for what the machine lacks,
    TimeoutError that names the ranks that did not come, AuthenticationError.
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
    if comm.has_joined():
        return
    comm.init(rank, size, store, init_method=init_method, world_size=world_size, **overrides)
    wanted = settings.resolve(settings.environment(), **overrides)
    world = comm.world()
    try:
        core = core_of(wanted.thread_affinity, world.local_rank, world.local_size)
        _process.timeline = Timeline(world.rank, world.size, world.hosts[world.rank])
        _process.engine = Engine(world.duplicate(), wanted, core, _process.timeline)
        _process.timeline.start_as_set(wanted)
        _process.sets = ProcessSets(world, _process.engine, wanted, core)
        global_process_set.begin(0, list(range(world.size)), world.rank, _process.engine)
        for each in () if process_sets is None or isinstance(process_sets, str) else process_sets:
            add_process_set(each)
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leave the world; what other ranks have submitted and this one has not, fails. Does nothing before `init`."""
    leaving, _process.engine = _process.engine, None
    sets, _process.sets = _process.sets, None
    global_process_set.end()
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
        comm.world()  # raises, and says why
        raise NotInitializedError("Ronde is being initialized or shut down by another thread")
    return _process.engine


def submit(
    kind: Kind,
    x: Any,
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
) -> Handle:
    """Submit a tensor (see Engine.submit). `root` is a rank of the world."""
    members = engine(process_set)
    if root >= 0 and process_set is not None and process_set is not global_process_set:
        root = process_set.place_of(root)
    return members.submit(kind, x, name, op, root, prescale, postscale, splits, out, waits, device)


def prepare(
    x: Any, name: str, op: ReduceOp = Sum, prescale: float = 1.0, postscale: float = 1.0
) -> Callable[[bool], Handle]:
    """Prepare an all-reduce in place that is going to be repeated (see Engine.prepare)."""
    return engine().prepare(x, name, op, prescale, postscale)


def join() -> int:
    """Say that this rank has run out of data; return the rank that was the last to say so, once all have.

    Meanwhile this rank contributes to what the others submit, so that nobody waits for it: zero to a sum or average
    (which is divided by the number of all ranks, or as the setting `join_average` says), the largest value to Min, the
    lowest to Max, one to Product, no rows to an all-gather. An all-to-all fails on all ranks, and so does a broadcast
    whose root has joined. What this rank has submitted before is done as usual. Raises UsageError if another thread has
    called it, PeerLostError if a rank is gone.
    """
    return engine().join()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set of these ranks of the world, and return it. All ranks call it, in the same place.

    Raises on all ranks MismatchError if they name different ranks, UsageError for ranks that do not exist or a set that
    does.
    """
    engine()
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _sets().add(wanted)
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return False if it is not there. All ranks call it, when no one uses it any more."""
    engine()
    return _sets().remove(process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of each process set by its id; 0 is that of all ranks."""
    engine()
    return _sets().ids_and_ranks()


def _sets() -> ProcessSets:
    if _process.sets is None:
        raise NotInitializedError("Ronde is being initialized or shut down by another thread")
    return _process.sets


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to record this rank's timeline; the other ranks need not take part. docs/timeline.md tells what is in it.

    `file_path`: of the file, which is replaced if there is one. With several ranks each writes its own: `{rank}` stands
    for the rank, a directory gets a file `rank-N.json` for each, and otherwise the rank goes before the suffix
    (`run-0.json`). `mark_cycles`: a tick for every decision of what runs next. Raises UsageError if a timeline is being
    recorded already, OSError if the file cannot be made, NotInitializedError before `init`.
    """
    engine().timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline that is being recorded, if there is one. `shutdown` does it, too."""
    engine().timeline.stop()


def _forget() -> None:
    global_process_set.end()
    if _process.sets is not None:
        _process.sets.abandon()
        _process.sets = None
    if _process.timeline is not None:
        _process.timeline.native.abandon()
        _process.timeline = None
    if _process.engine is not None:
        _process.engine.abandon()
        _process.parents, _process.engine = _process.engine, None


os.register_at_fork(after_in_child=_forget)
atexit.register(shutdown)
