"""The length of a step in a direction: decisions of a line search that tries few lengths.

1. The optimizer tries one length first, with the gradient, because it is nearly always right. `judge` compares both
   ends of the move.
2. If it is wrong, the optimizer computes the losses at all of `lengths_to_try` in one pass over the rows, and
   `best_length` takes the least. So a step costs at most one sum more, of a few scalars, and never a loop of sums.

The losses contain the penalties. A change is the derivative at one end along the whole move, so a path that bends where
it leaves an orthant is no special case. The conditions of Wolfe are in Nocedal and Wright, Numerical Optimization
(2006), chapter 3; that for losses that differ by rounding errors, in Hager and Zhang, SIAM J. Optim. 16 (2005).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

__all__ = ["LengthVerdict", "best_length", "judge", "lengths_to_try"]

DECREASE = 1e-4  # part of the expected decrease that a move must reach
FLATTER = 0.9  # part of the slope that may be left at its end
ROUNDING = 4e-15  # relative: losses that differ by less are equal

SHORTER = tuple(2.0**-k for k in (1, 2, 3, 4, 6, 9, 13, 18, 24, 32))
LONGER = tuple(2.0**k for k in (1, 2, 3, 4, 5, 6, 8, 10))


class LengthVerdict(enum.Enum):
    """What to do with a length."""

    ACCEPT = enum.auto()
    TRY_SHORTER = enum.auto()
    TRY_LONGER = enum.auto()


def judge(loss: float, expected_change: float, new_loss: float, further_change: float) -> LengthVerdict:
    """Return whether a move is good.

    Args:
        loss: At the start.
        expected_change: The derivative at the start along the move, below 0.
        new_loss: At the end.
        further_change: The derivative at the end along the move: how the loss would go on.
    """
    is_equal = abs(new_loss - loss) <= ROUNDING * abs(loss)
    if is_equal and abs(further_change) <= FLATTER * -expected_change:
        return LengthVerdict.ACCEPT
    if not new_loss <= loss + DECREASE * expected_change:  # also if it is not a number
        return LengthVerdict.TRY_SHORTER
    return LengthVerdict.TRY_LONGER if further_change < FLATTER * expected_change else LengthVerdict.ACCEPT


def lengths_to_try(verdict: LengthVerdict, length: float) -> list[float]:
    """Return the lengths whose losses decide, after this verdict on a length."""
    return [length * factor for factor in (SHORTER if verdict is LengthVerdict.TRY_SHORTER else LONGER)]


def best_length(lengths: Sequence[float], losses: Sequence[float], limit: float) -> float | None:
    """Return the length with the least loss; None if none is below the limit."""
    loss, length = min(
        (loss if math.isfinite(loss) else math.inf, length) for loss, length in zip(losses, lengths)
    )
    return length if loss < limit else None
