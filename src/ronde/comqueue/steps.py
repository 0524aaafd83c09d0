"""What a queue consists of, and how one task runs it, step by step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import numpy as np

from ronde.comqueue.checkpointing import CheckpointRule, TaskCheckpoints
from ronde.comqueue.functions import ComContext, CommunicateFunction
from ronde.comqueue.partitions import TaskData
from ronde.comqueue.task_group import TaskGroup
from ronde.errors import MismatchError, PeerError, RondeError, UsageError
from ronde.launch.calls import describe_unsendable_part, pickler
from ronde.types import Max, Min

__all__ = ["Item", "Plan", "StepError", "run_plan", "with_copied_functions"]


class StepError(RondeError):
    """A function of a queue failed. The message names task, step and function; `__cause__` is its exception."""


@dataclass(frozen=True)
class Item:
    """A function of a queue, with its name for messages."""

    name: str
    function: Callable[[ComContext], Any] | CommunicateFunction


@dataclass
class Plan:
    """What a queue consists of. Each task has a copy of the functions.

    `max_iter`: the number of the last step; None: only the criterion ends it. `checkpoint`: None: the tasks save none.
    `rows_per_block`: how many rows a row block has at least.
    """

    items: list[Item] = field(default_factory=list)
    criterion: Item | None = None
    complete: Item | None = None
    partitioned: dict[str, Any] = field(default_factory=dict)
    broadcast: dict[str, Any] = field(default_factory=dict)
    max_iter: int | None = 1
    checkpoint: CheckpointRule | None = None
    rows_per_block: int = 1


def with_copied_functions(plan: Plan) -> Plan:
    """Return the plan with copies of its functions, which share what they shared before."""
    memo: dict[int, Any] = {}

    def copied(item: Item) -> Item:
        return Item(item.name, copy.deepcopy(item.function, memo))

    return replace(
        plan,
        items=list(map(copied, plan.items)),
        criterion=plan.criterion and copied(plan.criterion),
        complete=plan.complete and copied(plan.complete),
    )


def run_plan(
    plan: Plan,
    broadcast: Mapping[str, Any],
    data: TaskData,
    group: TaskGroup,
    checkpoints: TaskCheckpoints | None = None,
) -> Any:
    """Run one task from its last checkpoint, or from the first step, to its end; return its result.

    `broadcast`, `data`: the objects that exist before the first step. Raises StepError, but errors of
    communication, such as PeerLostError, as they are.
    """
    partition = data.objects
    objects, step_no = {**broadcast, **partition}, 0
    if checkpoints is not None and (step_no := _common_step(group, checkpoints)):
        objects = _restored(plan, checkpoints.load(step_no), partition, group.num_tasks)
    context = ComContext(group.task_id, group.num_tasks, objects, data.divisions)
    context.step_no = step_no
    while plan.max_iter is None or step_no < plan.max_iter:
        context.step_no = step_no = step_no + 1
        for item in plan.items:
            _run_item(item, context, group)
        group.activity.end_function()
        if plan.criterion is not None and _is_reached(plan.criterion, context, group):
            break
        if step_no == plan.max_iter:
            break
        if checkpoints is not None and plan.checkpoint is not None and step_no % plan.checkpoint.every == 0:
            _meet(group)
            checkpoints.save(step_no, _packed(plan, objects, partition, group.num_tasks, step_no))
    result = None if plan.complete is None else _run_item(plan.complete, context, group)
    group.activity.end_function()
    if checkpoints is not None:
        _meet(group)
        checkpoints.clear()
    return result


def _run_item(item: Item, context: ComContext, group: TaskGroup) -> Any:
    group.activity.begin_function(item.name, context.step_no)
    try:
        if isinstance(item.function, CommunicateFunction):
            return item.function.communicate(context, group)
        return item.function(context)
    except PeerError:
        raise
    except MismatchError as error:
        if f"in step {context.step_no}" in str(error):  # as those of a group, which name what two tasks did
            raise
        raise MismatchError(f"{group.activity.place}: {error}") from None
    except Exception as error:
        said = f": {error}" if str(error) else ""
        raise StepError(
            f"{item.name} failed {context.describe_place()}: {type(error).__name__}{said}"
        ) from error


def _is_reached(criterion: Item, context: ComContext, group: TaskGroup) -> bool:
    """Evaluate the criterion on task 0, and make its result known to all tasks."""
    reached, compare = np.zeros(1, np.uint8), criterion.function
    if group.task_id == 0 and not isinstance(compare, CommunicateFunction):
        item = Item(criterion.name, lambda context: bool(compare(context)))
        reached[0] = _run_item(item, context, group)
        group.activity.end_function()
    group.allreduce(reached, Max)
    return bool(reached[0])


def _meet(group: TaskGroup) -> None:
    """Return when all tasks have come here."""
    group.allreduce(np.zeros(1, np.uint8), Max)


def _common_step(group: TaskGroup, checkpoints: TaskCheckpoints) -> int:
    """Return the newest step of which all tasks have a checkpoint; 0 if there is none."""
    step = np.array([checkpoints.latest()])
    group.allreduce(step, Min)
    return int(step[0])


def _packed(
    plan: Plan, objects: Mapping[str, Any], partition: Mapping[str, Any], num_tasks: int, step_no: int
) -> bytes:
    """Return a checkpoint after a step: the objects that the task has made, and the state of its functions."""
    kept = [name for name, obj in objects.items() if name in partition and obj is partition[name]]
    made = {name: obj for name, obj in objects.items() if name not in kept}
    try:
        packed: bytes = pickler().dumps(
            (num_tasks, made, kept, [vars(each) for each in _objects_with_state(plan)])
        )
    except Exception as error:
        parts = (
            describe_unsendable_part(f"object {name!r}", obj, pickler().dumps) for name, obj in made.items()
        )
        raise UsageError(
            f"the objects {', '.join(map(repr, sorted(made)))} and the state of the functions cannot be saved in a "
            f"checkpoint: {type(error).__name__}: {error}{next(filter(None, parts), '')}, after step {step_no}"
        ) from error
    return packed


def _restored(plan: Plan, packed: bytes, partition: Mapping[str, Any], num_tasks: int) -> dict[str, Any]:
    """Give the functions the state that a checkpoint contains, and return its objects.

    Raises UsageError if the run that saved it had another number of tasks, and so other partitions.
    """
    saved_tasks, made, kept, states = pickle.loads(packed)
    if saved_tasks != num_tasks:
        raise UsageError(
            f"the checkpoints are from a run with {saved_tasks} tasks, but this run has {num_tasks}: start "
            f"{saved_tasks} tasks, or give another folder"
        )
    for each, state in zip(_objects_with_state(plan), states, strict=True):
        vars(each).update(state)
    return {**made, **{name: partition[name] for name in kept}}


def _objects_with_state(plan: Plan) -> list[object]:
    """Return the objects among the functions, such as ComputeFunctions. Plain functions are not saved, so a run can
    continue with a corrected one. Functions of communication have no state besides the objects.
    """
    last = [item for item in (plan.criterion, plan.complete) if item is not None]
    functions = [item.function for item in (*plan.items, *last)]
    computing = [each for each in functions if not isinstance(each, CommunicateFunction)]
    owners = [getattr(function, "__self__", function) for function in computing]
    return [owner for owner in owners if hasattr(owner, "__dict__") and not isinstance(owner, FunctionType)]
