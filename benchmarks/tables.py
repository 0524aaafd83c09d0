"""Tables for reading, CSV for programs."""

from __future__ import annotations

import csv
import pathlib
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

# Against whom each contestant is held. The peers work on private memory, so they are held against Ronde there.
RIVALS = {
    "ronde-symmetric": "memcpy",
    "ronde-private": "memcpy",
    "gloo": "ronde-private",
    "openmpi": "ronde-private",
}


@dataclass(frozen=True)
class Row:
    """One median: the columns of the CSV file."""

    op: str
    ranks: int
    bytes: int
    contestant: str
    median_us: float


class Table:
    """A table that is printed row by row: microseconds of every contestant, and its ratio to its rival."""

    def __init__(self, title: str, contestants: list[str]) -> None:
        self._contestants = contestants
        heads = [f"{'bytes':>8}"]
        for contestant in contestants:
            rival = RIVALS.get(contestant, "").removeprefix("ronde-")
            heads.append(
                f"{contestant + ' us':>18}" + (f"{'/' + rival:>9}" if self._rival(contestant) else "")
            )
        print(f"\n{title}\n{'  '.join(heads)}", flush=True)

    def print(self, nbytes: int, medians_us: dict[str, float]) -> None:
        """Print the row of one size; a contestant that is missing leaves a gap."""
        cells = [f"{format_bytes(nbytes):>8}"]
        for contestant in self._contestants:
            mine, rival = medians_us.get(contestant), self._rival(contestant)
            cell = f"{mine:18,.2f}" if mine is not None else f"{'-':>18}"
            if rival:
                theirs = medians_us.get(rival)
                cell += f"{mine / theirs:9.2f}" if mine is not None and theirs else f"{'-':>9}"
            cells.append(cell)
        print("  ".join(cells), flush=True)

    def _rival(self, contestant: str) -> str | None:
        rival = RIVALS.get(contestant)
        return rival if rival in self._contestants else None


def format_bytes(nbytes: int) -> str:
    """Return 4194304 as "4 MiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes and nbytes % UNITS[unit] == 0:
            return f"{nbytes // UNITS[unit]} {unit}"
    return f"{nbytes} B"


def parse_bytes(text: str) -> int:
    """Return "4MiB" as 4194304. Raises ValueError."""
    match = re.fullmatch(r"(\d+)\s*(\w*)", text)
    if not match or match[2] not in UNITS or int(match[1]) < 1:
        raise ValueError(text)
    return int(match[1]) * UNITS[match[2]]


def write_csv(
    path: pathlib.Path, columns: type[DataclassInstance], rows: Sequence[DataclassInstance]
) -> None:
    """Write all rows, which are of that dataclass, under a line with the names of its fields."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(columns))
        for row in rows:
            writer.writerow(f"{value:.3f}" if isinstance(value, float) else value for value in astuple(row))
