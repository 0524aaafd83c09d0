"""Chooses the processors to which each worker is bound, so that workers share no caches or memory nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from ronde.launch.config import Binding
from ronde.process.process_groups import usable_core_numbers

__all__ = ["Core", "shares", "usable_machine"]

_CORES = "/sys/devices/system/cpu"


class Core(NamedTuple):
    """A processor as the kernel counts them; sorted, those that are near each other are neighbours.

    Hardware threads of one `physical` core share its caches; cores of one NUMA `node` share its memory.
    """

    node: int
    package: int
    physical: int
    number: int


def shares(binding: Binding, workers: int, cores: Sequence[Core]) -> list[frozenset[int] | None]:
    """Return the processors of each local rank; None for all.

    CORES: shares as equal as possible; if there are more workers than processors, several workers share one. NUMA: all
    processors of one node; neighbouring ranks are on the same node.
    """
    if binding is Binding.NONE:
        return [None] * workers
    if binding is Binding.NUMA:
        nodes: dict[int, set[int]] = {}
        for core in sorted(cores):
            nodes.setdefault(core.node, set()).add(core.number)
        by_node = list(nodes.values())
        return [frozenset(by_node[rank * len(by_node) // workers]) for rank in range(workers)]
    numbers = [core.number for core in sorted(cores)]
    firsts = [rank * len(numbers) // workers for rank in range(workers + 1)]
    return [frozenset(numbers[first : max(next_, first + 1)]) for first, next_ in zip(firsts, firsts[1:])]


def usable_machine() -> list[Core]:
    """Return the processors on which this process may run."""
    return [
        Core(_node_of(number), _number(number, "physical_package_id"), _number(number, "core_id"), number)
        for number in usable_core_numbers()
    ]


def _node_of(number: int) -> int:
    """Return the NUMA node of a processor; 0 if the kernel does not report it."""
    try:
        names = os.listdir(f"{_CORES}/cpu{number}")
    except OSError:
        return 0
    return next((int(name[4:]) for name in names if name.startswith("node") and name[4:].isdecimal()), 0)


def _number(number: int, name: str) -> int:
    try:
        with open(f"{_CORES}/cpu{number}/topology/{name}") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
