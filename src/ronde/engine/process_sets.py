"""Process sets: some ranks of the world that run operations among themselves, besides those of all ranks.

Every set has a separate engine (coordinator, cache, communicator, thread), so sets do not wait for each other. All
ranks of the world add and remove sets together, in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from ronde.comm.byte_exchange import framed, require_equal, unframed
from ronde.comm.communicator import Communicator
from ronde.engine.engine import Engine
from ronde.errors import NotInitializedError, UsageError
from ronde.settings import Settings
from ronde.types import Allgather

__all__ = ["ProcessSet", "ProcessSets"]


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
