"""The workers of this node without a place: performs what `ronde.launch.agent.reserve` decides."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial

from ronde.launch.agent.living_worker import LivingWorker
from ronde.launch.agent.reserve import Reserve, ReserveEffect, SetReserveTimer, StartReserve
from ronde.launch.agent.starter import Starter
from ronde.launch.agent.worker import signal_name
from ronde.launch.agent.worker_group_shell import unwatch_worker
from ronde.launch.launch_plan import LaunchPlan, plan_reserve
from ronde.launch.loop import Loop, Order
from ronde.launch.screen import OutputStream, Screen
from ronde.process.membership_channel import Awaits, Continues
from ronde.process.signals import SignalInbox

__all__ = ["ReserveShell"]


class ReserveShell:
    """The shell around one `Reserve`. `note_ready` is called when another worker waits for a place."""

    def __init__(
        self,
        loop: Loop,
        screen: Screen,
        starter: Starter,
        signals: SignalInbox,
        note_ready: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._screen = screen
        self._starter = starter
        self._signals = signals
        self._note_ready = note_ready
        self._reserve = Reserve()
        self._workers: dict[int, LivingWorker] = {}
        self._started = 0
        self._plan: LaunchPlan | None = None  # that of the present round
        self._number = 0
        self._is_closed = False

    @property
    def ready(self) -> int:
        """How many workers wait for a place."""
        return len(self._reserve.ready)

    def want(self, count: int, plan: LaunchPlan, number: int) -> None:
        """Keep this many workers in reserve during the round of this number and plan."""
        self._plan, self._number = plan, number
        self._perform(self._reserve.want(time.monotonic_ns(), count))

    def take_ready(self) -> LivingWorker | None:
        """Return a worker that waits for a place, which leaves the reserve; None without one."""
        key = self._reserve.take_ready()
        if key is None:
            return None
        worker = self._workers.pop(key)
        unwatch_worker(self._loop, worker)
        return worker

    def note_lost(self, lived_ns: int, took_part: bool) -> None:
        """Note that a worker with a place has ended: how long it had that, and whether it took part in a round."""
        self._reserve.note_lost(time.monotonic_ns(), lived_ns, took_part)

    def balance(self) -> None:
        """Read from the workers only while the launcher's streams accept output. Call this before each turn."""
        for worker in self._workers.values():
            for stream in worker.streams:
                pump = partial(self._pump, worker, stream)
                self._loop.watch(stream.fileno(), Order.OUTPUT, pump, wanted=not stream.held_up)

    def close(self) -> None:
        """Kill all workers in reserve. A second call does nothing."""
        self._is_closed = True
        self._loop.set_timer(self, None, self._wake_up)
        for worker in self._workers.values():
            self._discard(worker)
        self._workers.clear()

    def _wake_up(self) -> None:
        self._perform(self._reserve.wake_up(time.monotonic_ns()))

    def _perform(self, effects: list[ReserveEffect]) -> None:
        for effect in effects:
            match effect:
                case StartReserve():
                    self._start()
                case SetReserveTimer(at_ns):
                    self._loop.set_timer(self, at_ns, self._wake_up)

    def _start(self) -> None:
        if self._is_closed or self._plan is None:
            return
        key, self._started = self._started, self._started + 1
        plan = plan_reserve(self._plan, key)
        try:
            worker = self._starter.start_worker(plan, self._number, self._signals, has_channel=True)
        except InterruptedError:
            return  # the signal ends the job
        except OSError as error:
            self._note_end(key, f"could not be started: {error.strerror or error}")
            return
        self._workers[key] = worker
        self._reserve.note_started(key)
        assert worker.channel is not None
        self._loop.watch(worker.process.pidfd, Order.EXITS, partial(self._note_exit, key))
        self._loop.watch(worker.channel.fileno(), Order.RAISED, partial(self._read_channel, key))
        worker.streams = worker.output.streams(worker.process, self._screen.out, self._screen.err)

    def _read_channel(self, key: int) -> None:
        worker = self._workers[key]
        is_ready = False
        for message in worker.read_messages():
            if isinstance(message, Continues):
                worker.note_continues()
            is_ready = is_ready or isinstance(message, Awaits)
        if worker.channel is not None and worker.channel.has_ended:
            self._loop.unwatch(worker.channel.fileno())
        if is_ready:
            self._reserve.note_ready(key)
            self._note_ready()

    def _note_exit(self, key: int) -> None:
        worker = self._workers.pop(key)
        self._loop.unwatch(worker.process.pidfd)
        for stream in worker.streams:
            stream.drain()
        code = worker.process.reap()
        self._discard(worker, has_ended=True)
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        self._note_end(key, f"(pid {worker.process.pid}) {how} before it got a place")

    def _note_end(self, key: int, what: str) -> None:
        waits_ns = self._reserve.note_ended(time.monotonic_ns(), key)
        self._screen.tell(f"a spare worker {what}; the next one starts in {waits_ns / 1e9:g} s")
        self._wake_up()

    def _discard(self, worker: LivingWorker, has_ended: bool = False) -> None:
        """Kill what is left of a worker, and close what belongs to it."""
        for stream in list(worker.streams):
            self._close_stream(worker, stream)
        if not has_ended:
            unwatch_worker(self._loop, worker)
        worker.process.signal_group(signal.SIGKILL)
        if worker.channel is not None:
            self._loop.unwatch(worker.channel.fileno())
            worker.channel.close()

    def _pump(self, worker: LivingWorker, stream: OutputStream) -> None:
        if stream.pump() is None:
            self._close_stream(worker, stream)

    def _close_stream(self, worker: LivingWorker, stream: OutputStream) -> None:
        self._loop.unwatch(stream.fileno())
        worker.streams.remove(stream)
        stream.close()
