"""Measures how late each rank submits its tensors, for `ronde.stragglers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ronde import _native
from ronde.errors import TimeoutError

__all__ = ["Arrivals", "survey_arrivals"]

_SURVEY_NS = 5 * 10**9  # ample: answers take milliseconds


class Arrivals(NamedTuple):
    """How a rank's tensors arrived, of those that needed no negotiation.

    `tensors`: how many were executed; `last`: of how many it was the last rank of its host; `late_s`: how many seconds
    later than the rank that is earliest on average it submitted a tensor, on average.
    """

    rank: int
    host: str
    tensors: int
    last: int
    late_s: float


def survey_arrivals(stalls: _native.Stalls, names: Sequence[int], hosts: Sequence[str]) -> list[Arrivals]:
    """Return how the tensors of each rank have arrived so far. Raises TimeoutError if a rank does not answer.

    `names`: by rank, its number in messages; `hosts`: by rank.
    """
    answers = stalls.survey(_SURVEY_NS)
    missing = tuple(rank for rank, answer in zip(names, answers) if answer is None)
    if missing:
        raise TimeoutError(f"ranks {missing} do not answer", "stragglers", _SURVEY_NS, missing)
    known = [answer for answer in answers if answer is not None]
    waited_s = [waited_ns / max(tensors, 1) / 1e9 for tensors, _, waited_ns in known]
    return [
        Arrivals(name, host, tensors, last, max(waited_s) - own_s)
        for name, host, (tensors, last, _), own_s in zip(names, hosts, known, waited_s)
    ]
