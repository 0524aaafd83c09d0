"""Checks that all tasks have trees of the same structure, before they combine them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ronde.comqueue.array_tree import Structure, checksum_of
from ronde.comqueue.task_group import TaskGroup
from ronde.light_dataclasses import dataclass
from ronde.types import Max

__all__ = ["Difference", "find_difference"]


@dataclass(frozen=True)
class Difference:
    """Descriptions of what two tasks have, task 0 and another one; as a text, it names both."""

    on_task_0: str
    other_task: int
    on_other_task: str

    def __str__(self) -> str:
        return f"{self.on_task_0} on task 0 and {self.on_other_task} on task {self.other_task}"


def find_difference(group: TaskGroup, structure: Structure, describe: Callable[[], str]) -> Difference | None:
    """Return a difference, the same on all tasks; None if all have the same structure.

    The tasks compare checksums, and exchange descriptions only if these differ.
    """
    checksum = checksum_of(structure)
    extremes = np.array((checksum, -checksum))
    group.allreduce(extremes, Max)
    if extremes[0] == -extremes[1]:
        return None
    texts = group.allgather_object(describe())
    other = next((task for task, text in enumerate(texts) if text != texts[0]), 0)
    return Difference(texts[0], other, texts[other])
