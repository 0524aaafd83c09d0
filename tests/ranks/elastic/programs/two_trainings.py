"""Two trainings follow one another; in the middle of the second one, rank 1 dies once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import ronde
import ronde.elastic


@ronde.elastic.run
def train(state: ronde.elastic.ObjectState, dies: bool) -> int:
    while state.step < 6:
        if dies and state.step == 3 and ronde.rank() == 1 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        ronde.allreduce(1.0, name="x")
        state.step += 1
        state.commit()
    return ronde.size()


sizes = [train(ronde.elastic.ObjectState(step=0), dies) for dies in (False, True)]
sys.stdout.write(f"sizes {sizes}\n")
