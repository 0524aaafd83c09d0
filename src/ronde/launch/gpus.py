"""How many GPUs a job may use here, as far as that can be seen without a framework or a driver's library."""

from __future__ import annotations

import glob
from collections.abc import Mapping

__all__ = ["usable_gpus"]

# The first of these variables that is set restricts programs to some GPUs; the list ends at the first -1 or nonsense.
_NVIDIA, _AMD = (
    ("CUDA_VISIBLE_DEVICES",),
    ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
)


def usable_gpus(environment: Mapping[str, str]) -> int:
    """Return how many GPUs of NVIDIA or AMD this machine has and the environment lets programs see."""
    if nvidia := len(glob.glob("/dev/nvidia[0-9]*")):
        return _visible(nvidia, _NVIDIA, environment)
    return _visible(
        sum(map(_is_gpu, glob.glob("/sys/class/kfd/kfd/topology/nodes/*/gpu_id"))), _AMD, environment
    )


def _visible(present: int, variables: tuple[str, ...], environment: Mapping[str, str]) -> int:
    for variable in variables:
        if variable in environment:
            seen = 0
            for name in (name.strip() for name in environment[variable].split(",")):
                if not name or (name.lstrip("-").isdecimal() and not 0 <= int(name) < present):
                    break
                seen += 1
            return seen if present else 0
    return present


def _is_gpu(path: str) -> bool:
    try:
        with open(path) as file:
            return file.read().strip() not in ("", "0")  # 0 is a processor
    except OSError:
        return False
