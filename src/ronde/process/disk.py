"""A disk that may not answer (a network file system without its server): threads do its operations in a limited time.

There is one operation at a time. After one has timed out, others fail at once until it ends, so many workers together
wait once and not once each. An operation that ends too late is undone.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Disk"]

T = TypeVar("T")

PATIENCE_NS = 10 * 10**9  # well below the silence after which a node counts as lost


class Disk:
    """The disk of some files. One thread asks for operations."""

    def __init__(self, patience_ns: int = PATIENCE_NS) -> None:
        self._patience_ns = patience_ns
        self._open: threading.Thread | None = None  # with an operation that timed out

    @property
    def is_silent(self) -> bool:
        """Whether an operation has timed out and not ended since."""
        return self._open is not None and self._open.is_alive()

    def ask(self, do: Callable[[], T], take_back: Callable[[T], object] | None = None) -> T:
        """Return the result of `do`, which uses the disk; if that ends too late, it is undone.

        Raises the exception of `do`, and OSError if `do` takes too long.
        """
        if not self.is_silent:
            question = _DiskRequest(do, take_back)
            thread = threading.Thread(target=question.perform, name="ronde-disk", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process can start no thread
                return do()
            thread.join(self._patience_ns / 1e9)
            if question.is_answered():
                return question.answer()
            self._open = thread
        raise OSError(errno.ETIMEDOUT, f"the disk has not answered for {self._patience_ns / 1e9:g} s")


class _DiskRequest(Generic[T]):
    def __init__(self, do: Callable[[], T], take_back: Callable[[T], object] | None) -> None:
        self._do = do
        self._take_back = take_back
        self._lock = threading.Lock()
        self._answers: list[T] = []
        self._problem: Exception | None = None
        self._given_up = False

    def perform(self) -> None:
        """Do the operation. Runs in a thread."""
        try:
            answer = self._do()
        except Exception as problem:
            self._problem = problem
            return
        with self._lock:
            if not self._given_up:
                self._answers.append(answer)
                return
        if self._take_back is not None:
            with contextlib.suppress(OSError):
                self._take_back(answer)

    def is_answered(self) -> bool:
        """Return whether there is a result; after False, a later result is undone."""
        with self._lock:
            self._given_up = not self._answers and self._problem is None
            return not self._given_up

    def answer(self) -> T:
        """Return the result, or raise the exception of the operation."""
        if self._problem is not None:
            raise self._problem.with_traceback(None)
        return self._answers[0]
