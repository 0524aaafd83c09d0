from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ronde.data.read_ahead import read_ahead


def test_items_are_ready_before_they_are_asked_for_and_no_more_than_wanted() -> None:
    taken = threading.Semaphore(0)
    numbers: list[int] = []

    def items() -> Iterator[int]:
        for number in range(5):
            numbers.append(number)
            taken.release()
            yield number

    ahead = read_ahead(items(), 2)
    assert next(ahead) == 0
    assert taken.acquire(timeout=60)
    assert taken.acquire(timeout=60)  # the second one, which nobody has asked for yet
    assert numbers == [0, 1]
    assert list(ahead) == [1, 2, 3, 4]


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise LookupError("no more")

    ahead = read_ahead(items(), 3)
    assert next(ahead) == 1
    with pytest.raises(LookupError, match="no more"):
        next(ahead)


def test_a_closed_iterator_ends_its_thread() -> None:
    ahead = read_ahead(iter(range(1000)), 2)
    assert next(ahead) == 0
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ronde-read-ahead"]
