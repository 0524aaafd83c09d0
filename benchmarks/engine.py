"""Measures the engine: named tensors, alone, in bursts and as gradients of a model, beside torch's Gloo and Horovod.

    python benchmarks/engine.py --ranks 2 4 --rounds 9 --csv engine.csv

benchmarks/README.md tells how it measures and how to read the tables.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

from case_tables import CaseTable, print_load, write_cases
from collectives import Field
from crews import Crews, Home, measure_calls, measure_steps
from engine_probes import PROBES, probe

from ronde.errors import RemoteError, TimeoutError

CONTESTANTS = {
    "ronde": Home("ronde_engine", "RondeEngine"),
    "ronde-torch": Home("horovod_like", "RondeTorch"),
    "gloo": Home("gloo_steps", "GlooSteps"),
    "horovod": Home("horovod_like", "Horovod"),
}


class Case(NamedTuple):
    """An operation of contestants: on tensors of so many elements, or a step of a model (None)."""

    operation: str
    elements: int | None = None


CASES = {
    "single 4 B": Case("single", 1),
    "single 4 KiB": Case("single", 1 << 10),
    "single 1 MiB": Case("single", 1 << 18),
    "burst 100 x 4 KiB": Case("burst", 1 << 10),
    "resnet50": Case("resnet50"),
    "small 1000": Case("small"),
    "small 10000": Case("small_10000"),
    "broadcast 4 KiB": Case("broadcast", 1 << 10),
    "allgather 4 KiB": Case("allgather", 1 << 10),
}
WIDTH = max(map(len, CASES)) + 10

Row = tuple[str, int, str, float]


def call_rows(field: Field, names: list[str], rounds: int) -> Iterator[Row]:
    """Print a table of the cases that are single calls, line by line, and yield the rows."""
    title = f"time of a call, {field.size} ranks, median of {rounds} rounds"
    table = CaseTable(title, WIDTH, [group.contestant for group in field.groups], "us")
    for name in names:
        case = CASES[name]
        times = measure_calls(field, name, case.operation, case.elements or 0, rounds)
        table.print(name, {contestant: each.median * 1e6 for contestant, each in times.items()})
        table.print("  best round", {contestant: each.best * 1e6 for contestant, each in times.items()})
        for contestant, each in times.items():
            yield name, field.size, contestant, each.median * 1e6


def model_rows(field: Field, names: list[str], rounds: int) -> Iterator[Row]:
    """The same for the steps of models: the value is the time that communication adds to a step."""
    title = f"time added to a step by communication, {field.size} ranks, median of {rounds} rounds"
    table = CaseTable(title, WIDTH, [group.contestant for group in field.groups], "us")
    for name in names:
        times = measure_steps(field, CASES[name].operation, rounds)
        table.print(name, {contestant: each.added * 1e6 for contestant, each in times.items()})
        table.print(
            "  best rounds", {contestant: each.best_added * 1e6 for contestant, each in times.items()}
        )
        table.print("  step without", {contestant: each.alone * 1e6 for contestant, each in times.items()})
        for contestant, each in times.items():
            yield name, field.size, contestant, each.added * 1e6


def probe_rows(names: list[str], size: int, rounds: int) -> Iterator[Row]:
    """Print the lines of the probes and yield those that are times."""
    print(f"\nronde, {size} ranks", flush=True)
    for name in names:
        try:
            for result in probe(name, size, rounds):
                print(f"{name:<12}{result.text}", flush=True)
                if result.value_us is not None:
                    yield result.case, size, "ronde", result.value_us
        except (RemoteError, TimeoutError) as error:
            print(f"{name} failed: {str(error).strip().splitlines()[-1]}", file=sys.stderr, flush=True)


def measure_all(options: argparse.Namespace) -> Iterator[Row]:
    calls = [name for name in options.cases if name in CASES and CASES[name].elements]
    models = [name for name in options.cases if name in CASES and not CASES[name].elements]
    probes = [name for name in options.cases if name in PROBES]
    for size in options.ranks:
        if calls or models:
            with Crews(CONTESTANTS, options.contestants, size) as field:
                if calls:
                    yield from call_rows(field, calls, options.rounds)
                if models:
                    yield from model_rows(field, models, options.rounds)
        if probes and "ronde" in options.contestants:
            yield from probe_rows(probes, size, options.rounds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names, cases = list(CONTESTANTS), [*CASES, *PROBES]
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="(default: 2)")
    parser.add_argument(
        "--cases", nargs="+", choices=cases, default=cases, metavar="CASE", help=", ".join(map(repr, cases))
    )
    parser.add_argument(
        "--contestants", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant (default: 9)")
    parser.add_argument(
        "--csv", type=pathlib.Path, metavar="FILE", help="write case,ranks,contestant,median_us"
    )
    options = parser.parse_args()
    if min(options.ranks) < 2 or options.rounds < 1:
        parser.error("--ranks must be at least 2 and --rounds at least 1")
    return options


def main() -> None:
    options = parse_arguments()
    print_load()
    rows: list[Row] = []
    try:
        rows.extend(measure_all(options))
    finally:  # keep the results so far after an error
        if options.csv:
            write_cases(options.csv, "case,ranks,contestant,median_us", rows)


if __name__ == "__main__":
    main()
