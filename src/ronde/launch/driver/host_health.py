"""Decides which hosts take part in a job whose hosts come, go and fail. Pure.

Rules

1. Hosts that take part stay, even if the list of hosts is reordered. Others are started in the list's order while there
   is room up to `max_slots`; the last one may get fewer slots than it offers.
2. A host that is no longer offered, or offers another number of slots, is stopped; the latter is then started again.
3. A host that fails is set aside: the first time for the shorter cool-down, each further time for twice as long, up to
   the longer one. A host that then works for the longer cool-down has a clean record again. Without cool-downs a failed
   host is not started again.
4. With fewer than `min_slots` slots, the job waits for the patience if more slots can come: from the list, or from a
   host that is only set aside. Otherwise the job ends at once, and the reason names the failed host.
5. No host is started before the list has had `first_slots` slots; the job waits for them in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ronde.launch.hosts.host_list import Host, describe
from ronde.rendezvous.membership import HOW_TO_RESUME

__all__ = [
    "Effect",
    "Event",
    "GiveUp",
    "HostEnded",
    "HostFailed",
    "HostHealth",
    "JobOver",
    "Limits",
    "Offered",
    "HostNotice",
    "SetHostTimer",
    "Start",
    "StopHost",
    "HostTimer",
]

SECOND = 10**9


@dataclass(frozen=True, slots=True)
class Limits:
    """The user's limits.

    `cooldown_ns`: the shorter and the longer cool-down; None: a failure is final. `patience_ns`: how long to wait for
    slots. `is_changing`: a script is asked regularly for the list of hosts. `first_slots`: how many slots the list must
    have before the first host is started. `noun`: what messages call a host.
    """

    min_slots: int = 1
    max_slots: int | None = None
    cooldown_ns: tuple[int, int] | None = None
    patience_ns: int = 600 * SECOND
    is_changing: bool = False
    first_slots: int = 0
    noun: str = "host "


# Events


@dataclass(frozen=True, slots=True)
class Offered:
    """The current list of hosts."""

    hosts: tuple[Host, ...]


@dataclass(frozen=True, slots=True)
class HostFailed:
    """A host could not be started, or was lost; as far as the launcher can know, nothing runs there any more."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class HostEnded:
    """The agent of a host has ended on request."""

    name: str


@dataclass(frozen=True, slots=True)
class JobOver:
    """The job ends: start no more hosts."""


@dataclass(frozen=True, slots=True)
class HostTimer:
    """The time of the last `SetHostTimer` has come; a spurious one is harmless."""


Event = Offered | HostFailed | HostEnded | JobOver | HostTimer


# Effects


@dataclass(frozen=True, slots=True)
class Start:
    """Start an agent on the host with that number of workers; answered by `HostFailed` or `HostEnded`."""

    host: Host


@dataclass(frozen=True, slots=True)
class StopHost:
    """Ask the agent to leave; answered by `HostEnded`."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class HostNotice:
    """Show the text to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class SetHostTimer:
    """Send `HostTimer` at that time instead of any earlier setting; None: never."""

    at_ns: int | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the job: it cannot go on."""

    reason: str


Effect = Start | StopHost | HostNotice | SetHostTimer | GiveUp


@dataclass(slots=True)
class _HostRecord:
    """The record of one host."""

    running: Host | None = None
    of_slots: int = 0  # the slots that it offered when it was started
    stopping: bool = False
    since_ns: int = 0  # when it was last started
    failures: int = 0
    aside_until_ns: int = 0
    is_out: bool = False  # failed for good


@dataclass(slots=True, eq=False)
class HostHealth:
    """The hosts of one job. The first event is `Offered`, perhaps of no hosts yet."""

    limits: Limits
    _offered: tuple[Host, ...] = ()
    _records: dict[str, _HostRecord] = field(default_factory=dict)
    _last_failure: str = ""
    _starved_since_ns: int | None = None
    _has_begun: bool = False
    _is_over: bool = False

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Return the effects of the event, in the order in which to carry them out."""
        effects: list[Effect] = []
        match event:
            case Offered(hosts):
                self._offered = hosts
            case HostFailed(name, reason):
                effects += self._set_aside(now_ns, name, reason)
            case HostEnded(name):
                record = self._record(name)
                record.running, record.stopping = None, False
            case JobOver():
                self._is_over = True
            case HostTimer():
                pass
        return effects if self._is_over else [*effects, *self._decide(now_ns)]

    def running(self) -> tuple[Host, ...]:
        """Return the hosts that take part, without those that are stopping."""
        return tuple(r.running for r in self._records.values() if r.running and not r.stopping)

    def _record(self, name: str) -> _HostRecord:
        return self._records.setdefault(name, _HostRecord())

    def _set_aside(self, now_ns: int, name: str, reason: str) -> Iterator[Effect]:
        record = self._record(name)
        was_stopping = record.stopping
        record.running, record.stopping = None, False
        if was_stopping or self._is_over:
            return
        self._last_failure = f"{self.limits.noun}{name}: {reason}"
        if self.limits.cooldown_ns is None:
            record.is_out = True
            if self._may_recover():  # else the job ends for this reason
                yield HostNotice(self._last_failure)
            return
        shorter, longer = self.limits.cooldown_ns
        if record.failures and now_ns - record.since_ns >= longer:
            record.failures = 0
        wait_ns = min(shorter << min(record.failures, 62), longer)
        record.failures += 1
        record.aside_until_ns = now_ns + wait_ns
        yield HostNotice(f"{self._last_failure}; it is set aside for {wait_ns / SECOND:g} s")

    def _decide(self, now_ns: int) -> Iterator[Effect]:
        yield from self._stop_hosts()
        yield from self._start_hosts(now_ns)
        running = sum(host.slots for host in self.running())
        wakes = [
            self._records[host.name].aside_until_ns
            for host in self._offered
            if not self._takes_part(host) and now_ns < self._record(host.name).aside_until_ns
        ]
        if running >= self.limits.min_slots:
            self._starved_since_ns = None
        else:
            if self._starved_since_ns is None:
                self._starved_since_ns = now_ns
            deadline_ns = self._starved_since_ns + self.limits.patience_ns
            if now_ns >= deadline_ns or not self._may_recover():
                self._is_over = True
                yield GiveUp(self._reason())
                return
            wakes.append(deadline_ns)
        yield SetHostTimer(min(wakes, default=None))

    def _stop_hosts(self) -> Iterator[Effect]:
        offered = dict(self._offered)
        for name, record in self._records.items():
            if record.running and not record.stopping and record.of_slots != offered.get(name):
                now = f"offers {offered[name]} slots now" if name in offered else "is no longer offered"
                record.stopping = True
                yield StopHost(name, f"{name} {now}")

    def _start_hosts(self, now_ns: int) -> Iterator[Effect]:
        self._has_begun = (
            self._has_begun or sum(host.slots for host in self._offered) >= self.limits.first_slots
        )
        if not self._has_begun:
            return
        room = None
        if self.limits.max_slots is not None:
            room = self.limits.max_slots - sum(host.slots for host in self.running())
        for host in self._offered:
            record = self._record(host.name)
            if record.running or record.is_out or now_ns < record.aside_until_ns:
                continue
            slots = host.slots if room is None else min(host.slots, room)
            if slots <= 0:
                return
            room = None if room is None else room - slots
            record.running, record.of_slots, record.since_ns = Host(host.name, slots), host.slots, now_ns
            yield Start(record.running)

    def _takes_part(self, host: Host) -> bool:
        return self._record(host.name).running is not None

    def _may_recover(self) -> bool:
        if self.limits.is_changing:
            return True
        return sum(h.slots for h in self._offered if not self._record(h.name).is_out) >= self.limits.min_slots

    def _reason(self) -> str:
        if self._last_failure and not self._may_recover():
            return self._last_failure
        hosts = self.running() if self._has_begun else self._offered
        needed = self.limits.min_slots if self._has_begun else self.limits.first_slots
        last = f"; the last failure was {self._last_failure}" if self._last_failure else ""
        resume = f". {HOW_TO_RESUME}" if self._has_begun else ""
        waited = f" for {self.limits.patience_ns / SECOND:g} s" if self._may_recover() else ""
        return (
            f"there have been fewer than {needed} slots{waited}: {sum(host.slots for host in hosts)} on the hosts that "
            f"work ({describe(hosts) or 'none'}){last}{resume}"
        )
