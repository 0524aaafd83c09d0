"""Rank 1 dies or raises when the training ends: before the last rank has passed its last barrier, or after that."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import ronde
import ronde.elastic
from ronde.elastic.commit_barrier import BarrierKind, pass_barrier

in_barrier, ends_after_s = sys.argv[1] == "in_barrier", float(sys.argv[2])


def happens_first(name: str) -> bool:
    """Return whether this did not happen in an earlier process."""
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class State(ronde.elastic.ObjectState):
    """A state whose last rank loses the others when they have passed the last barrier."""

    def finish(self) -> None:
        if in_barrier and ronde.rank() == 2 and happens_first("lost"):
            pass_barrier(BarrierKind.END, self.step + 1, False)
            self._standing = self._standing._replace(point=self.step + 1)
            raise ronde.PeerLostError("rank 1 is lost")
        super().finish()


@ronde.elastic.run
def train(state: State) -> int:
    while state.step < 5:
        state.step += 1
        state.commit()
    return int(state.step)


result = train(State(step=0))
if ronde.rank() == 1 and happens_first("killed"):
    if sys.argv[1] == "raises":
        raise OSError("the disk is full")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(ends_after_s)
sys.stdout.write(f"done {result} {ronde.rank()} of {ronde.size()}\n")
