"""The view of a queue's functions: the numbers of their task and step, and the task's named objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ronde.comqueue.row_blocks import RowDivision
from ronde.errors import UsageError

__all__ = ["ComContext"]


class ComContext:
    """One task's view of a running queue. Each function of the queue gets it as its argument.

    Objects belong to one task of one `exec`. Other tasks and other runs do not see them, even as threads of one
    process.

    Attributes:
        task_id: The number of this task, from 0.
        num_tasks: The number of tasks.
        step_no: The number of the current step, from 1.
        divisions: How rows are divided among tasks, by the name of the data.
    """

    def __init__(
        self,
        task_id: int,
        num_tasks: int,
        objects: dict[str, Any] | None = None,
        divisions: Mapping[str, RowDivision] | None = None,
    ) -> None:
        self.task_id = task_id
        self.num_tasks = num_tasks
        self.step_no = 1
        self._objects = {} if objects is None else objects
        self.divisions = {} if divisions is None else divisions

    def __repr__(self) -> str:
        return f"<ComContext: task {self.task_id} of {self.num_tasks}, step {self.step_no}>"

    def put_obj(self, name: str, obj: Any) -> None:
        """Store an object under a name, and replace an earlier object of this name.

        Args:
            name: Its name.
            obj: Any object. Communicate functions work on arrays, numbers, and trees of these.

        Raises:
            UsageError: The name is not a `str`.
        """
        if not isinstance(name, str):
            raise UsageError(f"the name of an object must be a str, not {name!r}")
        self._objects[name] = obj

    def get_obj(self, name: str) -> Any:
        """Return the object of that name.

        Args:
            name: Its name.

        Raises:
            UsageError: There is none. The error lists the names that exist, the task and the step.
        """
        try:
            return self._objects[name]
        except KeyError:
            raise UsageError(
                f"there is no object {name!r} {self.describe_place()}: {self.describe_names()}"
            ) from None

    def remove_obj(self, name: str) -> Any:
        """Remove the object of that name, and return it.

        Args:
            name: Its name.

        Raises:
            UsageError: There is none.
        """
        obj = self.get_obj(name)
        del self._objects[name]
        return obj

    def contains_obj(self, name: str) -> bool:
        """Return whether there is an object of that name.

        Args:
            name: Its name.

        Raises:
            Nothing.
        """
        return name in self._objects

    def describe_place(self) -> str:
        """Return task and step, for messages. Raises nothing."""
        return f"on task {self.task_id} in step {self.step_no}"

    def describe_names(self) -> str:
        """Return which objects there are, for messages. Raises nothing."""
        return f"the task has {', '.join(map(repr, sorted(self._objects))) or 'none'}"
