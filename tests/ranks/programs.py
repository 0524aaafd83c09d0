"""Small programs for ranks, and ranks that go wrong: what tests of `ronde.testing` run."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from ronde import settings
from ronde.testing.ranks import tell


@dataclass(frozen=True)
class Question:
    """An argument of a type that the rank has to import first."""

    number: int


def my_rank() -> int:
    return int(settings.environment()["RANK"])


def answer(question: Question) -> tuple[int, int]:
    return my_rank(), 2 * question.number


def parent_and_modules() -> tuple[int, set[str]]:
    return os.getppid(), set(sys.modules)


def environment() -> dict[str, str]:
    return settings.environment()


def sleep_for_ever() -> None:
    tell(os.getpid())
    while True:
        time.sleep(1000)


def raise_on_rank_1() -> None:
    if my_rank() == 1:
        raise ValueError("the answer is unknown")
    sleep_for_ever()


def crash_on_rank_1() -> None:
    if my_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    sleep_for_ever()


def exit_with(code: int) -> None:
    sys.exit(code)


def leave_a_child_behind() -> int:
    return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")


def no_pickle() -> Any:
    return lambda: None
