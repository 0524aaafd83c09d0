"""The parameters and errors that the methods of `Communicator` share, for `help`."""

from __future__ import annotations

from ronde.help_texts import complete_help

__all__ = ["complete_help_of_communicator"]

_IN_ORDER = (
    "allgather", "allreduce", "alltoall", "barrier", "broadcast", "duplicate", "empty", "gather", "group", "reduce",
    "reducescatter", "scatter", "split",
)  # fmt: skip
_MESSAGES = ("recv", "send")

_PARAMETERS = {
    "x": "a NumPy array or a PyTorch tensor on the CPU; the result is of the same kind. A number, or anything else with"
    " DLPack or the buffer protocol, gives a NumPy array. Any dtype of float16, bfloat16, float32, float64, int8 to"
    " int64, uint8 to uint64, bool, complex64, complex128; the same shape on all ranks"
    " (allgather, gather, alltoall: except for the first axis).",
    "op": "the reduction: ronde.Sum, Average, Min, Max, Product, BitAnd, BitOr, BitXor, or Adasum in `allreduce`"
    " (default: Sum; `ronde.allreduce` and `ronde.torch.allreduce` average by default).",
    "out": "an array of the result's shape and dtype that receives the result (None: a new array).",
    "root": "the rank that gives or gets the whole array (default: 0).",
    "splits": "the number of rows for each rank, which add up to `len(x)` (None: the same number for all).",
    "dest": "the receiving rank, not this one.",
    "source": "the sending rank, not this one.",
    "tag": "a number from 0 to 2**31 - 1, the same in `send` and `recv` (default: 0).",
    "color": "a whole number >= 0, or None for a rank that takes part in no new communicator.",
    "key": "the order of the ranks in the new communicator (default: 0, the order of this one).",
    "ranks": "different ranks of this communicator: the same list on all ranks or, with `disjoint`, on all members.",
    "disjoint": "whether each rank lists the group that it belongs to (default: False).",
    "shape": "a length, or lengths of all axes, the same on all ranks.",
    "dtype": "any NumPy dtype (default: float32).",
}
_ERRORS = {
    "UsageError": "an argument is invalid. Nothing was sent, unless the error says that the other ranks have their"
    " results (an `out` of the wrong shape in allgather, gather, scatter or alltoall). The next call works.",
    "MismatchError": "the ranks made different calls; the error quotes both.",
    "PeerLostError": "a rank died, left or cannot be reached. It is final for this communicator.",
    "AbortedError": "a rank called `abort`.",
    "TimeoutError": "other ranks are missing for longer than the setting `timeout_ns` (default: no limit).",
}


def complete_help_of_communicator(communicator: type) -> None:
    """Complete the docstrings of the class's methods."""
    in_order = [getattr(communicator, name) for name in _IN_ORDER]
    complete_help(
        in_order, _PARAMETERS, _ERRORS, "All ranks call it, in the same order as their other calls."
    )
    messages = [getattr(communicator, name) for name in _MESSAGES]
    complete_help(
        messages, _PARAMETERS, _ERRORS, "Only the two ranks call it, in the same order as their other calls."
    )
