"""Decides by which address the other hosts of a job reach each host: the ring probe. Pure.

1. The hosts form a ring, in the order of their first agents. The first agent of each host probes; the others use its
   result.
2. A host offers the addresses of its interfaces, the likeliest first: the one that leads to the driver, then those of
   the same interface, then the rest. An IPv4 link-local address counts only if there is no other.
3. The host before it in the ring tries all of them at once. Only an answer of this host with the job's key counts:
   bridges of containers and private networks have the same addresses on many machines.
4. The likeliest address that answers is the host's. Once one has answered, likelier ones have `HEAD_START_NS`.
5. If none answers within `TRY_NS`, the probe has failed, and the reason names both hosts and every address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

__all__ = [
    "HEAD_START_NS",
    "TRY_NS",
    "HostOffer",
    "OfferedAddress",
    "ProbeEdge",
    "RingPlan",
    "likely_first",
    "plan_ring",
]

TRY_NS = 5 * 10**9
HEAD_START_NS = 10**9 // 2
MOST_ADDRESSES = 32  # a machine with many containers has hundreds
LINK_LOCAL = "169.254."


@dataclass(frozen=True)
class RingPlan:
    """The part of one agent. `host`, `next_host`: positions in the ring. `interfaces`: those to offer; empty: all."""

    host: int
    next_host: int
    probes: bool
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class OfferedAddress:
    """An address at which a host listens for the probe, and the interface that has it."""

    interface: str
    address: str
    port: Annotated[int, range(1, 1 << 16)]


@dataclass(frozen=True)
class HostOffer:
    """What a host offers to the one before it. `name`: of the host, for messages."""

    name: str
    addresses: tuple[OfferedAddress, ...]


def plan_ring(hosts: Sequence[str], interfaces: Sequence[str] = ()) -> tuple[RingPlan | None, ...]:
    """Return the part of each agent; None on a single host. `hosts`: an identifier of each agent's host."""
    ring = list(dict.fromkeys(hosts))
    if len(ring) < 2:
        return (None,) * len(hosts)
    places = {host: place for place, host in enumerate(ring)}
    first = {host: agent for agent, host in reversed(list(enumerate(hosts)))}
    return tuple(
        RingPlan(
            host=places[host],
            next_host=(places[host] + 1) % len(ring),
            probes=first[host] == agent,
            interfaces=tuple(interfaces),
        )
        for agent, host in enumerate(hosts)
    )


def likely_first(found: Sequence[tuple[str, str]], towards_driver: str) -> list[tuple[str, str]]:
    """Return the interfaces and addresses to offer, in order.

    `towards_driver`: the address of this host from which packets to the driver leave.
    """
    usable = [each for each in found if not each[1].startswith(LINK_LOCAL)] or found
    interface = next((name for name, address in usable if address == towards_driver), "")
    return sorted(usable, key=lambda each: (each[1] != towards_driver, each[0] != interface))[:MOST_ADDRESSES]


@dataclass(eq=False)
class ProbeEdge:
    """What a host finds out about the addresses of the next one. It began at `began_ns`; `name`: of the host itself."""

    name: str
    offer: HostOffer
    began_ns: int
    _answered_ns: int | None = None  # when the first one answered
    _problems: dict[int, str] = field(default_factory=dict)  # by index; empty: answered

    def note_result(self, index: int, problem: str, now_ns: int) -> None:
        """Note that an address has answered, or why it has not (`problem`)."""
        self._problems[index] = problem
        if not problem and self._answered_ns is None:
            self._answered_ns = now_ns

    @property
    def deadline_ns(self) -> int:
        """When to stop waiting for results."""
        end_ns = self.began_ns + TRY_NS
        return end_ns if self._answered_ns is None else min(end_ns, self._answered_ns + HEAD_START_NS)

    @property
    def is_decided(self) -> bool:
        """Whether no further result can change the address."""
        for index in range(len(self.offer.addresses)):
            if self._problems.get(index, "unknown") == "":
                return True
            if index not in self._problems:
                return False
        return True

    @property
    def address(self) -> str:
        """The likeliest address that has answered; empty if none has."""
        answered = (
            each for index, each in enumerate(self.offer.addresses) if self._problems.get(index) == ""
        )
        return next((each.address for each in answered), "")

    def describe_failure(self) -> str:
        """Return a sentence that says which addresses were tried, and why each of them failed."""
        silence = f"no answer within {TRY_NS / 1e9:g} s"
        tried = (
            "it listens nowhere"
            if not self.offer.addresses
            else "; ".join(
                f"{each.address} ({each.interface}): {self._problems.get(index, silence)}"
                for index, each in enumerate(self.offer.addresses)
            )
        )
        return (
            f"{self.name} cannot reach {self.offer.name}: {tried}; allow TCP connections between these hosts, or name "
            "a network interface that connects them"
        )
