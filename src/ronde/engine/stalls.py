"""The shell of `core.stall`: one thread per rank that sleeps until something it waits for becomes old.

The native side (cpp/engine/stalls.h) sleeps without the interpreter, answers other ranks without it, and knows what is
pending. This thread wakes when the oldest pending tensor reaches the limit, when another rank asks or answers, and when
something is submitted after a time in which nothing was pending.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ronde import _native
from ronde.comm.communicator import Communicator
from ronde.core.stall import (
    Abort,
    Answer,
    Ask,
    Asked,
    AskForStacks,
    Effect,
    Event,
    Inspector,
    Pending,
    Report,
    Stacks,
    Stall,
    Tensor,
)
from ronde.core.stall_report import abort_reason, describe, readable_stacks
from ronde.engine.stacks import Dump, formatted, main_ident
from ronde.errors import TimeoutError
from ronde.settings import Settings

__all__ = ["Arrivals", "StallWatch"]

_log = logging.getLogger("ronde.engine")

_SURVEY_NS = 5 * 10**9  # for answers that take milliseconds
_ASKED, _ANSWER, _STACKS_WANTED, _STACKS = 1, 2, 3, 4  # Stalls::Event::Type of cpp/engine/stalls.h


class Arrivals(NamedTuple):
    """How a rank's tensors arrived, of those that needed no negotiation.

    `tensors`: how many were executed; `last`: of how many it was the last rank of its host; `late_s`: how many seconds
    later than the rank that is earliest on average it submitted a tensor, on average.
    """

    rank: int
    host: str
    tensors: int
    last: int
    late_s: float


class StallWatch:
    """Looks for stalls from the engine's start to its end."""

    def __init__(
        self,
        comm: Communicator,
        cycle: _native.Cycle,
        settings: Settings,
        names: Sequence[int],
        engine: threading.Thread,
    ) -> None:
        """`names`: by rank, how messages call it. `engine`: its thread, which is no news in a report."""
        self._comm = comm
        self._names = names
        self._hosts = dict(zip(names, comm.hosts))  # by name
        self._shutdown_ns = settings.stall_shutdown_ns
        self._inspector = Inspector(
            comm.rank, comm.size, settings.stall_warning_ns, settings.stall_shutdown_ns
        )
        self._native = cycle.watch_stalls()
        self._dump = Dump.borrow() if comm.size > 1 else None
        self._thread = threading.Thread(target=self._run, name="ronde-stalls", daemon=True)
        if self._dump is not None:
            self._thread.start()
            shown = (main_ident(), engine.ident or 0, self._thread.ident or 0)
            preface = " ".join(map(hex, shown)) + "\n"
            self._native.use_stacks(self._dump.signal, self._dump.file, preface)

    def arrivals(self) -> list[Arrivals]:
        """Return how the tensors of each rank have arrived so far. Raises TimeoutError if a rank does not answer."""
        answers = self._native.survey(_SURVEY_NS)
        missing = tuple(rank for rank, answer in zip(self._names, answers) if answer is None)
        if missing:
            raise TimeoutError(f"ranks {missing} do not answer", "stragglers", _SURVEY_NS, missing)
        known = [answer for answer in answers if answer is not None]
        waited_s = [waited_ns / max(tensors, 1) / 1e9 for tensors, _, waited_ns in known]
        return [
            Arrivals(name, self._hosts[name], tensors, last, max(waited_s) - waited_s[rank])
            for rank, (name, (tensors, last, _)) in enumerate(zip(self._names, known))
        ]

    def stop(self) -> None:
        """End the thread, soon. Waits for nothing, so a signal handler may call it."""
        self._native.stop()

    def close(self) -> None:
        """End the thread. The communicator must still be open."""
        self.stop()
        if self._dump is not None:
            self._thread.join()
            self._native.use_stacks(0, -1, "")
            self._dump.give_back()

    def abandon(self) -> None:
        """In a forked child: the thread is the parent's, the signal handler would be our own."""
        self._native.abandon()
        if self._dump is not None:
            self._dump.give_back()

    # The thread

    def _run(self) -> None:
        try:
            self._inspect()
        except Exception:  # the job goes on without
            _log.exception("the inspection of stalls has failed")

    def _inspect(self) -> None:
        inspector = self._inspector
        while True:
            wake_ns = -1
            if not inspector.is_idle:
                self._step(None)
                wake_ns = -1 if inspector.wake_ns is None else inspector.wake_ns
            happened = self._native.next(wake_ns)
            if happened is None:
                return
            for event in happened:
                self._handle(event)

    def _handle(self, happened: tuple[Any, ...]) -> None:
        kind, rank, *rest = happened
        if kind == _STACKS_WANTED:
            self._native.answer_stacks(rest[0], rank, formatted())
        elif self._inspector.is_idle:
            return
        elif kind == _ASKED:
            self._step(Asked(rank, tuple(rest[1])))
        elif kind == _ANSWER:
            inquiry, calls, is_in_round, has = rest
            self._step(Answer(rank, inquiry, calls, is_in_round, tuple(has)))
        elif kind == _STACKS:
            inquiry, text, is_raw = rest
            told = text.decode(errors="replace")
            self._step(Stacks(rank, inquiry, readable_stacks(told) if is_raw and told else told))

    def _step(self, event: Event | None) -> None:
        now_ns = time.monotonic_ns()
        tensors, next_ns = self._native.look(now_ns - self._inspector.old_ns, self._inspector.known)
        pending = Pending([Tensor(*each) for each in tensors], next_ns)
        for effect in self._inspector.step(now_ns, pending, event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Ask(inquiry, ids):
                self._native.ask(inquiry, ids)
            case AskForStacks(inquiry, rank):
                self._native.ask_for_stacks(inquiry, rank)
            case Report(stall):
                states = self._states(stall)
                _log.warning("%s", describe(stall.renamed(self._names), self._hosts, states))
            case Abort(stall):
                self._comm.abort(abort_reason(stall.renamed(self._names), self._hosts, self._shutdown_ns))

    def _states(self, stall: Stall) -> dict[int, str]:
        """What the system says of silent ranks on this host, by name."""
        states = {}
        for rank in stall.silent:
            if pid := self._native.process_of(rank):
                states[self._names[rank]] = f"its process {pid} {_state(pid)}"
        return states


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "is not to be seen from here"
    meaning = {
        "T": "is stopped (SIGSTOP)",
        "t": "is stopped by a debugger",
        "D": "waits for a device or a file system, and cannot be interrupted",
        "Z": "has ended",
    }
    return f"{meaning.get(letter, 'is alive')} (state {letter})"
