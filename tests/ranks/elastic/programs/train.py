"""A training whose result shows each sample that counted: what tests of losses run."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import ronde
import ronde.elastic
from ronde.elastic import ObjectState

SAMPLES = int(os.environ["SAMPLES"])
HOLD = os.environ.get("HOLD", "/")  # a file that lets the training go on in the middle
PAUSE_S = float(os.environ.get("PAUSE_S", "0.002"))


def say(**what: Any) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


@ronde.elastic.run
def train(state: ObjectState) -> None:
    """Count each sample, and go down a gradient with sums that have the same bits for every size of the world."""
    reports = iter([report])
    for batch in state.batches(
        (np.arange(SAMPLES), np.linspace(-1, 1, SAMPLES)), global_batch=12, micro_batch=2
    ):
        counts = np.zeros(SAMPLES)
        for indices, _ in batch:
            counts[indices] += 1
        state.counts += ronde.allreduce(counts, op=ronde.Sum, name="counts")
        state.weights -= 0.1 * batch.sum(lambda piece: gradient(state.weights, *piece), like=state.weights)
        time.sleep(PAUSE_S)
        state.commit()
        next(reports, int)()
        if state.counts.sum() >= SAMPLES // 2:
            hold(state)


def report() -> None:
    """Tell the test that this rank has made a step in a new world."""
    memory = Path("/proc/self/statm").read_text().split()[1]
    say(
        at_ns=time.monotonic_ns(), rank=ronde.rank(), size=ronde.size(), pid=os.getpid(),
        descriptors=len(os.listdir("/proc/self/fd")), memory_kb=4 * int(memory),
    )  # fmt: skip


def hold(state: ObjectState) -> None:
    """Wait for the test, which begins to change the members of the job now or has done so."""
    while not ronde.allreduce(np.array([os.path.exists(HOLD)]), op=ronde.Min, name="hold")[0]:
        time.sleep(0.002)
        state.commit()


def gradient(
    weights: np.ndarray[Any, Any], indices: np.ndarray[Any, Any], values: np.ndarray[Any, Any]
) -> Any:
    """Return a gradient that rounding shows in."""
    return (np.tanh(np.outer(values, weights)) / (1 + indices[:, np.newaxis])).sum(axis=0)


def main() -> None:
    """Train, and tell the result."""
    state = ObjectState(counts=np.zeros(SAMPLES), weights=np.linspace(1, 2, 50))
    train(state)
    counters = ronde.elastic.goodput()
    say(
        done=state.commit_number, counts=sorted(set(state.counts.tolist())), weights=state.weights.tobytes().hex(),
        recoveries=counters.recoveries, changes=counters.changes, steps=counters.steps, lost=counters.steps_lost,
        share=counters.share, pid=os.getpid(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
