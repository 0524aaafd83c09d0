"""Checks that all tasks have trees of the same structure, before they combine them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ronde.comqueue.activity import compare_activities, find_different
from ronde.comqueue.array_tree import Structure, checksum_of
from ronde.comqueue.task_group import TaskGroup
from ronde.errors import MismatchError
from ronde.types import Max

__all__ = ["require_same_structure"]


def require_same_structure(
    group: TaskGroup, structure: Structure, describe: Callable[[], str], subject: str
) -> None:
    """Raise MismatchError on all tasks unless all have the same structure.

    The tasks compare checksums, and exchange descriptions only if these differ. `subject`: what has the structure, with
    a verb, for the error.
    """
    checksum = checksum_of(structure)
    extremes = np.array((checksum, -checksum))
    group.allreduce(extremes, Max)
    if extremes[0] == -extremes[1]:
        return
    told = group.allgather_object((str(group.activity), describe()))
    if difference := compare_activities([activity for activity, _ in told]):
        raise MismatchError(difference)
    texts = [text for _, text in told]
    other = find_different(texts) or 0
    raise MismatchError(
        f"{group.activity.place}: {subject} {texts[0]} on task 0 and {texts[other]} on task {other}: expected one "
        "structure, dtype and shape on all tasks"
    )
