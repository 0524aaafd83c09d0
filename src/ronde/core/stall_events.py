"""What the inspection of stalls speaks of: what is pending, what other ranks say, what is to be done. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "Abort",
    "Answer",
    "AskRanks",
    "Asked",
    "AskAbout",
    "AskForStacks",
    "Blocked",
    "Effect",
    "Event",
    "Pending",
    "Report",
    "Stacks",
    "Stall",
    "Tensor",
    "StalledTensor",
]


class Tensor(NamedTuple):
    """Submitted by this rank and pending. `id` stands for the name; `is_running`: all ranks have submitted it.

    `is_awaited`: a thread of this rank sleeps until it is through.
    """

    id: int
    name: str
    kind: str
    since_ns: int
    is_running: bool = False
    is_awaited: bool = False


class Pending(NamedTuple):
    """What this rank waits for: tensors that are old or known to the inspector, and when the next oldest came."""

    tensors: Sequence[Tensor] = ()
    next_ns: int = -1


class Blocked(NamedTuple):
    """What a process sleeps in, the longest of all: `id` on a communicator, since a time of its host's clock."""

    where: int
    id: int
    since_ns: int


# Events


@dataclass(frozen=True, slots=True)
class Asked:
    """Another rank asks about these tensors."""

    rank: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank, or this one itself, says what it has begun of what was asked about, in the same order.

    `calls`: collective calls and rounds of negotiation that its engine's thread has come to. `is_in_round`: it is in a
    round of negotiation, or should be. `state`: how far it is and what it waits for, in words. `blocked`: the same for
    machines, if it waits.
    """

    rank: int
    inquiry: int
    calls: int
    is_in_round: bool
    has: tuple[bool, ...]
    state: str = ""
    blocked: Blocked | None = None

    @property
    def progress(self) -> tuple[int, bool]:
        """Which grows as the engine goes on."""
        return self.calls, not self.is_in_round


@dataclass(frozen=True, slots=True)
class Stacks:
    """A rank's stacks have arrived."""

    rank: int
    inquiry: int
    text: str


Event = Asked | Answer | Stacks


# Effects


@dataclass(frozen=True, slots=True)
class AskRanks:
    """Ask all ranks, this one too, about these tensors. `is_suspicion`: nobody is to leave a report to this rank."""

    inquiry: int
    ids: tuple[int, ...]
    is_suspicion: bool = False


@dataclass(frozen=True, slots=True)
class AskAbout:
    """Ask all ranks, this one too, whether they have begun what processes sleep in."""

    inquiry: int
    blocked: tuple[Blocked, ...]


@dataclass(frozen=True, slots=True)
class AskForStacks:
    """Ask this rank where its threads are."""

    inquiry: int
    rank: int


class StalledTensor(NamedTuple):
    """A stalled tensor; of ranks that have answered, those that have submitted it and those that have not."""

    tensor: Tensor
    submitted: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stall:
    """What is to be told.

    `age_ns`: of the oldest tensor. `behind`, `silent`: ranks. `circle`: ranks, this one first, that wait each for the
    next one and the last for this one. `states`: of culprits, by rank; `stacks`: by rank. `next_ns`: at which age the
    next report follows; 0: at none.
    """

    age_ns: int
    tensors: tuple[StalledTensor, ...]
    behind: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    circle: tuple[int, ...] = ()
    states: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    next_ns: int = 0

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that hold things up and answer; those on the circle first."""
        missing = {rank for waiting in self.tensors for rank in waiting.missing}
        others = self.circle[1:]
        return (*others, *sorted((missing | set(self.behind)) - set(others)))

    def renamed(self, names: Sequence[int]) -> Stall:
        """Return the same with ranks as they are called in messages: names[rank]."""

        def of(ranks: Iterable[int]) -> tuple[int, ...]:
            return tuple(names[rank] for rank in ranks)

        tensors = tuple(
            StalledTensor(each.tensor, of(each.submitted), of(each.missing)) for each in self.tensors
        )
        states, stacks = (
            {names[rank]: text for rank, text in texts.items()} for texts in (self.states, self.stacks)
        )
        ranks = of(self.behind), of(self.silent), of(self.circle)
        return Stall(self.age_ns, tensors, *ranks, states, stacks, self.next_ns)


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the user."""

    stall: Stall


@dataclass(frozen=True, slots=True)
class Abort:
    """Fail the world: it has stalled longer than the user allows."""

    stall: Stall


Effect = AskRanks | AskAbout | AskForStacks | Report | Abort
