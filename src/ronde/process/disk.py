"""A disk that may not answer (a network file system whose server is away), asked by threads with a time limit.

There is one question at a time. While it is open, every other one fails at once: so many workers together are held up
once, and not once each. What is answered too late is taken back.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Disk"]

T = TypeVar("T")

PATIENCE_NS = 10 * 10**9  # well below the silence after which other nodes give this one up


class Disk:
    """Where some files are. Questions come from one thread."""

    def __init__(self, patience_ns: int = PATIENCE_NS) -> None:
        self._patience_ns = patience_ns
        self._open: threading.Thread | None = None  # with a question that was given up

    @property
    def is_silent(self) -> bool:
        """Whether a question is still open."""
        return self._open is not None and self._open.is_alive()

    def ask(self, do: Callable[[], T], take_back: Callable[[T], object] | None = None) -> T:
        """Return what `do` does, which touches the disk; if it is done too late, it is taken back.

        Raises what it raises, and OSError if that takes too long.
        """
        if not self.is_silent:
            question = _DiskRequest(do, take_back)
            thread = threading.Thread(target=question.perform, name="ronde-disk", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there is no room for one
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
        """In a thread: do it."""
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
        """Return whether there is an answer; if there is not, there will be none."""
        with self._lock:
            self._given_up = not self._answers and self._problem is None
            return not self._given_up

    def answer(self) -> T:
        """Return it, or raise what has happened."""
        if self._problem is not None:
            raise self._problem.with_traceback(None)
        return self._answers[0]
