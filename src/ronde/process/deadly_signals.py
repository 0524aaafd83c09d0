"""Says by which signal this process dies, where the signal's default action kills it without a word.

Schedulers announce preemption by such signals: Slurm's `--signal=USR1` reaches `ronde run` like any other process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection
from types import FrameType

__all__ = ["explain_deadly_signals"]

_DEADLY = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
    *(signal.SIGXCPU, signal.SIGXFSZ, signal.SIGIO, signal.SIGPWR),
)


def explain_deadly_signals(handled: Collection[int]) -> None:
    """Let this process print a line before it dies by a signal that is neither `handled` otherwise nor ignored."""
    for signum in _DEADLY:
        if signum not in handled and signal.getsignal(signum) == signal.SIG_DFL:
            signal.signal(signum, _explain)


def _explain(signum: int, frame: FrameType | None) -> None:
    name = signal.Signals(signum).name
    line = f"ronde: killed by {name}; --signals-to-handle {name} passes it on to the workers, which may save state\n"
    try:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
    except OSError:
        pass  # nobody reads it
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
