"""Measures real training with PyTorch: DistributedOptimizer of ronde.torch beside DDP on Gloo, and Horovod.

    python benchmarks/training.py --ranks 2 --rounds 9 --csv training.csv

benchmarks/README.md tells how it measures and how to read the tables.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterator

from case_tables import CaseTable, print_load, write_cases
from collectives import Field
from crews import Crews, Home, StepTimes, measure_steps

CONTESTANTS = {
    "ronde": Home("horovod_like", "RondeTorch"),
    "gloo": Home("gloo_steps", "GlooSteps"),
    "horovod": Home("horovod_like", "Horovod"),
}
CASES = {
    "cnn": "convolutional network, 0.54 million parameters, batch of 16 on each rank",
    "mlp": "multilayer perceptron, 5.3 million parameters, batch of 4 on each rank",
}

Row = tuple[str, int, str, float, float, float]


def measure(field: Field, case: str, rounds: int) -> Iterator[Row]:
    """Print one table and yield its rows."""
    title = f"{case}: {CASES[case]}; {field.size} ranks, median of {rounds} rounds"
    table = CaseTable(title, 24, [group.contestant for group in field.groups], "")
    times = measure_steps(field, case, rounds)
    table.print("steps per second", {name: 1 / each.together for name, each in times.items()})
    table.print("us per step", {name: each.together * 1e6 for name, each in times.items()})
    table.print("  without communication", {name: each.alone * 1e6 for name, each in times.items()})
    table.print("  added by it", {name: each.added * 1e6 for name, each in times.items()})
    table.print("  added, best rounds", {name: each.best_added * 1e6 for name, each in times.items()})
    for name, each in times.items():
        yield row(case, field.size, name, each)


def row(case: str, size: int, contestant: str, times: StepTimes) -> Row:
    """One line of the CSV file."""
    return case, size, contestant, 1 / times.together, times.together * 1e6, times.added * 1e6


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names, cases = list(CONTESTANTS), list(CASES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="(default: 2)")
    parser.add_argument(
        "--cases", nargs="+", choices=cases, default=cases, metavar="CASE", help=", ".join(cases)
    )
    parser.add_argument(
        "--contestants", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant (default: 9)")
    parser.add_argument(
        "--csv",
        type=pathlib.Path,
        metavar="FILE",
        help="write case,ranks,contestant,steps_per_second,step_us,added_us",
    )
    options = parser.parse_args()
    if min(options.ranks) < 1 or options.rounds < 1:
        parser.error("--ranks and --rounds must be at least 1")
    return options


def main() -> None:
    options = parse_arguments()
    print_load()
    rows: list[Row] = []
    try:
        for size in options.ranks:
            with Crews(CONTESTANTS, options.contestants, size) as field:
                for case in options.cases:
                    rows.extend(measure(field, case, options.rounds))
    finally:  # keep the results so far after an error
        if options.csv:
            write_cases(options.csv, "case,ranks,contestant,steps_per_second,step_us,added_us", rows)


if __name__ == "__main__":
    main()
