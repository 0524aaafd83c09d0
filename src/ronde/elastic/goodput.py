"""Counts what became of the time of a process: which steps counted, and what losses have cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Goodput", "Ledger"]


@dataclass(frozen=True)
class Goodput:
    """Counters of this process since it entered `ronde.elastic.run`, over all trainings that follow one another.

    The time between two trainings does not count.

    Attributes:
        commits: Commits, without those of a state that has just been synchronized.
        steps: Batches of `State.batches` that commits have made final.
        steps_lost: Batches that were taken back by losses.
        recoveries: How many times a lost rank has interrupted the training.
        changes: How many times the world has changed at a commit, without a loss.
        total_ns: The time, in nanoseconds.
        counted_ns: The part of it in steps that counted, until their commit.
        lost_ns: The part in steps that were taken back.
        recovering_ns: The part between the notice of a loss or change and the next step.
    """

    commits: int = 0
    steps: int = 0
    steps_lost: int = 0
    recoveries: int = 0
    changes: int = 0
    total_ns: int = 0
    counted_ns: int = 0
    lost_ns: int = 0
    recovering_ns: int = 0

    @property
    def share(self) -> float:
        """The share of time in steps that counted, from 0 to 1."""
        return self.counted_ns / self.total_ns if self.total_ns else 1.0


class Ledger:
    """Keeps the counters. `now_ns`: of one clock that never goes back, in every method."""

    def __init__(self, now_ns: int) -> None:
        self._began_ns = self._since_ns = now_ns  # of the work that is not final
        self._is_training = False
        self._open_steps = 0
        self._commits = self._steps = self._steps_lost = self._recoveries = self._changes = 0
        self._counted_ns = self._lost_ns = self._recovering_ns = 0

    def begin_step(self) -> None:
        """Count a batch, which the next commit makes final."""
        self._open_steps += 1

    def commit(self, now_ns: int) -> None:
        """Make the work since the last commit final."""
        self._commits += 1
        self._steps += self._open_steps
        self._counted_ns += now_ns - self._since_ns
        self._open_steps, self._since_ns = 0, now_ns

    def lose(self, now_ns: int, keeps_work: bool = False) -> tuple[int, int]:
        """End the work since the last commit by a loss; return the steps and nanoseconds that it has cost.

        `keeps_work`: the survivors stood at a commit, which becomes final.
        """
        if keeps_work:
            self.commit(now_ns)
            return 0, 0
        steps, lost_ns = self._open_steps, now_ns - self._since_ns
        self._steps_lost += steps
        self._lost_ns += lost_ns
        self._open_steps, self._since_ns = 0, now_ns
        return steps, lost_ns

    def resume(self, now_ns: int, was_lost: bool) -> int:
        """End the recovery, or the change, that has taken the time since the last call; return the nanoseconds."""
        spent_ns, self._since_ns = now_ns - self._since_ns, now_ns
        self._recovering_ns += spent_ns
        self._recoveries += was_lost
        self._changes += not was_lost
        return spent_ns

    def begin(self, now_ns: int) -> None:
        """Begin the first step of a training: the time since the last one, or without one, does not count."""
        self._began_ns += now_ns - self._since_ns
        self._open_steps, self._since_ns, self._is_training = 0, now_ns, True

    def end(self, now_ns: int) -> None:
        """End a training, whose work is final: the time from now on does not count."""
        self.commit(now_ns)
        self._is_training = False

    def read(self, now_ns: int) -> Goodput:
        """Return the counters."""
        until_ns = now_ns if self._is_training else self._since_ns
        return Goodput(
            *(self._commits, self._steps, self._steps_lost, self._recoveries, self._changes),
            *(until_ns - self._began_ns, self._counted_ns, self._lost_ns, self._recovering_ns),
        )
