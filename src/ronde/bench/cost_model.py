"""The expected times of collectives on a machine, from the bytes that they move and the machine's rates. Pure.

The times of an algorithm's phases add up. Large arrays are the exception: some pieces cross between hosts while others
move through memory. `ronde bench` prints the expected times next to the measured ones, and a test compares the
algorithms that the data plane chooses with the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from ronde.bench.collective_traffic import (
    JobShape,
    Traffic,
    least_traffic,
    traffic_of,
)

__all__ = ["Prediction", "Rates", "least_seconds", "predict", "seconds_of"]


@dataclass(frozen=True)
class Rates:
    """How fast a machine is; of hosts that differ, the slowest.

    Attributes:
        memory_bytes_per_s: What all ranks of a host together move to and from memory, in whole lines.
        exchange_s: The time in which all ranks of a host synchronize.
        link_bytes_per_s: The rate at which a host sends while it receives as much. 0: there is one host.
        message_s: The time that a small message is on its way between two hosts.
        frame_s: The processor time of sending or receiving one message.
    """

    memory_bytes_per_s: float
    exchange_s: float
    link_bytes_per_s: float = 0.0
    message_s: float = 0.0
    frame_s: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """The expected time of one call. `share`: of the shortest time that any algorithm could take, from 0 to 1."""

    algorithm: str
    seconds: float
    share: float


def seconds_of(traffic: Traffic, rates: Rates) -> float:
    """Return the time in which a machine moves this."""
    across = (traffic.busiest_bytes + traffic.lead_bytes) / rates.link_bytes_per_s if traffic.steps else 0.0
    inside = traffic.memory_bytes / rates.memory_bytes_per_s
    # The first piece crosses alone, or the last one moves through memory alone.
    moving = max(across, inside) + min(across, inside) / traffic.pieces
    waits = (
        traffic.steps * rates.message_s
        + traffic.frames * rates.frame_s
        + traffic.exchanges * rates.exchange_s
    )
    return moving + waits


def least_seconds(operation: str, shape: JobShape, nbytes: int, rates: Rates) -> float:
    """Return the time that no algorithm can undercut: links, memory and waits, as if all went on at the same time."""
    least = least_traffic(operation, shape, nbytes)
    only_links = Traffic(busiest_bytes=least.busiest_bytes, steps=least.steps)
    only_memory = Traffic(memory_bytes=least.memory_bytes)
    only_waits = Traffic(steps=least.steps, exchanges=least.exchanges)
    return max(seconds_of(part, rates) for part in (only_links, only_memory, only_waits))


def predict(
    operation: str, algorithm: str, shape: JobShape, nbytes: int, rates: Rates, is_symmetric: bool = False
) -> Prediction:
    """Return the time that the algorithm should take."""
    seconds = seconds_of(traffic_of(operation, algorithm, shape, nbytes, is_symmetric), rates)
    least = least_seconds(operation, shape, nbytes, rates)
    return Prediction(algorithm, seconds, least / seconds if seconds > 0 else 1.0)
