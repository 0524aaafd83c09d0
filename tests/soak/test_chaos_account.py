"""The account of a job under chaos finds what is planted into good facts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.soak.chaos_account import (
    check_losses,
    check_ranks,
    check_resources,
    check_rollbacks,
    check_samples,
    check_survivors,
    worlds_of,
)

Facts = dict[int, list[dict[str, Any]]]


class Story:
    """Facts of processes in the order in which they happen."""

    def __init__(self) -> None:
        self.facts: Facts = {}
        self._time = 0

    def add(self, pid: int, what: str, **facts: Any) -> None:
        self._time += 1
        self.facts.setdefault(pid, []).append({"what": what, "at": self._time, **facts})

    def world(self, name: str, pids: list[int], begin: int, end: int, done: int | None = None) -> None:
        """Steps from `begin` to `end`, of which those before `done` were done and committed by all."""
        for rank, pid in enumerate(pids):
            use = {"descriptors": 10, "threads": 3, "memory_kib": 50_000}
            self.add(pid, "enters", round=name, rank=rank, size=len(pids), step=begin, **use)
        for step in range(begin, end):
            for rank, pid in enumerate(pids):
                self.add(pid, "samples", round=name, step=step, samples=batch_of(step)[rank :: len(pids)])
            for rank, pid in enumerate(pids):
                if done is None or step < done:
                    facts = {"rank": rank, "size": len(pids)}
                    self.add(pid, "step", round=name, step=step, loss=100 - step, **facts)
                    self.add(pid, "commits", round=name, step=step + 1)


def batch_of(step: int) -> list[int]:
    return list(range(4 * step, 4 * step + 4))


def with_a_loss() -> Facts:
    """Three processes lose one in step 2, two go on from there, and a new one comes for the last step."""
    story = Story()
    story.world("a", [1, 2, 3], 0, 3, done=2)
    story.world("b", [1, 2], 2, 4)
    story.world("c", [1, 2, 4], 4, 5)
    for pid in (1, 2, 4):
        story.add(pid, "ends")
    return story.facts


def findings(facts: Facts) -> Iterator[str]:
    worlds = worlds_of(facts)
    yield from check_ranks(worlds)
    yield from check_samples(worlds, 5, batch_of, {3})
    yield from check_rollbacks(worlds)
    ended = {pid for pid, each in facts.items() if each[-1]["what"] == "ends"}
    yield from check_survivors(worlds, {3}, ended)
    yield from check_resources(worlds)
    yield from check_losses(facts, {step: 100 - step for step in range(5)})


def find(facts: Facts, what: str, step: int, **more: Any) -> dict[str, Any]:
    """Return the last such fact of process 1."""
    wanted = {"what": what, "step": step, **more}
    return [fact for fact in facts[1] if wanted.items() <= fact.items()][-1]


def test_a_good_account_has_no_findings() -> None:
    assert list(findings(with_a_loss())) == []


def test_a_sample_that_is_missing_or_repeated_is_found() -> None:
    facts = with_a_loss()
    find(facts, "samples", 3)["samples"].pop()
    assert [each[:31] for each in findings(facts)] == ["step 3: 1 samples are missing, "]
    facts = with_a_loss()
    find(facts, "samples", 3)["samples"].append(12)
    assert "1 were taken too often" in next(findings(facts))


def test_samples_of_an_attempt_that_was_rolled_back_do_not_count() -> None:
    facts = with_a_loss()
    find(facts, "samples", 2, round="a")["samples"].pop()
    assert list(findings(facts)) == []


def test_a_rank_that_is_a_batch_ahead_is_found() -> None:
    facts = with_a_loss()
    facts[1].remove(find(facts, "step", 4))
    assert "step 4: processes [1] have not done it" in list(findings(facts))


def test_a_lost_commit_is_found() -> None:
    facts = with_a_loss()
    for each in facts.values():
        for fact in each:
            if fact["what"] == "enters" and fact["round"] == "b":
                fact["step"] = 1
    assert "world 1 begins at step 1: commit 2 is lost" in list(findings(facts))


def test_different_views_of_a_world_are_found() -> None:
    facts = with_a_loss()
    find(facts, "enters", 4)["rank"] = 2
    assert "world 2: ranks [1, 2, 2] of {3}" in list(findings(facts))


def test_a_survivor_that_was_started_again_is_found() -> None:
    facts = with_a_loss()
    facts[5] = facts.pop(2)
    facts[2] = [fact for fact in facts[5] if fact.get("round") == "a"]
    facts[5] = [fact for fact in facts[5] if fact.get("round") != "a"]
    assert [each[:9] for each in findings(facts) if "survived" in each] == ["process 2"]


def test_other_bits_are_found() -> None:
    facts = with_a_loss()
    for pid in (1, 2):
        next(fact for fact in facts[pid] if fact["what"] == "step" and fact["step"] == 3)["loss"] += 1
    assert list(findings(facts)) == ["step 3: the loss differs from that of the undisturbed run"]


def test_growth_is_found() -> None:
    story = Story()
    for number in range(20):
        story.world(f"{number}", [1, 2], number, number + 1)
    assert list(check_resources(worlds_of(story.facts))) == []
    entries = [fact for fact in story.facts[1] if fact["what"] == "enters"]
    for number, fact in enumerate(entries):
        fact["descriptors"] += number
    assert [each[:24] for each in check_resources(worlds_of(story.facts))] == ["process 1: descriptors g"]
