"""The shell of `stall.inspector`: one thread per process, which sleeps until an operation has waited too long.

The native side (cpp/waiting/stalls.h) sleeps and answers other ranks without the interpreter, and knows what is
pending. The thread wakes when the oldest pending call or tensor of any communicator reaches its limit, when another
rank asks or answers, and when an operation begins while none was pending.

Every communicator has a `StallWatch` for the calls of its program; an engine has one for its tensors instead. The
thread starts with the first watch and ends with the last.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from ronde import _native
from ronde.settings import Settings
from ronde.stall.inspector import (
    Abort,
    Answer,
    AskAboutTensors,
    AskAboutWaits,
    Asked,
    AskForStacks,
    Blocked,
    Effect,
    Event,
    Inspector,
    Pending,
    Report,
    Stacks,
    Stall,
    Tensor,
)
from ronde.stall.reports import Subject, abort_reason, describe_stall, readable_stacks
from ronde.stall.stacks import StackDump, describe_children, format_stacks, main_thread_id, places_of_waits

__all__ = ["StallWatch", "hide_thread", "is_waiting", "keeping_thread"]

_ASKED, _ANSWER, _STACKS_WANTED, _STACKS = 1, 2, 3, 4  # StallHub::Event::Type of cpp/waiting/stall_hub.h
_LATE_NS = 10**9 // 2  # a thread that wakes later than this had to wait for the interpreter's lock
_LONGEST_END_S = 5.0


class StallWatch:
    """Looks for stalls on one communicator until `close`."""

    def __init__(
        self,
        make_native: Callable[[_native.StallHub], _native.Stalls],
        subject: Subject,
        log: logging.Logger,
        settings: Settings,
        rank: int,
        hosts: Sequence[str],
        names: Sequence[int],
    ) -> None:
        """`hosts`: by rank. `names`: by rank, its number in messages."""
        self._subject, self._log = subject, log
        self._names = names
        self._hosts = dict(zip(names, hosts))  # by name
        self._shutdown_ns = settings.stall_shutdown_ns
        self.inspector = Inspector(rank, len(hosts), settings.stall_warning_ns, settings.stall_shutdown_ns)
        self._inspection: _Inspection | None = None
        if len(hosts) == 1:  # a single rank never waits
            self.native = make_native(_native.StallHub())
            return
        with _Inspection.lock:
            self._inspection = _Inspection.of_this_process()
            self.native = make_native(self._inspection.native)
            self._inspection.add_watch(self)

    def close(self, waits: bool = True) -> None:
        """Stop looking. `waits`: for the end of the thread, if this is the last watch. A second call does nothing."""
        inspection, self._inspection = self._inspection, None
        if inspection is None:
            return
        with _Inspection.lock:
            self.native.close()
            ended = inspection.remove_watch(self.native.member)
        if ended and waits:
            inspection.join_thread()

    def abandon(self) -> None:
        """In a forked child: the connections and the thread are the parent's."""
        self._inspection = None
        self.native.abandon()

    def __del__(self) -> None:
        if hasattr(self, "native"):
            self.close(waits=False)

    # The thread

    def handle_message(self, kind: int, rank: int, rest: Sequence[Any]) -> None:
        """Handle a message of another rank, which the native side has received."""
        if kind == _STACKS_WANTED:
            inspection = self._inspection
            children = [] if inspection is None else inspection.describe_children()
            self.native.answer_stacks(rest[0], rank, "\n".join([format_stacks(), *children]))
        elif self.inspector.is_idle:
            return
        elif kind == _ASKED:
            self.inspect(Asked(rank, tuple(rest[1])))
        elif kind == _ANSWER:
            inquiry, calls, is_in_round, has, state, (where, *what) = rest
            text = state.decode(errors="replace")
            blocked = Blocked(where, *what) if where else None
            self.inspect(Answer(rank, inquiry, calls, is_in_round, tuple(has), text, blocked))
        elif kind == _STACKS:
            inquiry, text, is_raw = rest
            stacks = text.decode(errors="replace")
            self.inspect(Stacks(rank, inquiry, readable_stacks(stacks) if is_raw and stacks else stacks))

    def inspect(self, event: Event | None = None) -> None:
        """Decide what to do now, and do it."""
        now_ns = time.monotonic_ns()
        tensors, next_ns = self.native.look(now_ns - self.inspector.old_ns, self.inspector.known)
        pending = Pending([Tensor(*each) for each in tensors], next_ns)
        for effect in self.inspector.step(now_ns, pending, event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case AskAboutTensors(inquiry, ids, is_suspicion):
                self.native.ask(inquiry, ids, not is_suspicion)
            case AskAboutWaits(inquiry, blocked):
                self.native.ask_about(inquiry, blocked)
            case AskForStacks(inquiry, rank):
                self.native.ask_for_stacks(inquiry, rank)
            case Report(stall):
                renamed = stall.renamed(self._names)
                states, here = self._states_of_silent_ranks(stall), places_of_waits()
                text = describe_stall(renamed, self._hosts, states, self._subject, here, self._shutdown_ns)
                self._log.warning("%s", text)
            case Abort(stall):
                renamed = stall.renamed(self._names)
                self.native.abort(abort_reason(renamed, self._hosts, self._shutdown_ns, self._subject))

    def _states_of_silent_ranks(self, stall: Stall) -> dict[int, str]:
        """Return the process states of silent ranks on this host, by name."""
        states = {}
        for rank in stall.silent:
            if pid := self.native.process_of(rank):
                states[self._names[rank]] = f"its process {pid} {_process_state(pid)}"
        return states


def is_waiting() -> bool:
    """Return whether this process waits for other ranks: in a call, or with a tensor that has not ended.

    A call on a communicator that a native thread makes is known only when it has waited for a second.
    """
    if places_of_waits():
        return True
    with _Inspection.lock:
        inspection = _Inspection.only
        watches = [] if inspection is None else inspection.living_watches()
        return any(
            items or next_ns >= 0 for items, next_ns in (watch.native.look(0, ()) for watch in watches)
        )


@contextmanager
def keeping_thread() -> Iterator[None]:
    """Keep the thread of this process for watches that begin within the block."""
    with _Inspection.lock:
        inspection = _Inspection.of_this_process()
        inspection.keepers += 1
    try:
        yield
    finally:
        with _Inspection.lock:
            inspection.keepers -= 1
            ended = inspection.end_if_unused()
        if ended:
            inspection.join_thread()


class _Inspection:
    """The thread and the watches it serves. Everything except the thread's sleep happens with `lock` held."""

    only: ClassVar[_Inspection | None] = None
    lock: ClassVar[Any] = threading.RLock()

    @classmethod
    def of_this_process(cls) -> _Inspection:
        """Return the inspection of this process."""
        cls.only = cls.only or _Inspection()
        return cls.only

    def __init__(self) -> None:
        self.native = _native.StallHub()
        self._watches: dict[int, weakref.ref[StallWatch]] = {}
        self._dump = StackDump()
        self._hidden: list[int] = []
        self.keepers = 0
        self._thread = threading.Thread(target=self._run, name="ronde-stalls", daemon=True)
        self._thread.start()
        self.hide_from_stacks(self._thread)

    def hide_from_stacks(self, thread: threading.Thread) -> None:
        """Leave a thread out of the stacks that the signal handler writes."""
        self._hidden.append(thread.ident or 0)
        preface = " ".join(map(hex, (main_thread_id(), *self._hidden))) + "\n"
        self.native.use_stacks(self._dump.signal, self._dump.file, preface)

    def add_watch(self, watch: StallWatch) -> None:
        """Serve a watch."""
        self._watches[watch.native.member] = weakref.ref(watch)
        self.native.wake()

    def remove_watch(self, member: int) -> bool:
        """Stop serving a watch. Return whether it was the last one, so that the thread ends."""
        return self._watches.pop(member, None) is not None and self.end_if_unused()

    def living_watches(self) -> list[StallWatch]:
        """Return the watches that it serves."""
        return [watch for each in self._watches.values() if (watch := each()) is not None]

    def end_if_unused(self) -> bool:
        """End the thread if it serves no watch; return whether it does."""
        if self._watches or self.keepers or _Inspection.only is not self:
            return False
        _Inspection.only = None
        self.native.use_stacks(0, -1, "")
        self.native.stop()
        return True

    def join_thread(self) -> None:
        """Wait until the thread has ended, for a limited time: a log handler of the program may block it."""
        if threading.current_thread() is not self._thread:
            self._thread.join(_LONGEST_END_S)

    def abandon(self) -> None:
        """In a forked child: leave the parent's thread alone."""
        self.native.abandon()
        self._dump.leave_to_parent()

    def describe_children(self) -> list[str]:
        """Return lines with the command and the stacks of each child process."""
        return describe_children(self._dump.signal, self._dump.childrens_file)

    def _run(self) -> None:
        wake_ns = -1
        while (happened := self.native.next(wake_ns)) is not None:
            with _Inspection.lock:
                if 0 <= wake_ns < time.monotonic_ns() - _LATE_NS:
                    self._postpone_inspections()
                for member, kind, rank, *rest in happened:
                    self._guarded(member, lambda watch: watch.handle_message(kind, rank, rest))  # noqa: B023 (at once)
                wake_ns = self._inspect_all()
        self._dump.close()

    def _postpone_inspections(self) -> None:
        for each in self._watches.values():
            if (watch := each()) is not None:
                watch.inspector.postpone_inspection(time.monotonic_ns())

    def _inspect_all(self) -> int:
        """Let all watches look for stalls; return when the first of them wants to look again, or -1."""
        times = []
        for member in list(self._watches):
            self._guarded(member, _inspect_unless_idle)
            watch = self._watches[member]() if member in self._watches else None
            if watch is not None and watch.inspector.wake_ns is not None:
                times.append(watch.inspector.wake_ns)
        return min(times, default=-1)

    def _guarded(self, member: int, do: Callable[[StallWatch], None]) -> None:
        watch = self._watches[member]() if member in self._watches else None
        if watch is None:
            return
        try:
            do(watch)
        except Exception:  # the job continues without reports
            logging.getLogger(__name__).exception("the inspection of stalls has failed")
            self.remove_watch(member)


def hide_thread(thread: threading.Thread) -> None:
    """Leave one of Ronde's threads out of the stacks that reports show."""
    with _Inspection.lock:
        if _Inspection.only is not None:
            _Inspection.only.hide_from_stacks(thread)


def _inspect_unless_idle(watch: StallWatch) -> None:
    if not watch.inspector.is_idle:
        watch.inspect()


def _process_state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "cannot be seen from here"
    meaning = {
        "T": "is stopped (SIGSTOP)",
        "t": "is stopped by a debugger",
        "D": "waits for a device or a file system and cannot be interrupted",
        "Z": "has ended",
    }
    return f"{meaning.get(letter, 'is alive')} (state {letter})"


def _forget_parents() -> None:
    """In a forked child, forget the parent's inspection."""
    _Inspection.lock = threading.RLock()
    if _Inspection.only is not None:
        _Inspection.only.abandon()
        _Inspection.only = None


os.register_at_fork(after_in_child=_forget_parents)
