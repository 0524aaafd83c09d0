"""How long a step may take before its rank counts as stuck: learnt from the steps so far. Pure.

The limit is the largest of

  - a multiple of what most of the last steps took, so that it follows the program,
  - twice the longest step so far, because some steps do more than others (an evaluation, a snapshot),
  - a fixed time, so that short steps are not judged by their noise.

There is no limit before enough steps have been seen. A step during which the members of the job change does not count,
and neither does the first one after it, in which a program may compile and fill its caches.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from ronde.errors import UsageError

__all__ = ["StepRule", "StepTimes"]

_WINDOW = 200  # steps


@dataclass(frozen=True)
class StepRule:
    """How the limit is learnt.

    Args:
        factor: how many times as long as most steps one may take (10).
        least_ns: the shortest limit, in nanoseconds (30 s).
        quantile: the share of the last 200 steps that counts as most (0.9).
        num_steps: the number of steps before there is a limit (10).

    Raises:
        UsageError: a number is out of range.
    """

    factor: float = 10.0
    least_ns: int = 30 * 10**9
    quantile: float = 0.9
    num_steps: int = 10

    def __post_init__(self) -> None:
        if self.factor < 1 or self.least_ns < 0 or not 0 < self.quantile <= 1 or self.num_steps < 1:
            raise UsageError(
                f"{self} is invalid: expected a factor from 1, a time from 0, a quantile above 0 and up to 1, and a "
                "number of steps from 1"
            )


class StepTimes:
    """The times of the steps so far."""

    def __init__(self, rule: StepRule) -> None:
        self._rule = rule
        self._last: deque[int] = deque(maxlen=_WINDOW)
        self._num_seen = 0
        self.longest_ns = 0
        self._skips_next = True

    def add(self, took_ns: int) -> None:
        """Note that a step has ended, which took so long."""
        if self._skips_next:
            self._skips_next = False
            return
        self._last.append(took_ns)
        self._num_seen += 1
        self.longest_ns = max(self.longest_ns, took_ns)

    def interrupt(self) -> None:
        """Note that the members of the job change."""
        self._skips_next = True

    @property
    def limit_ns(self) -> int | None:
        """How long the present step may take; None: there is no limit yet."""
        if self._num_seen < self._rule.num_steps or self._skips_next:
            return None
        ordered = sorted(self._last)
        usual_ns = ordered[math.ceil(self._rule.quantile * len(ordered)) - 1]
        return max(round(self._rule.factor * usual_ns), 2 * self.longest_ns, self._rule.least_ns)
