"""Measures how fast an iterative algorithm gets rows of Parquet files that do not fit in its memory.

    python benchmarks/read_rows.py --gib 5 --csv read_rows.csv

Writes files whose rows take that many GiB in memory, and little on disk. The contestants sum all columns: `ronde` in
tasks that stream their rows by `ronde.comqueue.read`, each limited to 1 GiB of addresses; `pyarrow` by a scan of
`pyarrow.dataset` with all of its threads, without a limit. They work in turns. The table shows medians over rounds of
the rate and of the CPU time of all processes, and the largest memory of a process. Both sums must be right.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from case_tables import print_load, write_cases

from ronde.comqueue import IterationStep, iterate, read
from ronde.launch.callables import run

COLUMNS = "case,tasks,contestant,gib_per_s,cpu_s_per_gib,peak_mib"
FILE_ROWS, NUM_COLUMNS = 1 << 20, 16
FILE_BYTES = FILE_ROWS * NUM_COLUMNS * 8
GIB = 1 << 30
LITTLE_MEMORY = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}  # each thread would reserve much


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of all rows in memory (default: 1)")
    parser.add_argument("--tasks", type=int, default=2, help="number of tasks (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="scans of each contestant (default: 3)")
    parser.add_argument("--csv", type=Path, help="write the medians into this file")
    options = parser.parse_args()
    print_load()
    files = max(1, round(options.gib * GIB / FILE_BYTES))
    scans: dict[str, list[tuple[float, float, float]]] = {"ronde": [], "pyarrow": []}
    with tempfile.TemporaryDirectory() as folder:
        expected = run(write_files, (folder, files))[0]
        for _ in range(options.rounds):
            call = (folder, options.tasks, expected)
            scans["ronde"].append(run(time_ronde, call, environment=LITTLE_MEMORY)[0])
            scans["pyarrow"].append(run(time_pyarrow, (folder, expected))[0])
    gib = files * FILE_BYTES / GIB
    rows = []
    print(f"\n{gib:g} GiB of rows, {options.tasks} tasks")
    print(f"{'':12}{'GiB/s':>8}{'CPU s/GiB':>12}{'peak MiB':>12}")
    for name, found in scans.items():
        times_s, cpu_times_s, peaks = zip(*found)
        speed, cpu = gib / statistics.median(times_s), statistics.median(cpu_times_s) / gib
        print(f"{name:12}{speed:8.2f}{cpu:12.2f}{max(peaks):12.0f}", flush=True)
        rows.append((f"{gib:g} GiB", options.tasks, name, speed, cpu, max(peaks)))
    if options.csv:
        write_cases(options.csv, COLUMNS, rows)


def write_files(folder: str, files: int) -> list[float]:
    """Write the files, which are equal; return the sums of the columns of all."""
    import pyarrow as pa
    from pyarrow import parquet

    numbers = np.arange(FILE_ROWS)
    columns = {f"x{place:02}": (numbers * (place + 1) % 16).astype(float) for place in range(NUM_COLUMNS)}
    for number in range(files):
        parquet.write_table(pa.table(columns), f"{folder}/{number:04}.parquet", compression="zstd")
    return [float(files * column.sum()) for column in columns.values()]


def time_ronde(folder: str, tasks: int, expected: list[float]) -> tuple[float, float, float]:
    """Return the time and CPU time of a scan in seconds, and the largest memory of a task in MiB.

    Limits this process.
    """
    resource.setrlimit(resource.RLIMIT_AS, (GIB, GIB))  # also of the tasks
    state = iterate(sum_step, data=read(folder), state={}, max_iter=1, on=f"local:{tasks}").state
    assert state.sums.tolist() == expected
    return state._time_s, sum(state.cpu_times_s), max(state.peaks)


def sum_step(c: IterationStep) -> None:
    c.gather(None)  # all tasks begin together
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    c.state.sums = c.sum_blocks(sum_columns)
    c.state._time_s = time.perf_counter() - began_s
    c.state.cpu_times_s = c.gather(time.process_time() - began_cpu_s)
    c.state.peaks = c.gather(peak_mib())


def sum_columns(rows: Any) -> Any:
    return np.ones(len(rows)) @ rows  # takes less time than rows.sum(axis=0)


def time_pyarrow(folder: str, expected: list[float]) -> tuple[float, float, float]:
    """Return the same of a scan by PyArrow in this process."""
    from pyarrow import dataset

    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    sums = np.zeros(NUM_COLUMNS)
    for batch in dataset.dataset(folder).to_batches():
        sums += [np.asarray(column).sum() for column in batch.columns]
    time_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    assert sums.tolist() == expected
    return time_s, cpu_s, peak_mib()


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
