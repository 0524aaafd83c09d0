"""What ranks do in the tests of wrong and of stuck ranks."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import numpy as np
from tests.unit.elastic.parts import Arrays, Shard

import ronde
from ronde.elastic.state_check import StateCheck
from ronde.elastic.step_times import StepRule
from ronde.elastic.step_watch import StepWatch

__all__ = ["compute_wrongly", "differ_rightly", "end_early", "get_stuck"]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def compute_wrongly(wrong: dict[int, tuple[int, ...]]) -> Any:
    """Commit six times; some ranks flip a bit before some commits. Return the weights, and what was logged."""
    ronde.init()
    world, lines = ronde.world(), Lines()
    logging.getLogger("ronde.elastic").addHandler(lines)
    check = StateCheck(every=2)
    model, shard = Arrays(weights=np.zeros(100_000)), Shard(values=np.full(3, world.rank))
    try:
        for commit in range(1, 7):
            model.live["weights"] += 1
            if world.rank in wrong.get(commit, ()):
                model.live["weights"].view(np.uint64)[77] ^= 1 << 50
            model.save()
            check.check(commit, {"model": model, "shard": shard}, world)
    except (ronde.MismatchError, ronde.PeerLostError) as error:
        return type(error).__name__, str(error), lines.lines
    return model.live["weights"].tobytes(), lines.lines


def differ_rightly() -> list[str]:
    """Commit with a part that describes the same state differently on each rank. Return what was logged."""
    ronde.init()
    world, lines = ronde.world(), Lines()
    logging.getLogger("ronde.elastic").addHandler(lines)
    check, sampler = StateCheck(every=1), Arrays(records=np.full(3, float(world.rank)))
    sampler.may_differ = True  # type: ignore[attr-defined]
    sampler.save()
    check.check(1, {"sampler": sampler}, world)
    return lines.lines


def get_stuck(stuck: int, waits_in_engine: bool) -> str:
    ronde.init()
    rule = StepRule(factor=5, least_ns=300 * 10**6, num_steps=5)
    watch = StepWatch(rule, lambda: f"rank {ronde.rank()}")
    x = np.ones(4)
    try:
        with watch.training():
            for step in range(20):
                if step == 15 and ronde.rank() == stuck:
                    get_stuck_here()
                if waits_in_engine:
                    ronde.allreduce(x, name="x")
                else:
                    ronde.world().allreduce(x)
                time.sleep(0.01)
                watch.note_step()
    except ronde.PeerLostError as error:
        return str(error)
    return "finished"


def get_stuck_here() -> None:
    threading.Event().wait(60)


def end_early() -> str:
    """Let rank 0 end the training while the others commit. Return the error."""
    ronde.init()
    state = ronde.elastic.ObjectState(step=0)
    state.commit()
    try:
        if ronde.rank() == 0:
            state.finish()
        else:
            state.commit()
    except ronde.MismatchError as error:
        return str(error)
    finally:
        ronde.shutdown()
    return ""
