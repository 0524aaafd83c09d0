"""What tags and encryption cost: messages sealed and opened, against a copy of the same bytes.

    python benchmarks/sealing.py --csv sealing.csv

See README.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields

from ronde._native import SealedConnection

SIZES = (64, 4 << 10, 64 << 10, 1 << 20)
BYTES_PER_ROUND = 32 << 20
CALLS_PER_ROUND = 5_000  # at most


@dataclass(frozen=True)
class Row:
    """One result: the columns of the CSV file. `contestant` is tag, secret or copy."""

    bytes: int
    contestant: str
    median_us: float


def sealing(conceals: bool, message: bytes) -> Callable[[], object]:
    """Return a function that seals the message at one end of a connection and opens it at the other."""
    here, there = bytes(range(32)), bytes(range(32, 64))
    sender, receiver = SealedConnection(here, there, conceals), SealedConnection(there, here, conceals)

    def transfer() -> None:
        if receiver.open(sender.seal(message, 0), 0) != message:
            raise AssertionError("the message did not arrive")

    return transfer


def copying(message: bytes) -> Callable[[], object]:
    """Return a function that does the same without seals: two copies, and the comparison."""

    def transfer() -> None:
        if bytes(bytearray(message)) != message:
            raise AssertionError("the message did not arrive")

    return transfer


def median_us(transfer: Callable[[], object], size: int, rounds: int) -> float:
    """Return the median over the rounds of the CPU time of one transfer."""
    calls = min(CALLS_PER_ROUND, BYTES_PER_ROUND // size)
    times = []
    for _ in range(rounds):
        begin = time.process_time_ns()
        for _ in range(calls):
            transfer()
        times.append((time.process_time_ns() - begin) / calls / 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", help="the file for the results")
    options = parser.parse_args()
    rows = []
    for size in SIZES:
        message = bytes(size)
        contestants = {
            "tag": sealing(False, message),
            "secret": sealing(True, message),
            "copy": copying(message),
        }
        for name, transfer in contestants.items():
            rows.append(Row(size, name, median_us(transfer, size, options.rounds)))
            rate = size / rows[-1].median_us / 1e3
            print(f"{size:>8} bytes  {name:<6} {rows[-1].median_us:>9.2f} us  {rate:>6.2f} GB/s", flush=True)
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Row)])
            writer.writerows(astuple(row) for row in rows)


if __name__ == "__main__":
    main()
