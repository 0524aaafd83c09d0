"""Measures the collectives of Ronde beside a plain memcpy, Gloo and Open MPI, in one run.

    python benchmarks/collectives.py --ranks 2 --csv collectives.csv

benchmarks/README.md tells how it measures and how to read the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import pathlib
import statistics
import sys
from collections.abc import Iterator

from contestants import CONTESTANTS, OPERATIONS
from groups import Broken, Group, Refused
from tables import Row, Table, parse_bytes, write_csv

ITEM_BYTES = 4  # float32
SIZES = [4**exponent for exponent in range(1, 15)]  # 4 B to 256 MiB
BLOCK_S = 0.02  # the length of one contestant's turn
MOST_CALLS = 50_000


class Field:
    """The contestants that take part with a number of ranks; those that fail leave, with the reason."""

    def __init__(self, names: list[str], size: int) -> None:
        self.size = size
        self.groups: list[Group] = []
        self._open = contextlib.ExitStack()
        for name in names:
            try:
                self.groups.append(self._open.enter_context(Group(name, size)))
            except Broken as reason:
                print(f"skipped {name}: {reason}", file=sys.stderr)

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @contextlib.contextmanager
    def turn_of(self, group: Group, doing: str) -> Iterator[None]:
        """One contestant's turn: swallows its failures, after which it may be no part of the field any more."""
        try:
            yield
        except Refused as reason:
            print(f"{group.contestant} does not take part in {doing}: {reason}", file=sys.stderr)
        except Broken as reason:
            print(f"{group.contestant} leaves at {doing}: {reason}", file=sys.stderr)
            self.groups.remove(group)
            group.close()


def measure(field: Field, operation: str, nbytes: int, rounds: int) -> dict[str, float]:
    """Microseconds per call of each contestant: the median over rounds of the slowest rank's mean in a block of calls.

    The contestants take turns, one block each in every round, so that a slow spell of the machine hits all alike.
    """
    doing = f"{operation} of {nbytes} bytes"
    elements = math.ceil(nbytes / ITEM_BYTES / field.size) * field.size  # at least one for every rank
    calls: dict[Group, int] = {}
    for group in list(field.groups):
        with field.turn_of(group, doing):
            group.ask("prepare", operation, elements)
            calls[group] = enough_calls(group)
    blocks: dict[Group, list[float]] = {group: [] for group in calls}
    for _ in range(rounds):
        for group in [group for group in field.groups if group in calls]:
            with field.turn_of(group, doing):
                blocks[group].append(group.seconds_per_call(calls[group]))
    halves = 2 if operation == "sendrecv" else 1  # a call is a round trip, the result one way
    finished = [group for group in field.groups if blocks.get(group)]
    return {group.contestant: statistics.median(blocks[group]) / halves * 1e6 for group in finished}


def enough_calls(group: Group) -> int:
    """How many calls fill a block; finding out warms up, too."""
    calls = 1
    group.seconds_per_call(calls)
    while True:
        seconds = group.seconds_per_call(calls)
        if seconds * calls >= BLOCK_S / 4 or calls >= MOST_CALLS:
            return min(MOST_CALLS, math.ceil(BLOCK_S / seconds))
        calls *= 4


def measure_all(field: Field, options: argparse.Namespace) -> Iterator[Row]:
    """Print one table per operation, line by line, and yield the rows."""
    for operation in options.ops:
        if operation == "sendrecv" and field.size % 2:
            continue  # a rank would have no neighbour for ping-pong
        title = f"{operation}, {field.size} ranks, float32, median of {options.rounds} rounds"
        table = Table(title, [group.contestant for group in field.groups])
        for nbytes in [0] if operation == "barrier" else options.sizes:
            medians = measure(field, operation, nbytes, options.rounds)
            table.print(nbytes, medians)
            for contestant, median_us in medians.items():
                yield Row(operation, field.size, nbytes, contestant, median_us)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(CONTESTANTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="(default: 2)")
    parser.add_argument(
        "--ops", nargs="+", choices=OPERATIONS, default=OPERATIONS, metavar="OP", help=", ".join(OPERATIONS)
    )
    parser.add_argument(
        "--sizes",
        type=parse_bytes,
        nargs="+",
        default=SIZES,
        metavar="BYTES",
        help="such as 4 64KiB 1MiB (default: 4 B to 256 MiB)",
    )
    parser.add_argument(
        "--contestants", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--rounds", type=int, default=9, help="blocks of calls per contestant (default: 9)")
    parser.add_argument(
        "--csv", type=pathlib.Path, metavar="FILE", help="write op,ranks,bytes,contestant,median_us"
    )
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE.png", help="draw time over bytes, one panel per operation"
    )
    options = parser.parse_args()
    if min(options.ranks) < 1 or options.rounds < 1:
        parser.error("--ranks and --rounds must be at least 1")
    return options


def main() -> None:
    options = parse_arguments()
    rows: list[Row] = []
    try:
        for size in options.ranks:
            with Field(options.contestants, size) as field:
                rows.extend(measure_all(field, options))
    finally:  # keep the results so far after an error
        if options.csv:
            write_csv(options.csv, Row, rows)
    if options.plot:
        from plot import plot

        plot(options.plot, rows)


if __name__ == "__main__":
    main()
