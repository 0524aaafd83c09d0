"""Tables whose lines are cases, with a ratio to one rival."""

from __future__ import annotations

import csv
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence

RIVAL = "gloo"


class CaseTable:
    """Printed line by line: a number of every contestant, and its ratio to the rival's."""

    def __init__(self, title: str, width: int, contestants: Sequence[str], unit: str) -> None:
        self._contestants = contestants
        self._width = width
        heads = [
            f"{f'{contestant} {unit}':>16}" + (f"{'/' + RIVAL:>8}" if self._has_rival(contestant) else "")
            for contestant in contestants
        ]
        print(f"\n{title}\n{'  '.join([' ' * width, *heads])}", flush=True)

    def print(self, case: str, values: Mapping[str, float]) -> None:
        """Print one line; a contestant that is missing leaves a gap."""
        cells = [f"{case:<{self._width}}"]
        for contestant in self._contestants:
            mine, theirs = values.get(contestant), values.get(RIVAL)
            cell = f"{mine:16,.1f}" if mine is not None else f"{'-':>16}"
            if self._has_rival(contestant):
                cell += f"{mine / theirs:8.3f}" if mine is not None and theirs else f"{'-':>8}"
            cells.append(cell)
        print("  ".join(cells), flush=True)

    def _has_rival(self, contestant: str) -> bool:
        return RIVAL in self._contestants and contestant != RIVAL


def print_load() -> None:
    """Say how busy the machine is before the measurement begins: medians on a busy one need many rounds."""
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}", flush=True)


def write_cases(path: pathlib.Path, columns: str, rows: Iterable[Sequence[str | int | float]]) -> None:
    """Write rows under the names of the columns, separated by commas."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns.split(","))
        for row in rows:
            writer.writerow(f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row)
