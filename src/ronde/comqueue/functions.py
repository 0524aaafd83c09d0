"""The functions of a queue. Any callable that takes the context can replace them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ronde.comqueue.context import ComContext
from ronde.errors import UsageError

__all__ = ["CompareCriterionFunction", "CompleteResultFunction", "ComputeFunction", "callable_of", "name_of"]


class ComputeFunction(ABC):
    """A computation on the objects of one task. Each task has a copy, which may keep state of this task."""

    @abstractmethod
    def calc(self, context: ComContext) -> None:
        """Compute one step.

        Args:
            context: The task's objects.

        Raises:
            Exception: Any exception ends all tasks. `exec` then raises RemoteError with task, step and function.
        """


class CompareCriterionFunction(ABC):
    """Decides after each step, on task 0, whether the iteration ends."""

    @abstractmethod
    def calc(self, context: ComContext) -> bool:
        """Return whether this step was the last one.

        Args:
            context: The objects of task 0.

        Raises:
            Exception: As of `ComputeFunction.calc`.
        """


class CompleteResultFunction(ABC):
    """Makes the result of each task after the last step."""

    @abstractmethod
    def calc(self, context: ComContext) -> Any:
        """Return the result of this task.

        Args:
            context: The objects of this task, with the number of the last step.

        Raises:
            Exception: As of `ComputeFunction.calc`.
        """


def callable_of(function: object, role: str) -> Callable[[ComContext], Any]:
    """Return the callable: the function, or the method `calc` of an object. `role`: for the error.

    Raises UsageError if it is neither, for example a class instead of an object.
    """
    if isinstance(function, type):
        raise UsageError(
            f"{role} is the class {function.__qualname__}: pass an object, {function.__qualname__}(...)"
        )
    if isinstance(function, (ComputeFunction, CompareCriterionFunction, CompleteResultFunction)):
        return function.calc
    if callable(function):
        return function
    raise UsageError(
        f"{role} must be a function of the context, or an object with a method calc, not {function!r}"
    )


def name_of(function: object) -> str:
    """Return the name of a function, or of the class of an object, for messages."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
