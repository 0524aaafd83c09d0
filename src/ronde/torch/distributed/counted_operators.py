"""Shows the calls of a process group to PyTorch's CommDebugMode, which counts collectives, and to its profiler.

PyTorch's own groups call operators, such as `c10d::allreduce_`, which that mode and the profiler see. A method written
in Python calls none, so it tells the mode under which operator its call counts, and the profiler gets an event of that
name, which lasts until the method returns. Other modes of PyTorch's dispatcher do not see it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.profiler
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ronde.torch.distributed.work import is_profiling

__all__ = ["count_calls"]

# By name of a method the operator of PyTorch's own groups.
_OPERATORS = {
    "allreduce": "allreduce_",
    "allreduce_coalesced": "allreduce_coalesced_",
    "reduce": "reduce_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "_reduce_scatter_base": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "broadcast": "broadcast_",
    "allgather": "allgather_",
    "allgather_coalesced": "allgather_coalesced_",
    "all_gather_single": "_allgather_base_",
    "_allgather_base": "_allgather_base_",
    "allgather_base": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "allgather_into_tensor_coalesced": "allgather_into_tensor_coalesced_",
    "gather": "gather_",
    "scatter": "scatter_",
    "all_to_all_single": "alltoall_base_",
    "alltoall_base": "alltoall_base_",
    "alltoall": "alltoall_",
}
_MODULE = (
    "torch.distributed.tensor.debug._comm_mode"  # not imported here: a program that counts has imported it
)

_number_of_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class _CountedCall:
    """Stands for an operator that a mode wants to call: the group makes the call afterwards."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, name)

    def __str__(self) -> str:
        return f"{self._overloadpacket}.default"

    def __call__(self) -> None:
        pass


def count_calls(group: type) -> None:
    """Have each collective call of a class of process groups counted by all CommDebugModes that are active."""
    for method, operator in _OPERATORS.items():
        setattr(group, method, _counted(getattr(group, method), operator))


def _counted(method: Callable[..., Any], operator: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if not _number_of_modes() and not is_profiling():
            return method(self, *arguments, **named)
        counting = getattr(sys.modules.get(_MODULE), "CommDebugMode", ())
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, counting):
                mode.__torch_dispatch__(_CountedCall(operator), ())
        # A call may consist of others, which do not count.
        with _disable_current_modes(), torch.profiler.record_function(f"c10d::{operator}"):
            return method(self, *arguments, **named)

    return call
