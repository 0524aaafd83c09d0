"""A store in simulated time: its operations and its waiting clients. It counts requests."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping

from ronde.rendezvous.effects import Compare, Delete, Effect, FindChanges, Forget, Hold, Push, Set

Values = dict[str, bytes | None]
POP_AT_ONCE = 64


class Waiter:
    """A request to be answered later, once."""

    def __init__(self, known: Mapping[str, bytes | None], answer: Callable[[Values], None]) -> None:
        self.known = known
        self.answer = answer
        self.is_over = False


class Taker:
    """A request for the values of a queue."""

    def __init__(self, answer: Callable[[tuple[bytes, ...]], None]) -> None:
        self.answer = answer
        self.is_over = False


class SimStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.held: defaultdict[str, dict[str, bytes]] = defaultdict(dict)  # by client
        self.waiting: defaultdict[str, list[Waiter]] = defaultdict(list)  # by key
        self.taking: defaultdict[str, list[Taker]] = defaultdict(list)  # by queue
        self.messages: Counter[str] = Counter()
        self.bytes = 0

    def count(self, kind: str, *contents: object) -> None:
        """A request and its answer: keys, values, and some bytes around them."""
        self.messages[kind] += 1
        self.bytes += 32 + sum(len(each) for each in contents if isinstance(each, bytes | str))

    # Operations with an immediate answer

    def execute(self, client: str, effect: Effect) -> Values | bytes | None:
        match effect:
            case Set(values):
                self.count("set", *values, *values.values())
                for key, value in values.items():
                    self.put(key, value)
            case Hold(key, value):
                self.count("hold", key, value)
                self.held[client][key] = value
                self.put(key, value)
            case Push(queue, value):
                self.count("push", queue, value)
                self.queues.setdefault(queue, deque()).append(value)
                self.give_out(queue)
            case Compare(expected, desired):
                self.count("compare", expected, desired)
                if self.values.get("state", b"") == expected:
                    self.put("state", desired)
                return self.values.get("state", b"")
            case FindChanges(known):
                changed = self.differing(known)
                digests = len(known) * 8
                self.count("look", *known, *changed.values(), b" " * digests)
                return changed
            case Forget(prefix):
                self.count("forget", prefix)
                self.remove(prefix)
            case Delete(keys):
                self.count("delete", *keys)
                for key in keys:
                    self.put(key, None)
        return None

    def remove(self, prefix: str) -> None:
        for key in [key for key in self.values if key.startswith(prefix)]:
            self.put(key, None)
        for queue in [queue for queue in self.queues if queue.startswith(prefix)]:
            del self.queues[queue]

    def put(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value
        for waiter in self.waiting.pop(key, ()):
            if not waiter.is_over and not self.try_to_answer(waiter):
                self.waiting[key].append(waiter)

    def differing(self, known: Mapping[str, bytes | None]) -> Values:
        return {key: self.values.get(key) for key, value in known.items() if self.values.get(key) != value}

    # Operations that wait

    def watch(self, known: Mapping[str, bytes | None], answer: Callable[[Values], None]) -> Waiter:
        self.count("watch", *known, b" " * 8 * len(known))
        waiter = Waiter(known, answer)
        if not self.try_to_answer(waiter):
            for key in known:
                self.waiting[key].append(waiter)
        return waiter

    def try_to_answer(self, waiter: Waiter) -> bool:
        changed = self.differing(waiter.known)
        if changed:
            waiter.is_over = True
            self.bytes += sum(len(value or b"") for value in changed.values())
            waiter.answer(changed)
        return bool(changed)

    def pop(self, queue: str, answer: Callable[[tuple[bytes, ...]], None]) -> Taker:
        taker = Taker(answer)
        self.taking[queue].append(taker)
        self.give_out(queue)
        return taker

    def give_out(self, queue: str) -> None:
        takers = [taker for taker in self.taking[queue] if not taker.is_over]
        self.taking[queue] = takers
        values = self.queues.get(queue)
        if takers and values:
            taken = tuple(values.popleft() for _ in range(min(len(values), POP_AT_ONCE)))
            for value in taken:
                self.count("pop", value)
            takers[0].is_over = True
            takers[0].answer(taken)

    def forget(self) -> None:
        """Lose all data and waiting requests: become another store."""
        for content in (self.values, self.queues, self.held, self.waiting, self.taking):
            content.clear()

    def restart(self) -> dict[str, dict[str, bytes]]:
        """Break all connections at one moment, and keep the data; return the held keys, by client."""
        held = dict(self.held)
        self.held.clear()
        for keys in held.values():
            for key in keys:
                self.values.pop(key, None)
        for key in [key for keys in held.values() for key in keys]:
            for waiter in self.waiting.pop(key, ()):
                if not waiter.is_over and not self.try_to_answer(waiter):
                    self.waiting[key].append(waiter)
        return held

    def lose(self, client: str) -> dict[str, bytes]:
        """Break the client's connection; return its held keys."""
        held = self.held.pop(client, {})
        for key in held:
            self.put(key, None)
        return held
