from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ronde.engine.negotiation import KEPT_USES, ResponseCache


def test_slots_are_given_in_order_and_the_least_recently_used_one_goes() -> None:
    cache = ResponseCache(3)
    assert [cache.add(name) for name in "abc"] == [0, 1, 2]
    for _ in range(KEPT_USES * 3 - 1):
        cache.use(2)
        cache.use(0)
    assert cache.make_room() == 1
    assert cache.make_room() is None, "there is room already"
    assert cache.add("d") == 1
    assert cache.names() == {2: "c", 0: "a", 1: "d"}
    assert list(cache.names()) == [2, 0, 1]


def test_a_step_with_more_names_than_slots_finds_most_of_them_again() -> None:
    cache = ResponseCache(100)
    step = [f"gradient {number}" for number in range(110)]
    for number in range(10):
        cached = {name: slot for slot, name in cache.names().items()}
        hits = [name for name in step if name in cached]
        assert len(hits) == (100 if number else 0)
        for name in hits:
            cache.use(cached[name])
        for name in step:
            if name not in cached:
                assert cache.make_room() is None
                cache.add(name)


def test_names_that_are_not_used_any_more_make_room() -> None:
    cache = ResponseCache(4)
    for name in "abcd":
        cache.add(name)
    for _ in range(KEPT_USES + 1):
        for name in "wxyz":
            cache.remove(name)
            cache.make_room()
            cache.add(name)
    assert sorted(cache.names().values()) == list("wxyz")


def test_a_name_that_is_removed_gives_its_slot_back() -> None:
    cache = ResponseCache(2)
    cache.add("a")
    cache.add("b")
    assert cache.remove("a") == 0
    assert cache.remove("a") is None
    assert cache.make_room() is None
    assert cache.add("c") == 0


def test_without_slots_nothing_is_cached() -> None:
    cache = ResponseCache(0)
    assert cache.make_room() is None
    assert cache.add("a") == -1
    assert cache.remove("a") is None
    assert cache.names() == {}


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity=-1 is invalid"):
        ResponseCache(-1)
    cache = ResponseCache(2)
    cache.add("a")
    with pytest.raises(ValueError, match="'a' is cached already"):
        cache.add("a")
    with pytest.raises(ValueError, match=r"slot 1 .* holds nothing"):
        cache.use(1)


class AgainstAModel(RuleBasedStateMachine):
    """A list of names, the least recently used one first, is the oracle."""

    @initialize(capacity=st.integers(0, 5))
    def start(self, capacity: int) -> None:
        self.cache = ResponseCache(capacity)
        self.order: list[str] = []
        self.slots: dict[str, int] = {}
        self.uses = 0
        self.last_use: dict[str, int] = {}

    @rule(name=st.sampled_from("abcdefgh"))
    def add(self, name: str) -> None:
        if name in self.slots:
            return
        oldest = self.order[0] if self.order and len(self.order) == self.cache.capacity else None
        if oldest and self.uses - self.last_use[oldest] < KEPT_USES * self.cache.capacity:
            oldest = None
        assert self.cache.make_room() == (self.slots.pop(oldest) if oldest else None)
        self.order.remove(oldest) if oldest else None
        slot = self.cache.add(name)
        self.count_use(name)
        if len(self.order) < self.cache.capacity:
            assert slot not in self.slots.values()
            self.order.append(name)
            self.slots[name] = slot
        else:
            assert slot == -1

    @rule(name=st.sampled_from("abcdefgh"))
    def remove(self, name: str) -> None:
        assert self.cache.remove(name) == self.slots.pop(name, None)
        if name in self.order:
            self.order.remove(name)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.order))
        self.cache.use(self.slots[name])
        self.count_use(name)
        self.order.remove(name)
        self.order.append(name)

    def count_use(self, name: str) -> None:
        self.uses += 1
        self.last_use[name] = self.uses

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert list(self.cache.names().items()) == [(self.slots[name], name) for name in self.order]
        assert all(0 <= slot < self.cache.capacity for slot in self.slots.values())


TestAgainstAModel = AgainstAModel.TestCase


@given(st.integers(1, 4), st.lists(st.sampled_from("abcdef"), max_size=30))
def test_the_same_calls_give_the_same_slots(capacity: int, names: list[str]) -> None:
    def replay() -> list[object]:
        cache = ResponseCache(capacity)
        return [(cache.remove(name), cache.make_room(), cache.add(name)) for name in names]

    assert replay() == replay()
