"""Checks of what all tasks must have in common: the structure of trees that they combine, and the state.

Before tasks combine trees, they compare checksums of their structures. Each task changes the state in its copy. A step
that forgets to combine what depends on its rows gives each task another state, and a result that depends on the number
of tasks. So the tasks compare checksums of their states after the last step, and before that ever less often: the first
steps show most mistakes, and a check should cost nothing beside the steps.

1. Arrays, numbers and texts count, also those in lists, dicts and dataclasses. What other objects contain does not, and
   attributes whose names begin with `_` do not: these may belong to a task.
2. Of a long list the last elements count, so that a history that grows costs no more in each step.
3. If checksums differ, the tasks compare with task 0. The last bits of floats may differ between machines.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue.array_tree import Structure, checksum_of, leaf_array, named_parts
from ronde.comqueue.task_group import TaskGroup, compare_activities, find_different
from ronde.errors import MismatchError
from ronde.types import Max

__all__ = ["checksum_of_state", "is_checked_after", "require_same_state", "require_same_structure"]


REGULARLY = 1024  # steps between two checks of a long iteration; earlier the steps 1, 4, 16, ...
LARGE = 8192  # numbers of 64 bits: of more, the sums of as many columns are fast to form
MOST_PARTS = 100  # of a list that count
ROUNDING = 1e-6  # relative to the largest number of an array
SHOWN = 60  # characters of a value in an error

Leaf = tuple[str, Any]  # its place in the state, such as `w` or `best['loss']`; an array, or a text


def require_same_structure(
    group: TaskGroup, structure: Structure, describe: Callable[[], str], subject: str
) -> None:
    """Raise MismatchError on all tasks unless all have the same structure.

    The tasks compare checksums, and exchange descriptions only if these differ. `subject`: what has the structure, with
    a verb, for the error.
    """
    if _is_common(group, checksum_of(structure)):
        return
    texts = _gather_from_all(group, describe())
    other = find_different(texts) or 0
    raise MismatchError(
        f"{group.activity.place}: {subject} {texts[0]} on task 0 and {texts[other]} on task {other}: expected one "
        "structure, dtype and shape on all tasks"
    )


def _is_common(group: TaskGroup, checksum: int) -> bool:
    """Return whether all tasks have the same checksum."""
    extremes = np.array((checksum, -checksum))
    group.allreduce(extremes, Max)
    return bool(extremes[0] == -extremes[1])


def _gather_from_all(group: TaskGroup, mine: Any) -> list[Any]:
    """Return what all tasks pass, by task. Raises MismatchError if they do different things at present."""
    gathered = group.allgather_object((str(group.activity), mine))
    if difference := compare_activities([activity for activity, _ in gathered]):
        raise MismatchError(difference)
    return [each for _, each in gathered]


def is_checked_after(step_no: int) -> bool:
    """Return whether the tasks compare their states after this step."""
    is_power_of_4 = step_no & (step_no - 1) == 0 and step_no.bit_length() % 2 == 1
    return is_power_of_4 or step_no % REGULARLY == 0


def require_same_state(group: TaskGroup, state: Mapping[str, Any], place: str) -> None:
    """Raise MismatchError on all tasks, with an attribute and the tasks, unless all have the same state.

    `place`: function and step, for the error.
    """
    if group.num_tasks == 1:
        return
    if not _is_common(group, checksum_of_state(state)):
        _compare_with_task_0(group, state, place)


def checksum_of_state(state: Mapping[str, Any]) -> int:
    """Return a number that is the same in all processes for equal states, and very likely differs for others."""
    checksum = 0
    for place, leaf in _leaves(state):
        checksum = zlib.crc32(place.encode(), checksum)
        if isinstance(leaf, str):
            checksum = zlib.crc32(leaf.encode("utf-8", "surrogatepass"), checksum)
        else:
            checksum = zlib.crc32(f"{leaf.dtype.str}{leaf.shape}".encode(), checksum)
            for part in _shortened(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)):
                checksum = zlib.crc32(part.data, checksum)
    return checksum


def _shortened(content: NDArray[np.uint8]) -> Iterator[NDArray[Any]]:
    """Yield arrays that differ if the content does: of many bytes the sums of columns, and the rest."""
    whole = len(content) // (8 * LARGE) * 8 * LARGE
    if whole:
        yield content[:whole].view(np.uint64).reshape(-1, LARGE).sum(axis=0)
    yield content[whole:]


def _leaves(state: Mapping[str, Any]) -> Iterator[Leaf]:
    for name in sorted(state):
        if not name.startswith("_"):
            yield from _leaves_of(state[name], name)


def _leaves_of(tree: Any, place: str) -> Iterator[Leaf]:
    parts = named_parts(tree)
    if parts is not None:
        yield place, f"{type(tree).__name__} of {len(parts)}"
        for name, part in parts[-MOST_PARTS:]:
            yield from _leaves_of(part, place + name)
    elif (array := leaf_array(tree)) is not None:
        yield place, array
    else:
        is_plain = isinstance(tree, str | bytes | int)  # an int of more than 64 bits
        yield place, repr(tree) if is_plain else f"a {type(tree).__qualname__}"


def _compare_with_task_0(group: TaskGroup, state: Mapping[str, Any], place: str) -> None:
    mine = list(_leaves(state))
    expected = group.broadcast_object(mine, 0)
    gathered = _gather_from_all(group, _difference(expected, mine))
    differences = {task: difference for task, difference in enumerate(gathered) if difference}
    if differences:
        task, (name, theirs, its) = next(iter(differences.items()))
        tasks = _described(list(differences), group.num_tasks)
        raise MismatchError(
            f"{place}: the state differs between tasks: {name} is {theirs} on task 0 and {its} on task {task} ({tasks} "
            "from task 0). Each task must change the state in the same way: combine what depends on its rows, for "
            "example by c.sum. An attribute of a single task has a name with _ in front"
        )


def _difference(expected: Sequence[Leaf], mine: Sequence[Leaf]) -> tuple[str, str, str] | None:
    """Return the first place with another value, and both values as texts; None if there is none."""
    known = dict(expected)
    for place, leaf in mine:
        if place not in known:
            return place, "missing", _shown(leaf)
        if not _is_same(known[place], leaf):
            return place, *_shown_apart(known[place], leaf)
    if missing := known.keys() - dict(mine).keys():
        place = min(missing)
        return place, _shown(known[place]), "missing"
    return None


def _is_same(theirs: Any, mine: Any) -> bool:
    if isinstance(theirs, str) or isinstance(mine, str):
        return isinstance(theirs, str) and isinstance(mine, str) and theirs == mine
    if theirs.shape != mine.shape or {theirs.dtype.kind, mine.dtype.kind}.isdisjoint("fc"):
        return bool(np.array_equal(theirs, mine))
    largest = float(np.abs(theirs[np.isfinite(theirs)]).max(initial=0))
    precision = max(float(np.finfo(each.dtype).eps) for each in (theirs, mine) if each.dtype.kind in "fc")
    tolerance = max(ROUNDING, 100 * precision) * largest
    return bool(np.allclose(mine, theirs, rtol=0, atol=tolerance, equal_nan=True))


def _shown_apart(theirs: Any, mine: Any) -> tuple[str, str]:
    """Return two values as texts; of two arrays of one form, the first elements that differ most."""
    if isinstance(theirs, str) or isinstance(mine, str) or theirs.shape != mine.shape or not theirs.ndim:
        return _shown(theirs), _shown(mine)
    different = theirs != mine
    at = np.unravel_index(int(different.argmax()), different.shape)
    index = ", ".join(map(str, at))
    return f"{theirs[at]} at [{index}]", f"{mine[at]} at [{index}]"


def _shown(leaf: Any) -> str:
    text = leaf if isinstance(leaf, str) else f"{leaf.dtype} {leaf.shape}" if leaf.ndim else str(leaf[()])
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _described(tasks: Sequence[int], num_tasks: int) -> str:
    if len(tasks) == num_tasks - 1 and num_tasks > 2:
        return "all other tasks differ"
    named = ", ".join(map(str, tasks[:5])) + (", ..." if len(tasks) > 5 else "")
    return f"tasks {named} differ" if len(tasks) > 1 else f"task {named} differs"
