"""Measures the backend "ronde" of torch.distributed beside Gloo: operations, steps of models, and reconfigurations.

    python benchmarks/torch_distributed.py --ranks 2 4 --rounds 9 --csv torch_distributed.csv

benchmarks/README.md tells how it measures and how to read the tables.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Iterator

from case_tables import CaseTable, print_load, write_cases
from collectives import ITEM_BYTES, Field
from crews import Crews, Home, measure_calls, measure_steps
from reconfigured_jobs import CONTESTANTS as RECONFIGURED
from reconfigured_jobs import measure_reconfigurations
from tables import format_bytes, parse_bytes

CONTESTANTS = {
    "ronde": Home("torch_backends", "RondeBackend"),
    "gloo": Home("torch_backends", "GlooBackend"),
    "openmpi": None,
}
OPERATIONS = (
    *("allreduce", "allreduce_async", "broadcast", "reduce", "allgather_single", "allgather"),
    *(
        "reducescatter",
        "alltoall",
        "gather",
        "scatter",
        "barrier",
        "sendrecv",
        "exchange",
        "allgather_object",
    ),
)
MODELS = ("resnet50", "transformer", "transformer_fsdp")
RECONFIGURE = "reconfigure"
CASES = (*OPERATIONS, *MODELS, RECONFIGURE)
SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20]
WITHOUT_SIZE = ("barrier",)
FOR_PAIRS = ("sendrecv", "exchange")
WIDTH = 28

Row = tuple[str, int, int, str, float, float]


def operation_rows(field: Field, operation: str, sizes: list[int], rounds: int) -> Iterator[Row]:
    """Print a table of one operation, line by line, and yield the rows."""
    title = f"{operation}, {field.size} ranks, float32, median of {rounds} rounds"
    table = CaseTable(title, WIDTH, [group.contestant for group in field.groups], "us")
    for nbytes in sizes:
        elements = math.ceil(nbytes / ITEM_BYTES / field.size) * field.size
        times = measure_calls(field, f"{operation} of {nbytes} bytes", operation, elements, rounds)
        table.print(format_bytes(nbytes), {name: each.median * 1e6 for name, each in times.items()})
        table.print("  best round", {name: each.best * 1e6 for name, each in times.items()})
        for name, each in times.items():
            yield operation, field.size, nbytes, name, each.median * 1e6, each.best * 1e6


def model_rows(field: Field, model: str, rounds: int) -> Iterator[Row]:
    """The same for the steps of a model: the value is the time that communication adds to a step."""
    title = f"{model}: time added to a step, {field.size} ranks, median of {rounds} rounds"
    times = measure_steps(field, model, rounds)
    table = CaseTable(title, WIDTH, [group.contestant for group in field.groups], "ms")
    table.print("added by communication", {name: each.added * 1e3 for name, each in times.items()})
    table.print("  best rounds", {name: each.best_added * 1e3 for name, each in times.items()})
    table.print("  step with it", {name: each.together * 1e3 for name, each in times.items()})
    table.print("  step without", {name: each.alone * 1e3 for name, each in times.items()})
    for name, each in times.items():
        yield model, field.size, 0, name, each.added * 1e6, each.best_added * 1e6


def reconfiguration_rows(most_ranks: int, rounds: int) -> Iterator[Row]:
    """The same for reconfigurations after the loss of a rank: one line for each number of ranks that remain."""
    title = f"_reconfigure() after the loss of a rank, median of {rounds} jobs"
    table = CaseTable(title, WIDTH, list(RECONFIGURED), "ms")
    for size, times in measure_reconfigurations(most_ranks, rounds):
        table.print(f"{size} ranks remain", {name: each.median * 1e3 for name, each in times.items()})
        table.print("  best job", {name: each.best * 1e3 for name, each in times.items()})
        for name, each in times.items():
            yield RECONFIGURE, size, 0, name, each.median * 1e6, each.best * 1e6


def measure_all(options: argparse.Namespace) -> Iterator[Row]:
    for size in options.ranks:
        if set(options.cases) == {RECONFIGURE}:
            break
        with Crews(CONTESTANTS, options.contestants, size) as field:
            for case in options.cases:
                if case in FOR_PAIRS and size % 2:
                    print(f"{case} needs an even number of ranks", file=sys.stderr)
                elif case in OPERATIONS:
                    sizes = [0] if case in WITHOUT_SIZE else options.sizes
                    yield from operation_rows(field, case, sizes, options.rounds)
                elif case in MODELS:
                    yield from model_rows(field, case, options.rounds)
    if RECONFIGURE in options.cases:
        yield from reconfiguration_rows(options.most_ranks, options.rounds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(CONTESTANTS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="(default: 2)")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=", ".join(CASES)
    )
    parser.add_argument(
        "--sizes",
        type=parse_bytes,
        nargs="+",
        default=SIZES,
        metavar="BYTES",
        help="of operations, such as 4 64KiB (default: 4 4KiB 64KiB 1MiB 16MiB)",
    )
    parser.add_argument(
        "--contestants", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant (default: 9)")
    parser.add_argument(
        "--most-ranks",
        type=int,
        default=8,
        metavar="N",
        help="how many ranks remain after the first loss in the case reconfigure (default: 8)",
    )
    parser.add_argument(
        "--csv", type=pathlib.Path, metavar="FILE", help="write case,ranks,bytes,contestant,median_us,best_us"
    )
    options = parser.parse_args()
    if min(options.ranks) < 2 or options.rounds < 1 or options.most_ranks < 1:
        parser.error("--ranks must be at least 2, --rounds and --most-ranks at least 1")
    return options


def main() -> None:
    options = parse_arguments()
    print_load()
    rows: list[Row] = []
    try:
        rows.extend(measure_all(options))
    finally:  # keep the results so far after an error
        if options.csv:
            write_cases(options.csv, "case,ranks,bytes,contestant,median_us,best_us", rows)


if __name__ == "__main__":
    main()
