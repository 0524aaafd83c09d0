"""The vocabulary of `stall.inspector`: what is pending, what other ranks answer, what the shell does. Pure."""

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
    """A tensor or call that this rank has submitted and that is pending. `id` stands for the name.

    `is_running`: all ranks have submitted it. `is_awaited`: a thread of this rank sleeps until it is done.
    """

    id: int
    name: str
    kind: str
    since_ns: int
    is_running: bool = False
    is_awaited: bool = False


class Pending(NamedTuple):
    """What this rank waits for: tensors that are old or known to the inspector.

    `next_ns`: when the oldest of the other tensors was submitted; -1 if there are none.
    """

    tensors: Sequence[Tensor] = ()
    next_ns: int = -1


class Blocked(NamedTuple):
    """The longest wait of a process: for the operation `id` on the communicator `where`, by its host's clock."""

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
    """The answer of a rank, perhaps this one, to a question about tensors. `has`: whether it has begun each of them.

    `calls`: the collective calls and negotiation rounds that its engine's thread has reached. `is_in_round`: it is in
    a negotiation round, or should be. `state`: its progress and what it waits for, in words. `blocked`: its longest
    wait, if it waits.
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
        """A value that grows while the engine makes progress."""
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
    """Ask all ranks, including this one, about these tensors.

    `is_suspicion`: the question announces no report, so other ranks do not leave theirs to this rank.
    """

    inquiry: int
    ids: tuple[int, ...]
    is_suspicion: bool = False


@dataclass(frozen=True, slots=True)
class AskAbout:
    """Ask all ranks, including this one, whether they have begun the operations that other processes wait for."""

    inquiry: int
    blocked: tuple[Blocked, ...]


@dataclass(frozen=True, slots=True)
class AskForStacks:
    """Ask a rank for the stacks of its threads."""

    inquiry: int
    rank: int


class StalledTensor(NamedTuple):
    """A stalled tensor, and of the ranks that have answered those that have submitted it and those that have not."""

    tensor: Tensor
    submitted: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stall:
    """The facts of a report.

    `age_ns`: of the oldest tensor. `behind`: ranks whose engine is behind the others'. `silent`: ranks that do not
    answer. `circle`: ranks of which each waits for the next one, and the last for the first, this rank. `states`: of
    culprits, by rank; `stacks`: by rank. `next_ns`: the age at which the next report follows; 0: never.
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
        """The ranks that delay the others and answer; those on the circle first."""
        missing = {rank for waiting in self.tensors for rank in waiting.missing}
        others = self.circle[1:]
        return (*others, *sorted((missing | set(self.behind)) - set(others)))

    def renamed(self, names: Sequence[int]) -> Stall:
        """Return the same with the numbers of ranks in messages: names[rank]."""

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
    """Log the warning."""

    stall: Stall


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort the communicator: an operation has waited longer than the user allows."""

    stall: Stall


Effect = AskRanks | AskAbout | AskForStacks | Report | Abort
