"""What a task of a queue does at present, in the words of the user's program.

Tasks that make different calls raise an error that quotes the activities of two of them.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Activity", "compare_activities", "find_different"]


class Activity:
    """The step of a task, the function of the queue that it runs, and the operation that this function called last.

    Attributes:
        operation: The operation, for example "sum"; "" if the function is one of communication.
    """

    def __init__(self) -> None:
        self.operation = ""
        self._function = ""
        self._step_no = 0

    def __str__(self) -> str:
        if not self._step_no:
            return "had not begun step 1"
        if not self._function:
            return f"had ended step {self._step_no}"
        return f"called {self.operation} in {self.place}" if self.operation else f"was in {self.place}"

    @property
    def place(self) -> str:
        """The function and the step."""
        return f"{self._function or 'the end'} in step {self._step_no}" if self._step_no else "the start"

    def begin(self, function: str, step_no: int) -> None:
        """Note that the task calls a function of the queue."""
        self._function, self._step_no, self.operation = function, step_no, ""

    def end(self) -> None:
        """Note that the last function of the queue has returned."""
        self._function = self.operation = ""


def compare_activities(texts: Sequence[str]) -> str:
    """Return a text about two tasks with different activities; "" if all have the same. `texts`: by task."""
    other = find_different(texts)
    return "" if other is None else f"task 0 {texts[0]}, while task {other} {texts[other]}"


def find_different(texts: Sequence[str]) -> int | None:
    """Return the first task whose text differs from that of task 0; None if there is none."""
    return next((task for task, text in enumerate(texts) if text != texts[0]), None)
