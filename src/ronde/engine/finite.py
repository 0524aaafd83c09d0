"""Finds the first NaN or infinity in the tensors that this rank submits, before a reduction spreads it to all ranks."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from ronde._native import Handle
from ronde.comm.arrays import Operand
from ronde.comm.communicator import Communicator
from ronde.engine.submission import Submission
from ronde.errors import AbortedError
from ronde.types import Broadcast, DType

__all__ = ["FiniteCheck", "Submit", "first_not_finite"]

_log = logging.getLogger("ronde.engine")

Submit = Callable[..., Handle]  # Negotiator.submit

_FLOATS = range(DType.float16, DType.complex128 + 1)
# A NaN or infinity, and no other number, has all bits of the exponent set. NumPy's isfinite is slow for float16 and
# does not support bfloat16.
_EXPONENTS = {DType.float16: 0x7C00, DType.bfloat16: 0x7F80}
_BLOCK = 2**15  # elements: a block and its result fit into the processor's cache
_MOST_NAMES = 2**16  # bounds the memory of a program that never repeats a name


class FiniteCheck:
    """Checks the floating point and complex numbers that a rank submits; tensors in device memory pass unchecked.

    It logs the first finding, or aborts the world with it: then every rank raises AbortedError with the same text.
    """

    def __init__(self, comm: Communicator, rank: int, raises: bool) -> None:
        """`rank`: this rank's number in messages. `raises`: a finding aborts the world; otherwise it is logged."""
        self._comm = comm
        self._rank, self._host = rank, comm.hosts[comm.rank]
        self._raises = raises
        self._calls: Counter[str] = Counter()
        self._has_warned = False

    def before(self, submit: Submit) -> Submit:
        """Return `submit`, preceded by the check."""

        def checked(submission: Submission, *more: Any, **terms: Any) -> Handle:
            self.check(submission)
            return submit(submission, *more, **terms)

        return checked

    def check(self, submission: Submission) -> None:
        """Raise AbortedError, or log a warning, if a number is not finite."""
        if self._has_warned:
            return
        terms, name = submission.terms, submission.name
        if terms.kind is Broadcast and terms.root != self._comm.rank:
            return  # the root's values replace them
        if len(self._calls) >= _MOST_NAMES:
            self._calls.clear()
        self._calls[name] += 1
        for number, given in enumerate(submission.given):
            index = first_not_finite(given)
            if index >= 0:
                which = f"array {number} of the group '{name}'" if submission.is_group else f"tensor '{name}'"
                self._report(which, given, index, self._calls[name])
                return

    def _report(self, which: str, given: Operand, index: int, call: int) -> None:
        self._has_warned = not self._raises
        value = "NaN or infinity" if given.dtype is DType.bfloat16 else _flat(given)[index]
        place = [int(axis) for axis in np.unravel_index(index, given.shape)] if given.shape else []
        text = (
            f"{which} has {value} at {place} on rank {self._rank} on {self._host}, submitted for the "
            f"{_ordinal(call)} time (RONDE_CHECK_FINITE): look at what this rank computed before"
        )
        if not self._raises:
            _log.warning("%s; later findings are not reported", text)
            return
        self._comm.abort(text)
        raise AbortedError(text, self._rank, self._host)


def first_not_finite(given: Operand) -> int:
    """Return the index of the first NaN or infinity in the flattened array, or -1."""
    if given.dtype not in _FLOATS or not getattr(given.memory, "is_cpu", True):
        return -1
    numbers, exponent = _flat(given), _EXPONENTS.get(given.dtype)
    if exponent is not None:
        numbers = numbers.view(np.uint16)
    for begin in range(0, numbers.size, _BLOCK):
        block = numbers[begin : begin + _BLOCK]
        is_finite = np.isfinite(block) if exponent is None else (block & exponent) != exponent
        if not is_finite.all():
            return begin + int(is_finite.argmin())
    return -1


def _flat(given: Operand) -> Any:
    """Return the numbers as a NumPy array of one axis, bfloat16 as their bits."""
    flat = given.memory.reshape(-1)
    if isinstance(flat, np.ndarray):
        return flat
    if given.dtype is DType.bfloat16:
        flat = flat.view(sys.modules["torch"].int16)
    return flat.numpy()


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number // 10 % 10 == 1 else ends.get(number % 10, 'th')}"
