"""A training on several streams, whose result shows each sample that counted. Rank 1 dies once, within a step."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ronde
import ronde.elastic
from ronde.elastic import ObjectState

DIED, GO_ON = Path(sys.argv[1]), sys.argv[2]
LENGTHS = (30, 7, 50, 0, 41, 30, 22, 60)
opened: list[tuple[int, int]] = []  # by this process: a stream, and the sample with which it began


def say(**what: Any) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def source(stream: int) -> Callable[[int], Iterator[int]]:
    """Return what opens a stream of samples, which are numbers."""

    def read(start: int) -> Iterator[int]:
        opened.append((stream, start))
        yield from range(sum(LENGTHS[:stream]) + start, sum(LENGTHS[: stream + 1]))

    return read


@ronde.elastic.run
def train(state: ObjectState) -> None:
    """Count each sample."""
    is_first = True
    for samples in state.streams([source(stream) for stream in range(len(LENGTHS))], global_batch=10):
        counts = np.zeros(sum(LENGTHS))
        counts[samples] += 1
        state.counts += ronde.allreduce(counts, op=ronde.Sum, name="counts")
        state.step += 1
        if state.step == 6 and ronde.rank() == 1 and not DIED.exists():
            DIED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
        if is_first:
            say(size=ronde.size())
        is_first = False
        # The test adds a rank in the meantime, which ends this call.
        while state.step >= 15 and not ronde.allreduce(np.array([os.path.exists(GO_ON)]), op=ronde.Min)[0]:
            state.commit()


state = ObjectState(counts=np.zeros(sum(LENGTHS)), step=0)
train(state)
say(done=state.step, counts=state.counts.tolist(), opened=opened, lost=ronde.elastic.goodput().steps_lost)
