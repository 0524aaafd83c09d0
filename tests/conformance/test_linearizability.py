"""The checker must accept whatever a right store does, and reject what a wrong one can only seem to do right."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from itertools import permutations
from typing import Any

import pytest
from tests.conformance.linearizability import (
    CallOutcome,
    Event,
    NotLinearizableError,
    Operation,
    Recorder,
    check,
    exercise,
    history,
)

from ronde.errors import TimeoutError
from ronde.stores.memory import MemoryStore


def call(
    begin: int, end: int | None, method: str, *arguments: Any, answer: Any = None, client: str = "client"
) -> Operation:
    return Operation(client, method, arguments, begin, end, answer)


def is_linearizable(operations: Iterable[Operation]) -> bool:
    try:
        check(operations)
    except NotLinearizableError:
        return False
    return True


def test_nothing_and_calls_one_after_the_other_are_linearizable() -> None:
    check([])
    check(
        [
            call(0, 1, "get", "a", answer=CallOutcome.ABSENT),
            call(2, 3, "set", "a", b"1"),
            call(4, 5, "get", "a", answer=b"1"),
            call(6, 7, "add", "a", 2, answer=3),
            call(8, 9, "append", "a", b"x"),
            call(10, 11, "add", "a", 2, answer=CallOutcome.REFUSED),
            call(12, 13, "compare_set", "a", b"3", b"y", answer=b"3x"),
            call(14, 15, "compare_set", "a", b"3x", b"y", answer=b"y"),
            call(16, 17, "delete_key", "a", answer=True),
            call(18, 19, "delete_key", "a", answer=False),
            call(20, 21, "compare_set", "a", b"", b"z", answer=b"z"),
            call(22, 23, "multi_set", {"a": b"1", "b": b"2"}),
            call(24, 25, "multi_get", ["b", "a"], answer=[b"2", b"1"]),
            call(26, 27, "multi_get", ["b", "c"], answer=CallOutcome.ABSENT),
            call(28, 29, "check", ["a", "c"], answer=False),
        ]
    )


def test_a_queue_is_no_key_and_first_in_first_out() -> None:
    pushes = [call(0, 1, "queue_push", "a", b"1"), call(2, 3, "queue_push", "a", b"2")]
    check(
        [
            *pushes,
            call(4, 5, "queue_len", "a", answer=2),
            call(4, 5, "check", ["a"], answer=False),
            call(6, 7, "queue_pop", "a", answer=b"1"),
            call(8, 9, "queue_pop", "a", answer=b"2"),
            call(10, 11, "queue_pop", "a", answer=CallOutcome.ABSENT),
        ]
    )
    assert not is_linearizable([*pushes, call(4, 5, "queue_pop", "a", answer=b"2")])


def test_concurrent_calls_may_have_happened_in_any_order_but_only_in_one() -> None:
    sets = [call(0, 10, "set", "a", b"1"), call(0, 10, "set", "a", b"2")]
    check([*sets, call(11, 12, "get", "a", answer=b"1")])
    check([*sets, call(11, 12, "get", "a", answer=b"2")])
    check([*sets, call(5, 6, "get", "a", answer=CallOutcome.ABSENT), call(11, 12, "get", "a", answer=b"2")])
    one_and_then_the_other = [call(11, 12, "get", "a", answer=b"1"), call(13, 14, "get", "a", answer=b"2")]
    assert not is_linearizable([*sets, *one_and_then_the_other])


def test_a_stale_read_is_found_and_explained() -> None:
    operations = [
        call(1000, 2000, "set", "a", b"old"),
        call(3000, 4000, "set", "a", b"new", client="writer"),
        call(5000, 6000, "get", "a", answer=b"old", client="reader"),
    ]
    with pytest.raises(NotLinearizableError) as caught:
        check(operations)
    message = str(caught.value)
    assert "key a: b'new'" in message
    assert "[5.0 to 6.0 us] reader: get('a') -> b'old'" in message


def test_a_call_without_answer_may_have_happened_later_or_not_at_all() -> None:
    lost = call(0, None, "add", "n", 1, answer=CallOutcome.UNKNOWN)
    check([lost])
    for answer in (1, 2):
        check([lost, call(10, 11, "add", "n", 1, answer=answer)])
    seen_late = [call(10, 11, "check", ["n"], answer=False), call(20, 21, "add", "n", 1, answer=2)]
    check([lost, *seen_late])
    assert not is_linearizable([lost, call(10, 11, "add", "n", 1, answer=3)])


def test_multi_set_is_one_moment() -> None:
    both = call(0, 100, "multi_set", {"a": b"1", "b": b"1"})
    first = call(10, 11, "get", "a", answer=b"1")
    check([both, first, call(20, 21, "get", "b", answer=b"1")])
    assert not is_linearizable([both, first, call(20, 21, "get", "b", answer=CallOutcome.ABSENT)])


def test_it_agrees_with_trying_all_orders() -> None:
    chance = random.Random(9)
    verdicts = []
    for _ in range(600):
        operations = []
        for number in range(5):
            begin = chance.randrange(20)
            end = begin + chance.randrange(12) if chance.random() < 0.8 else None
            choices: list[tuple[str, tuple[Any, ...], list[Any]]] = [
                ("set", ("a", b"%d" % number), [None]),
                ("get", ("a",), [CallOutcome.ABSENT, *(b"%d" % value for value in range(5))]),
                ("add", ("a", 1), [1, 2, 3]),
                ("delete_key", ("a",), [True, False]),
            ]
            method, arguments, answers = chance.choice(choices)
            operations.append(call(begin, end, method, *arguments, answer=chance.choice(answers)))
        verdicts.append(is_linearizable(operations))
        assert verdicts[-1] == any_order_explains(operations), operations
    assert 60 < sum(verdicts) < 540


def any_order_explains(operations: list[Operation]) -> bool:
    """Say so by brute force: all orders of all calls with an answer and some of those without."""
    must = [index for index, operation in enumerate(operations) if operation.returned_ns is not None]
    for count in range(len(must), len(operations) + 1):
        for order in permutations(range(len(operations)), count):
            if set(must) <= set(order) and explains([operations[index] for index in order]):
                return True
    return False


def explains(order: list[Operation]) -> bool:
    for index, operation in enumerate(order):
        if any(
            later.returned_ns is not None and later.returned_ns < operation.invoked_ns
            for later in order[index:]
        ):
            return False
    store = Recorder(MemoryStore(), "", lambda _: None)
    for operation in order:
        arguments = (*operation.arguments, 0) if operation.method == "get" else operation.arguments
        answer = getattr(store, operation.method)(*arguments)
        if operation.returned_ns is not None and answer != operation.answer:
            return False
    return True


# Stores with a bug


class Stale(MemoryStore):
    """Sometimes answers a read from a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copy: dict[str, bytes] = {}

    def get(self, key: str, timeout_ns: int) -> bytes:
        value = super().get(key, timeout_ns)
        return self.copy.setdefault(key, value)


class LosesAdds(MemoryStore):
    """Reads and writes in two steps."""

    def add(self, key: str, amount: int) -> int:
        try:
            total = int(self.get(key, 0)) + amount
        except TimeoutError:
            total = amount
        time.sleep(0.0002)
        self.set(key, b"%d" % total)
        return total


class PopsTwice(MemoryStore):
    """Looks for the first value before it takes it."""

    def queue_pop(self, queue: str, timeout_ns: int) -> bytes:
        value = super().queue_pop(queue, timeout_ns)
        if self.queue_len(queue) == 0 and value.endswith(b"3"):
            self.queue_push(queue, value)
        return value


class TearsMultiSet(MemoryStore):
    """Sets one key after the other."""

    def multi_set(self, values: Any) -> None:
        for key, value in values.items():
            self.set(key, value)
            time.sleep(0.0002)


@pytest.mark.parametrize("broken", [Stale, LosesAdds, PopsTwice, TearsMultiSet])
def test_a_planted_bug_is_found(broken: Callable[[], MemoryStore]) -> None:
    for seed in range(50):
        store = broken()
        if not is_linearizable(exercise([store] * 3, seed, calls=60)):
            return
    pytest.fail("not found in 50 histories")


@pytest.mark.parametrize("seed", range(5))
def test_a_right_store_is_linearizable(seed: int) -> None:
    store = MemoryStore()
    operations = exercise([store.fork() for _ in range(4)], seed, calls=150)
    assert len(operations) == 600
    check(operations)


def test_the_recorder_tells_of_calls_before_they_are_answered() -> None:
    store = MemoryStore()
    events: list[Event] = []
    recorder = Recorder(store, "one", events.append)
    waiter = threading.Thread(target=recorder.queue_pop, args=("q", 10**10))
    waiter.start()
    while not events:
        time.sleep(0.001)
    (pending,) = history(events)
    assert (pending.method, pending.arguments, pending.returned_ns) == ("queue_pop", ("q",), None)
    store.queue_push("q", b"1")
    waiter.join()
    (answered,) = history(events)
    assert answered.answer == b"1"
    with pytest.raises(AttributeError):
        _ = recorder.no_such_method
