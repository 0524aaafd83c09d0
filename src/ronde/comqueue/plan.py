"""A queue that is ready to run, and how one task runs it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ronde.comqueue.communication import CommunicateFunction
from ronde.comqueue.context import ComContext
from ronde.comqueue.task_group import TaskGroup
from ronde.errors import MismatchError, PeerError, RondeError
from ronde.light_dataclasses import dataclass, field
from ronde.types import Max

__all__ = ["Item", "Plan", "StepError", "run_plan"]


class StepError(RondeError):
    """A function of a queue failed. The message names task, step and function; `__cause__` is its exception."""


@dataclass(frozen=True)
class Item:
    """A function of a queue, with its name for messages."""

    name: str
    function: Callable[[ComContext], Any] | CommunicateFunction


@dataclass(frozen=True)
class Plan:
    """What a queue consists of.

    `max_iter`: the number of the last step; None: only the criterion ends it.
    """

    items: Sequence[Item]
    partitioned: Mapping[str, Any] = field(default_factory=dict)
    broadcast: Mapping[str, Any] = field(default_factory=dict)
    max_iter: int | None = 1
    criterion: Item | None = None
    complete: Item | None = None


def run_plan(plan: Plan, data: Mapping[str, Any], group: TaskGroup) -> Any:
    """Run one task to its end, and return its result.

    `data`: the objects that exist before the first step. Raises StepError, but errors of communication, such as
    PeerLostError, as they are.
    """
    context = ComContext(group.task_id, group.num_tasks)
    for name, value in data.items():
        context.put_obj(name, value)
    for step_no in itertools.count(1):
        context.step_no = step_no
        for item in plan.items:
            _run_item(item, context, group)
        if plan.criterion is not None and _is_reached(plan.criterion, context, group):
            break
        if step_no == plan.max_iter:
            break
    return None if plan.complete is None else _run_item(plan.complete, context, group)


def _run_item(item: Item, context: ComContext, group: TaskGroup) -> Any:
    try:
        if isinstance(item.function, CommunicateFunction):
            return item.function.communicate(context, group)
        return item.function(context)
    except PeerError:
        raise
    except MismatchError as error:
        raise MismatchError(f"{item.name}: {error}") from None
    except Exception as error:
        said = f": {error}" if str(error) else ""
        raise StepError(
            f"{item.name} failed {context.describe_place()}: {type(error).__name__}{said}"
        ) from error


def _is_reached(criterion: Item, context: ComContext, group: TaskGroup) -> bool:
    """Evaluate the criterion on task 0, and make its result known to all tasks."""
    reached = np.zeros(1, np.uint8)
    if group.task_id == 0:
        reached[0] = bool(_run_item(criterion, context, group))
    group.allreduce(reached, Max)
    return bool(reached[0])
