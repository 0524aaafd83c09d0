"""Counts the bytes that each operation moves between hosts, beside the least that any algorithm can move
and what the model of cost (`bench/collective_traffic`) says.

    python benchmarks/wire_bytes.py                            # as root: the hosts are network namespaces
    python benchmarks/wire_bytes.py --hosts 3 --ranks-per-host 4 --mib 8

A host sends what the network interface of its namespace counts, with the headers of TCP, IP and Ethernet. Bytes do not
depend on the load of the machine. benchmarks/README.md tells how to read the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import ronde
from ronde.bench.collective_traffic import JobShape, least_traffic, traffic_of, usual_algorithm
from ronde.testing import hosts

CALLS = 4  # of each operation
ROOT = 0


@dataclass(frozen=True)
class Shape:
    """`count` float32 elements: the array of a rank, in an all-gather and a gather the arrays of all together."""

    num_hosts: int
    ranks_per_host: int
    count: int

    @property
    def ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    @property
    def nbytes(self) -> int:
        return self.count * np.dtype(np.float32).itemsize

    @property
    def job(self) -> JobShape:
        return JobShape(self.num_hosts, self.ranks_per_host)

    def least_bytes(self, operation: str) -> int:
        """Return what all hosts together must send, by any algorithm."""
        return least_traffic(operation, self.job, self.nbytes).sent_bytes

    def modelled_bytes(self, operation: str) -> int:
        """Return what they should send by Ronde's algorithm."""
        algorithm = usual_algorithm(operation, self.job, self.nbytes)
        return traffic_of(operation, algorithm, self.job, self.nbytes).sent_bytes


OPERATIONS: dict[str, Callable[[Any, Any, Shape], object]] = {
    "allreduce": lambda world, x, _: world.allreduce(x, op=ronde.Sum),
    "reducescatter": lambda world, x, _: world.reducescatter(x, op=ronde.Sum),
    "allgather": lambda world, x, shape: world.allgather(x[: shape.count // shape.ranks]),
    "broadcast": lambda world, x, _: world.broadcast(x, ROOT),
    "reduce": lambda world, x, _: world.reduce(x, ROOT, op=ronde.Sum),
    "gather": lambda world, x, shape: world.gather(x[: shape.count // shape.ranks], ROOT),
    "scatter": lambda world, x, _: world.scatter(x if world.rank == ROOT else None, ROOT),
    "alltoall": lambda world, x, _: world.alltoall(x),
}


def sent_bytes() -> int:
    """Return what the interface of this host has sent so far."""
    with open("/proc/self/net/dev") as file:
        fields = next(line for line in file if line.strip().startswith("eth0:")).split()
    return int(fields[9])


def count_bytes(num_hosts: int, ranks_per_host: int, count: int) -> dict[str, int]:
    """On all ranks: return what this host sends in one call of each operation; 0 but on one rank of each host."""
    shape = Shape(num_hosts, ranks_per_host, count)
    ronde.init()
    world: Any = ronde.world()
    x = np.ones(count, np.float32)
    counts = {}
    for name, operation in OPERATIONS.items():
        operation(world, x, shape)  # grows buffers and windows
        world.barrier()
        before = sent_bytes()
        world.barrier()
        for _ in range(CALLS):
            operation(world, x, shape)
        world.barrier()
        counts[name] = (sent_bytes() - before) // CALLS if ronde.local_rank() == 0 else 0
        world.barrier()
    ronde.shutdown()
    return counts


def measure(shape: Shape) -> dict[str, int]:
    """Return the bytes that all hosts send to each other in a call of each operation. Needs root."""
    with hosts.Hosts(shape.num_hosts, ranks_per_host=shape.ranks_per_host) as some:
        by_rank = some.run(count_bytes, shape.num_hosts, shape.ranks_per_host, shape.count)
    return {name: sum(counts[name] for counts in by_rank) for name in OPERATIONS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2, help="(default: 2)")
    parser.add_argument("--ranks-per-host", type=int, default=2, help="(default: 2)")
    parser.add_argument("--mib", type=int, default=4, help="size of the array in MiB (default: 4)")
    options = parser.parse_args()
    if reason := hosts.require():
        parser.error(reason)
    ranks = options.hosts * options.ranks_per_host
    count = options.mib * (1 << 20) // np.dtype(np.float32).itemsize // ranks * ranks
    shape = Shape(options.hosts, options.ranks_per_host, count)
    print(f"{shape.num_hosts} hosts with {shape.ranks_per_host} ranks each, {options.mib} MiB")
    print(f"{'operation':>14}{'least MiB':>12}{'sent / least':>14}{'model / least':>15}")
    for name, sent in measure(shape).items():
        least = shape.least_bytes(name)
        modelled = shape.modelled_bytes(name) / least
        print(f"{name:>14}{least / (1 << 20):12.2f}{sent / least:14.3f}{modelled:15.3f}")


if __name__ == "__main__":
    main()
