"""More rows than memory: each task streams its rows of Parquet files in every step."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pq: Any = pytest.importorskip("pyarrow.parquet", reason="PyArrow is not installed here")

FILES, FILE_ROWS, COLUMNS = 8, 1 << 20, 16  # 1 GiB of rows, which compress to next to nothing
LIMIT_BYTES = 1 << 30  # of addresses of a process, of which half are taken by what it imports
LITTLE_MEMORY = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}  # each thread would reserve much

PROGRAM = """
import sys
from ronde.comqueue import iterate, read

def step(c):
    c.state.sums = c.sum_blocks(lambda rows: rows.sum(axis=0))

if __name__ == "__main__":
    result = iterate(step, data=read(sys.argv[1]), state={}, max_iter=2, on="local:2")
    print(*result.state.sums.astype(int))
"""


@pytest.mark.slow
def test_sums_of_more_rows_than_memory(tmp_path: Path) -> None:
    import pyarrow as pa

    numbers = np.arange(FILE_ROWS)
    columns = {f"x{place:02}": (numbers * (place + 1) % 16).astype(float) for place in range(COLUMNS)}
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(FILES):
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", compression="zstd")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(folder)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)),
        env={**os.environ, **LITTLE_MEMORY},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(FILES * int(column.sum())) for column in columns.values()]
