"""Checks what this rank submits, its arguments and (if set) its numbers, and prepares it for the native engine."""

from __future__ import annotations

import logging
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ronde import _native
from ronde._native import Handle
from ronde.comm.arrays import Operand, Target, late_target, maker_like, operand, overlap, target
from ronde.comm.communicator import Communicator
from ronde.comm.splits import check_has_rows, even_share
from ronde.engine.messages import Request, TensorType
from ronde.errors import AbortedError, UnsupportedError, UsageError
from ronde.types import (
    Adasum,
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    DType,
    Kind,
    ReduceOp,
    Reducescatter,
)

__all__ = [
    "FiniteCheck",
    "RequestTerms",
    "Submission",
    "Submit",
    "address",
    "check_request",
    "check_name",
    "first_not_finite",
    "normal_terms",
    "prepare_submission",
    "repeat_of",
    "result_rows",
    "signature_of",
    "submission_of",
]

_REDUCTIONS = (Allreduce, Reducescatter)


class RequestTerms(NamedTuple):
    """A request without its name."""

    kind: Kind
    dtype: DType
    shape: tuple[int, ...]
    op: ReduceOp
    root: int
    prescale: float
    postscale: float
    splits: tuple[int, ...]
    device: str
    more: tuple[TensorType, ...]

    def request(self, name: str) -> Request:
        kind, dtype, shape, op, root, prescale, postscale, splits, device, more = self
        return Request(kind, name, dtype, shape, op, root, prescale, postscale, device, splits, more)


def signature_of(terms: RequestTerms | Request) -> _native.Signature:
    """Return the terms in the form of the native side."""
    return _native.Signature(
        terms.kind,
        terms.dtype,
        terms.shape,
        terms.op,
        terms.root,
        terms.prescale,
        terms.postscale,
        terms.splits,
        terms.device,
        terms.more,
    )


class Submission(NamedTuple):
    """A tensor in flight, or a group of tensors, or none (a barrier).

    `goals` is None until the sizes of the results are known.
    """

    name: str
    terms: RequestTerms
    given: tuple[Operand, ...]
    out: Any
    goals: tuple[Target[Any], ...] | None
    is_group: bool = False

    def with_goals(self, rows: Sequence[int], rank: int, size: int) -> Submission:
        """Return the same with targets for the results. `rows`: of the response (messages.Run)."""
        if self.goals is not None:
            return self
        if self.terms.kind is Alltoall:
            counts = [sum(result_rows(Alltoall, rows, rank, size))]
        else:
            counts = [sum(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
        goals = [
            late_target(given, (count, *given.row_shape), self.out)
            for given, count in zip(self.given, counts)
        ]
        return self._replace(goals=tuple(goals))

    @property
    def sources(self) -> list[Any]:
        """The memory that the native side reads, by tensor."""
        return [address(given.memory) for given in self.given]

    @property
    def destinations(self) -> list[Any]:
        """The memory that the native side writes, by tensor. Needs goals."""
        return [address(goal.memory) for goal in self.goals or ()]

    @property
    def result(self) -> Any:
        """The user's result before `finish`. Needs goals."""
        if not self.goals:
            return None
        return [goal.result for goal in self.goals] if self.is_group else self.goals[0].result

    @property
    def needs_finish(self) -> bool:
        """Whether `finish` has to copy results, or raise an error."""
        return any(goal.is_copy or goal.refusal is not None for goal in self.goals or ())

    def finish(self) -> Any:
        """Return the user's result, after the native side has written it."""
        results = [goal.finish() for goal in self.goals or ()]
        return results if self.is_group else results[0]


def result_rows(kind: Kind, rows: Sequence[int], rank: int, size: int) -> Sequence[int]:
    """Return the number of rows from each rank in the result of an all-gather or an all-to-all."""
    return rows if kind is Allgather else rows[rank::size]


def prepare_submission(
    name: str,
    terms: RequestTerms,
    given: tuple[Operand, ...],
    out: Any,
    rank: int,
    size: int,
    is_group: bool = False,
) -> Submission:
    """Return the submission, with targets if the sizes of its results are known from the start.

    `out`: the target of the result (None: a new array); of a group, one for each tensor.
    """
    kind = terms.kind
    if kind is Allreduce or kind is Broadcast:
        if not is_group:
            return Submission(name, terms, given, out, (_goal_like(given[0], out),))
        outs = [None] * len(given) if out is None else out
        return Submission(name, terms, given, None, tuple(map(_goal_like, given, outs)), True)
    if kind is Reducescatter:
        goals = [
            target(each, (even_share(each.shape[0], rank, size), *each.row_shape), out) for each in given
        ]
        return Submission(name, terms, given, out, tuple(goals), is_group)
    return Submission(name, terms, given, out, None if given else (), is_group)


def _goal_like(given: Operand, out: Any) -> Target[Any]:
    """Return the target of a result that has the input's shape and dtype. The two most frequent cases come first."""
    memory, source = given.memory, given.source
    if type(source) is np.ndarray:
        if out is None and memory is source:
            result = np.empty(given.shape, memory.dtype)
            return Target(result, result, False)
        if out is memory and memory.flags.writeable:
            return Target(memory, memory, False)
    elif out is source and hasattr(out, "data_ptr") and out.data_ptr() == memory.data_ptr():
        # A contiguous tensor.
        return Target(memory, out, False)
    return target(given, given.shape, out)


def repeat_of(
    cycle: _native.Cycle, submission: Submission, signature: _native.Signature
) -> _native.Repeat | None:
    """Return the native call that submits another tensor like this one under its name; None if there is none."""
    name, terms, given = submission.name, submission.terms, submission.given
    if terms.kind not in (Allreduce, Broadcast) or submission.is_group or terms.device != "cpu":
        return None
    make = maker_like(given[0])
    return None if make is None else _native.Repeat(cycle, name, terms, signature, given[0].source, make)


def submission_of(handle: Handle, rank: int, size: int) -> Submission:
    """Return the submission of a pending handle. A `Repeat` has left only the submission's parts in it."""
    if not isinstance(handle.inputs, Submission):
        name, terms, x, result = handle.inputs
        handle.inputs = prepare_submission(name, terms, (operand(x),), result, rank, size)
    submission: Submission = handle.inputs
    return submission


def normal_terms(
    kind: Kind,
    dtype: DType,
    shape: tuple[int, ...],
    op: ReduceOp,
    root: int,
    prescale: float,
    postscale: float,
    splits: tuple[int, ...],
    device: str,
    more: tuple[TensorType, ...] = (),
) -> RequestTerms:
    """Return the terms with numbers as Python's types, whatever types the user has passed. Raises UsageError."""
    try:
        root, prescale, postscale = operator.index(root), float(prescale), float(postscale)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a root is a whole number, and scale factors are numbers: {error}") from None
    return RequestTerms(kind, dtype, shape, op, root, prescale, postscale, splits, device, more)


def check_name(name: object) -> None:
    """Raise UsageError unless `name` is a valid name for a tensor."""
    if isinstance(name, ReduceOp):
        raise UsageError(
            f"the second argument is the name, not the reduction; write op=ronde.{name.name} (and name=... if you like)"
        )
    if not isinstance(name, str) or (not name.isascii() and _is_broken(name)):
        raise UsageError(f"the name of a tensor must be a string, not {name!r}")


def _is_broken(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return True
    return False


def check_request(terms: RequestTerms, given: Sequence[Operand], out: Any, size: int) -> None:
    """Raise UsageError if the request is invalid on this rank alone."""
    kind = terms.kind
    if kind in _REDUCTIONS and (kind, terms.op) != (Allreduce, Adasum):  # of that the communicator knows
        for dtype in {each.dtype for each in given}:
            check_reduction(dtype, terms.op)
    if kind in _REDUCTIONS and not (math.isfinite(terms.prescale) and math.isfinite(terms.postscale)):
        for each in given:
            if DType.uint8 <= each.dtype <= DType.int64:
                raise UsageError(
                    f"{each.dtype.name} values cannot be multiplied by prescale_factor={terms.prescale} and "
                    f"postscale_factor={terms.postscale}: the factors of integers are finite"
                )
    if kind is Broadcast and not 0 <= terms.root < size:
        raise UsageError(f"root {terms.root} is not one of the ranks 0 to {size - 1}")
    if kind in (Reducescatter, Alltoall):
        for each in given:
            check_has_rows(each.shape, kind.name)
    if kind is Alltoall and out is not None and overlap(given[0].memory, operand(out).memory):
        raise UsageError("alltoall cannot work in place: out must be other memory than x")


def check_reduction(dtype: DType, op: ReduceOp) -> None:
    """Raise UsageError unless the engine supports the reduction for the dtype."""
    if not isinstance(op, ReduceOp):
        raise UsageError(
            f"op must be one of {', '.join(f'ronde.{each.name}' for each in ReduceOp)}, not {op!r}"
        )
    if op is Adasum:
        raise UnsupportedError("Adasum combines whole vectors: only allreduce has it")
    if not _native.is_supported(dtype, op):
        raise UsageError(f"{op.name} is not defined for {dtype.name} values")


def address(memory: Any) -> Any:
    """Return the memory in the form of the native side: the address of a tensor, or the array itself."""
    data_ptr = getattr(memory, "data_ptr", None)
    return memory if data_ptr is None else data_ptr()


_log = logging.getLogger("ronde.engine")

# The setting check_finite: finds the first NaN or infinity, before a reduction spreads it to all ranks

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
