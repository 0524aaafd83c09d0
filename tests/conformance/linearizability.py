"""Checks a history of calls of a store by concurrent clients: each call must take effect at one moment within it.

    events = []
    clients = [Recorder(store.fork(), f"client {n}", events.append) for n in range(4)]
    ...                                   # each in a thread: clients[n].set("a", b"1"), .get("a", 0), .add("n", 1), ...
    check(history(events))                # raises NotLinearizableError, which shows the calls that do not fit

`exercise(stores, seed)` does all of that with random calls. Clients may be in several processes of one machine, whose
clocks agree, and may die: a call without an answer may have taken effect at any time after it was made, or never.

The method is Wing and Gong's search ("Testing and verifying concurrent objects", 1993) with Lowe's memory of visited
states ("Testing for linearizability", 2017). It checks each group of names that calls share on its own: a history is
linearizable if that of each object is (Herlihy and Wing, "Linearizability", 1990).
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ronde.errors import PeerLostError, TimeoutError, UsageError
from ronde.stores.store import VALUE_LIMIT_BYTES, Store

__all__ = [
    "Event",
    "NotLinearizableError",
    "Operation",
    "CallOutcome",
    "Recorder",
    "check",
    "exercise",
    "history",
]


class CallOutcome(Enum):
    """The end of a call without a value."""

    ABSENT = "nothing there"
    REFUSED = "refused"
    UNKNOWN = "no answer"


@dataclass(frozen=True)
class Event:
    """A call was made, or answered.

    Attributes:
        client: The name of the client.
        number: Which of the client's calls it is, from 1.
        at_ns: When, by `time.monotonic_ns()`.
        method: The method of `Store`; "" for an answer.
        arguments: Its arguments without a timeout; empty for an answer.
        answer: What the method returned, or a `CallOutcome`; UNKNOWN for a call.
        is_answer: Whether the call was answered, not made (False).
    """

    client: str
    number: int
    at_ns: int
    method: str = ""
    arguments: tuple[Any, ...] = ()
    answer: Any = CallOutcome.UNKNOWN
    is_answer: bool = False


@dataclass(frozen=True)
class Operation:
    """One call of a method of `Store`.

    Attributes:
        client: The name of the client.
        method: The name of the method.
        arguments: Its arguments without a timeout.
        invoked_ns: When the call was made, by `time.monotonic_ns()`.
        returned_ns: When it was answered; None without an answer.
        answer: What the method returned, or a `CallOutcome`; UNKNOWN without an answer.
    """

    client: str
    method: str
    arguments: tuple[Any, ...]
    invoked_ns: int
    returned_ns: int | None
    answer: Any

    def __str__(self) -> str:
        arguments = ", ".join(repr(argument) for argument in self.arguments)
        answer = self.answer.value if isinstance(self.answer, CallOutcome) else repr(self.answer)
        until = "..." if self.returned_ns is None else f"{self.returned_ns / 1e3:.1f}"
        return f"[{self.invoked_ns / 1e3:.1f} to {until} us] {self.client}: {self.method}({arguments}) -> {answer}"


class NotLinearizableError(AssertionError):
    """No order of its calls explains the history; the message has the calls at which the search fails."""


# Recording

LOOKS = {"get": 1, "multi_get": 1, "queue_pop": 1}  # methods with a timeout, and where it is


class Recorder:
    """A client of a store that reports each call before and after it.

    It has the methods that a history may contain: set, get, add, compare_set, delete_key, append, check, multi_get,
    multi_set, queue_push, queue_pop and queue_len. They return the answer or a `CallOutcome`; after UNKNOWN (the store
    was lost during the call) use another client.

    Args:
        store: The client's store, which no other client uses: one that `fork` returned.
        client: A name that is unique in the history.
        tell: Takes each event at once, such as `events.append`.
    """

    def __init__(self, store: Store, client: str, tell: Callable[[Event], object]) -> None:
        self.store = store
        self._client = client
        self._tell = tell
        self._number = 0

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method not in _STEPS:
            raise AttributeError(method)
        return lambda *arguments: self._call(method, arguments)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._number += 1
        shown = arguments[: LOOKS[method]] if method in LOOKS else arguments
        call = getattr(self.store, method)
        self._tell(Event(self._client, self._number, time.monotonic_ns(), method, shown))
        answer: Any = CallOutcome.UNKNOWN
        try:
            answer = call(*arguments)
        except TimeoutError:
            answer = CallOutcome.ABSENT
        except UsageError:
            answer = CallOutcome.REFUSED
        except PeerLostError:
            return answer
        self._tell(Event(self._client, self._number, time.monotonic_ns(), answer=answer, is_answer=True))
        return answer


def history(events: Iterable[Event]) -> list[Operation]:
    """Return the calls that the events describe. Raises no error.

    Args:
        events: what the recorders of all clients have told, in any order.
    """
    made: dict[tuple[str, int], Event] = {}
    answered: dict[tuple[str, int], Event] = {}
    for event in events:
        (answered if event.is_answer else made)[event.client, event.number] = event
    operations = []
    for name, event in made.items():
        end = answered.get(name)
        returned_ns = end.at_ns if end else None
        answer = end.answer if end else CallOutcome.UNKNOWN
        operations.append(
            Operation(event.client, event.method, event.arguments, event.at_ns, returned_ns, answer)
        )
    return operations


def exercise(
    stores: Sequence[Store],
    seed: int,
    calls: int = 50,
    names: Sequence[str] = ("a", "b"),
    without: Iterable[str] = (),
) -> list[Operation]:
    """Make random calls with each of the clients, in threads, and return the history. Raises no error.

        check(exercise([store, store.fork()], seed=0))

    No two values are equal.

    Args:
        stores: the clients, each of which gets a thread.
        seed: determines which calls the clients make.
        calls: the number of calls of each client; a client that loses the store makes fewer.
        names: the names of the keys and queues.
        without: methods that the clients must not call.
    """
    events: list[Event] = []
    recorders = [Recorder(store, f"client {index}", events.append) for index, store in enumerate(stores)]
    threads = [
        threading.Thread(target=random_calls, args=(recorder, f"{seed}/{index}", calls, names, without))
        for index, recorder in enumerate(recorders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return history(events)


def random_calls(
    client: Recorder, seed: str, calls: int, names: Sequence[str] = ("a", "b"), without: Iterable[str] = ()
) -> None:
    """Make so many random calls with one client, but none of those methods; fewer if it loses the store."""
    chance = random.Random(seed)
    last: dict[str, bytes] = {}  # the last value of a name, for compare_set
    for number in range(calls):
        name, value = chance.choice(names), f"{seed}.{number}".encode()
        arguments: dict[str, tuple[Any, ...]] = {
            "set": (name, value),
            "get": (name, 0),
            "add": (f"{name} counted", chance.randrange(-1, 3)),
            "compare_set": (name, last.get(name, b""), value),
            "delete_key": (chance.choice([name, f"{name} counted"]),),
            "append": (name, value),
            "check": ([name],),
            "multi_get": (list(names), 0),
            "multi_set": ({name: value + name.encode() for name in names},),
            "queue_push": (name, value),
            "queue_pop": (name, 0),
            "queue_len": (name,),
        }
        method = chance.choice([method for method in arguments if method not in without])
        answer = getattr(client, method)(*arguments[method])
        if method in ("get", "compare_set") and isinstance(answer, bytes):
            last[name] = answer
        if answer is CallOutcome.UNKNOWN:
            return


# The model of a store: what each method does to the values of its names (None or an empty queue at first)

State = tuple[Any, ...]
_NUMBER = re.compile(rb"-?\d{1,40}")


def _add(value: Any, _: str, amount: int) -> tuple[Any, Any]:
    if not _NUMBER.fullmatch(value or b"0"):
        return value, CallOutcome.REFUSED
    total = int(value or b"0") + amount
    return b"%d" % total, total


def _compare_set(value: Any, _: str, expected: bytes, desired: bytes) -> tuple[Any, Any]:
    return (desired, desired) if (value or b"") == expected else (value, value or b"")


def _append(value: Any, _: str, more: bytes) -> tuple[Any, Any]:
    longer = (value or b"") + more
    return (longer, None) if len(longer) <= VALUE_LIMIT_BYTES else (value, CallOutcome.REFUSED)


def _get(value: Any, _: str) -> tuple[Any, Any]:
    return value, CallOutcome.ABSENT if value is None else value


def _pop(values: Any, _: str) -> tuple[Any, Any]:
    return (values[1:], values[0]) if values else (None, CallOutcome.ABSENT)


def _multi_get(values: list[Any], _: Sequence[str]) -> tuple[list[Any], Any]:
    return values, CallOutcome.ABSENT if None in values else values


_STEPS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "set": lambda _value, _name, new: (new, None),
    "get": _get,
    "add": _add,
    "compare_set": _compare_set,
    "delete_key": lambda value, _name: (None, value is not None),
    "append": _append,
    "check": lambda values, _names: (values, None not in values),
    "multi_get": _multi_get,
    "multi_set": lambda _values, new: (list(new.values()), None),
    "queue_push": lambda values, _name, new: ((values or ()) + (new,), None),
    "queue_pop": _pop,
    "queue_len": lambda values, _name: (values, len(values or ())),
}
_OF_MANY = {"check", "multi_get", "multi_set"}


def _names(operation: Operation) -> list[str]:
    """Return the objects of the call; a queue and a key of the same name are two."""
    if operation.method in _OF_MANY:
        return [f"key {name}" for name in operation.arguments[0]]
    kind = "queue" if operation.method.startswith("queue_") else "key"
    return [f"{kind} {operation.arguments[0]}"]


def _step(state: State, operation: Operation, places: list[int]) -> State | None:
    """Return the state after the call, or None if the call would have got another answer."""
    values = [state[place] for place in places]
    many = operation.method in _OF_MANY
    after, answer = _STEPS[operation.method](values if many else values[0], *operation.arguments)
    if operation.returned_ns is not None and answer != operation.answer:
        return None
    changed = list(state)
    for place, value in zip(places, after if many else [after]):
        changed[place] = value
    return tuple(changed)


# Checking


def check(operations: Iterable[Operation]) -> None:
    """Check that an order of the calls explains all answers.

    At first the names have no value. The time grows with the number of overlapping calls, not with that of all calls.

    Args:
        operations: the calls, in any order, as `history` and `exercise` return them.

    Raises:
        NotLinearizableError: no order explains the answers; the error shows the calls at which the search fails.
    """
    for group in _groups(list(operations)):
        _search(group)


def _groups(operations: list[Operation]) -> list[list[Operation]]:
    """Return groups of the calls that share names, directly or through others."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            name = leader[name]
        return name

    for operation in operations:
        first, *others = _names(operation) or [""]
        for name in others:
            leader[find(name)] = find(first)
    groups: dict[str, list[Operation]] = {}
    for operation in operations:
        if names := _names(operation):
            groups.setdefault(find(names[0]), []).append(operation)
    return list(groups.values())


@dataclass(eq=False)
class _Entry:
    """A call, or its end, in a list ordered by time. `index` is that of the operation."""

    index: int
    is_call: bool
    before: _Entry | None = field(default=None, repr=False)
    after: _Entry | None = field(default=None, repr=False)
    end: _Entry | None = field(default=None, repr=False)  # of a call; None without an answer

    def take_out(self) -> None:
        assert self.before is not None
        self.before.after = self.after
        if self.after:
            self.after.before = self.before

    def put_back(self) -> None:
        assert self.before is not None
        self.before.after = self
        if self.after:
            self.after.before = self


def _entries(operations: list[Operation]) -> _Entry:
    """Return the head of the list of all calls and ends."""
    times = []
    for index, operation in enumerate(operations):
        call = _Entry(index, True)
        times.append((operation.invoked_ns, 0, index, call))
        if operation.returned_ns is not None:
            call.end = _Entry(index, False)
            times.append((operation.returned_ns, 1, index, call.end))
    times.sort(key=lambda time: time[:3])
    head = last = _Entry(-1, False)
    for *_, entry in times:
        last.after, entry.before = entry, last
        last = entry
    return head


def _search(operations: list[Operation]) -> None:
    """Take one call after the other that could be the next; backtrack when a call that was not taken ends."""
    places: dict[str, int] = {}
    where = [[places.setdefault(name, len(places)) for name in _names(operation)] for operation in operations]
    head = _entries(operations)
    state: State = (None,) * len(places)
    taken, unanswered = 0, sum(operation.returned_ns is not None for operation in operations)
    tried: set[tuple[int, State]] = set()
    path: list[tuple[_Entry, State]] = []
    furthest: tuple[list[int], State, int] = ([], state, -1)
    entry = head.after
    while unanswered:
        after = _step(state, operations[entry.index], where[entry.index]) if entry and entry.is_call else None
        if entry and after is not None and (taken | 1 << entry.index, after) not in tried:
            taken |= 1 << entry.index
            tried.add((taken, after))
            path.append((entry, state))
            state = after
            entry.take_out()
            if entry.end:
                entry.end.take_out()
                unanswered -= 1
            entry = head.after
        elif entry and entry.is_call:
            entry = entry.after
        else:
            if entry and len(path) >= len(furthest[0]):
                furthest = ([call.index for call, _ in path], state, entry.index)
            if not path:
                raise NotLinearizableError(_explain(operations, list(places), *furthest))
            entry, state = path.pop()
            taken ^= 1 << entry.index
            if entry.end:
                entry.end.put_back()
                unanswered += 1
            entry.put_back()
            entry = entry.after


def _explain(
    operations: list[Operation], names: list[str], order: list[int], state: State, stuck: int
) -> str:
    """Return the furthest point of the search: the last calls that it explains, and those that cannot follow."""
    end_ns = operations[stuck].returned_ns or 0
    begun = [
        index
        for index, operation in enumerate(operations)
        if index not in set(order) and operation.invoked_ns <= end_ns
    ]
    lines = [f"no order explains what was seen of {', '.join(names)}. Explained so far, the last ones:"]
    lines += [f"  {operations[index]}" for index in order[-10:]]
    lines += ["after which there is:"]
    lines += [f"  {name}: {value!r}" for name, value in zip(names, state)]
    lines += ["and none of these can be next, although the first must have happened by its end:"]
    lines += [f"  {operations[index]}" for index in sorted(begun, key=lambda index: index != stuck)]
    return "\n".join(lines)
