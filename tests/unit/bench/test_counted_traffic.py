"""The model of cost against what the data plane really moves, as `cpp/tests/traffic` has counted it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ronde.bench.collective_traffic import OPERATIONS, traffic_of, usual_algorithm
from ronde.bench.traffic_counts import LINE_BYTES, JobShape, Traffic

TABLE = Path(__file__).with_name("counted_traffic.txt")


@dataclass(frozen=True)
class Row:
    """A line of the table. `nbytes`: of the array of a rank; in an all-gather and a gather, of all ranks' together."""

    shape: JobShape
    operation: str
    nbytes: int
    is_symmetric: bool
    sent_bytes: int
    busiest_bytes: int
    messages: int
    data_lines: int

    @property
    def modelled(self) -> Traffic:
        algorithm = usual_algorithm(self.operation, self.shape, self.nbytes)
        return traffic_of(self.operation, algorithm, self.shape, self.nbytes, self.is_symmetric)


def rows() -> list[Row]:
    def row(line: str) -> Row:
        hosts, ranks, operation, nbytes, memory, *counts = line.split()
        shape = JobShape(int(hosts), int(ranks))
        return Row(shape, operation, int(nbytes), memory == "symmetric", *map(int, counts[:4]))

    return [row(line) for line in TABLE.read_text().splitlines()[1:]]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_shapes_were_counted(operation: str) -> None:
    shapes = {(row.shape.hosts, row.shape.ranks_per_host) for row in rows() if row.operation == operation}
    assert shapes >= {(1, 2), (1, 64), (8, 1), (8, 8), (8, 64)}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bytes_and_messages_between_hosts_are_those_of_the_model(operation: str) -> None:
    for row in rows():
        if row.operation == operation:
            modelled = row.modelled
            counted = (row.sent_bytes, row.busiest_bytes, row.messages)
            assert (modelled.sent_bytes, modelled.busiest_bytes, modelled.frames) == counted, row


@pytest.mark.parametrize("operation", OPERATIONS)
def test_lines_inside_hosts_are_those_of_the_model(operation: str) -> None:
    """Except where several ranks' parts share a line: then ranks of a host make each other drop it."""
    for row in rows():
        if row.operation != operation or row.nbytes < row.shape.ranks * LINE_BYTES:
            continue
        assert row.modelled.memory_bytes == pytest.approx(row.data_lines * LINE_BYTES, rel=0.03), row
