"""The order in which all ranks come to the outcomes of what they have submitted, and whether each is right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.sim.workload import Operation, Workload

from ronde.engine.messages import Run, Tune


class Broken(AssertionError):
    """Something that must always hold did not."""


def require(holds: bool, *what: object) -> None:
    if not holds:
        raise Broken(" ".join(str(each)[:1000] for each in what))


@dataclass(slots=True)
class Outcome:
    """What became of one occurrence of a name, at its place in the common order."""

    index: int
    occurrence: int
    response: Run | str  # or why it failed
    ranks: int = 0  # how many came to it
    value: int = 0


class CommonOrder:
    """The first rank that comes to a place says what is there, and it must be right; the others must find the same."""

    def __init__(self, workload: Workload, counts: Counter[str]) -> None:
        self._workload = workload
        self._counts = counts
        self._outcomes: list[Outcome] = []
        self._tunings: list[tuple[int, Tune]] = []  # and after how many outcomes

    def __len__(self) -> int:
        return len(self._outcomes)

    def come_to(self, place: int, index: int, occurrence: int, response: Run | str) -> Outcome:
        """A rank that has come to `place` outcomes comes to the next one."""
        if place == len(self._outcomes):
            absent = self._workload.absent(occurrence)
            self._check(self._workload.operations[index][occurrence], absent, response)
            self._outcomes.append(Outcome(index, occurrence, response))
        outcome = self._outcomes[place]
        require(
            (outcome.index, outcome.occurrence) == (index, occurrence)
            and (outcome.response is response or outcome.response == response),
            *("at place", place, "others came to", outcome, "and not to", (index, occurrence, response)),
        )
        outcome.ranks += 1
        return outcome

    def tune(self, number: int, place: int, values: Tune) -> None:
        """A rank that has come to `place` outcomes takes over values, for the `number`-th time."""
        if number == len(self._tunings):
            self._counts["tuned"] += 1
            self._tunings.append((place, values))
        there = self._tunings[number]
        require(there == (place, values), "others tuned", there, "and not", (place, values))

    def _check(self, operation: Operation, absent: tuple[int, ...], response: Run | str) -> None:
        culprits = operation.culprits(absent)
        if isinstance(response, str):
            self._counts["mismatches"] += 1
            require(bool(culprits), "nothing was wrong with", operation, "but", response)
            require(all(text in response for text in culprits), "unclear:", response, operation, absent)
            return
        self._counts["executed"] += 1
        self._counts["groups executed"] += bool(response.request.more)
        self._counts["executed without all"] += bool(absent)
        require(not culprits, "executed in spite of the mistake:", operation)
        request, rows = operation.response(absent)
        require(response.request == request, response, "is the response for", operation)
        require(response.rows == rows, response, "has not the rows", rows, "of", operation)

    def check_contains(self, due: list[tuple[int, int]]) -> None:
        """These occurrences of names have an outcome."""
        lost = set(due) - {(outcome.index, outcome.occurrence) for outcome in self._outcomes}
        require(not lost, "all had submitted", lost, "before one left, and it did not run")

    def check_end(self) -> None:
        """Nothing was done twice, and what all ranks have taken part in has the right value."""
        done = [(outcome.index, outcome.occurrence) for outcome in self._outcomes]
        require(len(set(done)) == len(done), "something was decided twice:", done)
        for outcome in self._outcomes:
            if outcome.ranks == self._workload.ranks and isinstance(outcome.response, Run):
                right = self._workload.value(outcome.index, outcome.occurrence)
                require(outcome.value == right, outcome, "should be", right)
