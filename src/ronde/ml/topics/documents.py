"""Documents as rows of counts of words: what the inner loops get, and how counts become integers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from ronde.comqueue import IterationStep

__all__ = ["CountSurvey", "Entries", "check_counts", "entries_of", "survey_counts"]

Array = NDArray[Any]

MOST_UNITS = 1 << 30  # of all documents, so that counts are int32
LARGEST_SCALE = 1 << 20


class Entries(NamedTuple):
    """The entries of documents, in CSR form: document d has those from offsets[d] to offsets[d + 1]."""

    offsets: NDArray[np.int64]
    words: NDArray[np.int32]
    counts: NDArray[np.float64]

    @property
    def num_rows(self) -> int:
        """How many documents there are."""
        return len(self.offsets) - 1

    def rows(self, begin: int, end: int) -> Entries:
        """Return the documents from `begin` to `end`."""
        first, last = self.offsets[begin], self.offsets[end]
        return Entries(self.offsets[begin : end + 1] - first, self.words[first:last], self.counts[first:last])


def entries_of(X: Any) -> Entries:
    """Return the entries of an array or a CSR matrix."""
    rows = csr_array(X) if isinstance(X, np.ndarray) else X
    return Entries(
        rows.indptr.astype(np.int64, copy=False),
        rows.indices.astype(np.int32, copy=False),
        rows.data.astype(np.float64, copy=False),
    )


def check_counts(counts: Array, estimator: str) -> None:
    """Raise ValueError for counts that are negative, infinite or NaN. `estimator`: its name."""
    if len(counts) and not counts.min() >= 0:
        raise ValueError(
            f"Negative values in data passed to {estimator}: X contains counts of words, or weights, from 0"
        )
    if not np.isfinite(counts).all():
        raise ValueError("X contains NaN or infinity: leave such rows out, or replace the values")


class CountSurvey(NamedTuple):
    """What the sampler needs to know of all documents.

    Attributes:
        occurrences: The sum of all counts.
        scale: Units of an occurrence. Counts that are whole numbers have one unit each.
    """

    occurrences: float
    scale: float


def survey_counts(c: IterationStep, estimator: str) -> CountSurvey:
    """Look at the counts of all documents. All tasks call it. Raises ValueError for invalid counts."""

    def survey(block: Any) -> dict[str, Any]:
        counts = entries_of(block.X).counts
        check_counts(counts, estimator)
        return {
            "occurrences": counts.sum(),
            "entries": int(np.count_nonzero(counts)),
            "fractions": int(np.count_nonzero(counts % 1)),
        }

    found = c.sum_blocks(survey)
    occurrences = float(found["occurrences"])
    if occurrences >= MOST_UNITS:
        raise ValueError(
            f"X contains {occurrences:.0f} words, and the sampler counts up to {MOST_UNITS}: divide the counts, or "
            'use learning_method="online"'
        )
    if not found["fractions"]:
        return CountSurvey(occurrences, 1.0)
    scale = float(LARGEST_SCALE)
    if occurrences * scale > MOST_UNITS:
        scale = 2.0 ** math.floor(math.log2(MOST_UNITS / occurrences))
    mean = occurrences / found["entries"]
    if mean * scale < 1:
        raise ValueError(
            f"the counts in X have a mean of {mean:g}, and the sampler counts in units of {1 / scale:g}: multiply "
            'them, for example so that their mean is 1, or use learning_method="online"'
        )
    return CountSurvey(occurrences, scale)
