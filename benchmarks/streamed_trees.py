"""Gradient boosting of Parquet files that are larger than the memory of its tasks: time, and peak memory of each task.

    python benchmarks/streamed_trees.py --gb 10 --folder /tmp/rows           # writes the files first, unless they exist

A value has four bytes in the files and one in a task. The table has the largest resident memory of each process below
this one, in the order of their size: tasks first, then their agents. Two tasks read files of the machine's page cache,
which does not count.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ronde.comqueue import read
from ronde.ml import GradientBoostingRegressor

COLUMNS = 200
ROWS_OF_FILE = 250_000  # 200 MB
ROWS_OF_GROUP = 10_000
MEMORY_LIMIT = 1 << 28  # of rows that a task may keep as floats
PERIOD_S = 0.2


def write_files(folder: Path, gigabytes: float) -> int:
    """Write files of random numbers, float32, and a target, unless there are any; return the number of their bytes."""
    import pyarrow as pa
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.parquet")):
        for number in range(max(1, round(gigabytes * 1e9 / (4 * COLUMNS * ROWS_OF_FILE)))):
            random = np.random.default_rng(number)
            x = random.random((COLUMNS, ROWS_OF_FILE), np.float32)
            y = x[0] * x[1] + np.sin(4 * x[2]) + x[3] ** 2 + 0.3 * random.random(ROWS_OF_FILE, np.float32)
            columns = {f"x{column}": x[column] for column in range(COLUMNS)}
            table = pa.table({**columns, "y": y.astype(np.float64)})
            path = folder / f"{number:04}.parquet"
            options = {"use_dictionary": False, "compression": "none", "row_group_size": ROWS_OF_GROUP}
            pyarrow.parquet.write_table(table, path, **options)
    return sum(path.stat().st_size for path in folder.glob("*.parquet"))


@contextmanager
def peaks_of_children() -> Iterator[dict[int, int]]:
    """Yield the peak memory in bytes, by process, of all that this process starts meanwhile."""
    peaks: dict[int, int] = {}
    ended = threading.Event()

    def look() -> None:
        me = Path("/proc/self").resolve().name
        while not ended.wait(PERIOD_S):
            parents = {}
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    lines = (folder / "status").read_text().splitlines()
                except OSError:  # it ended meanwhile
                    continue
                fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                parents[folder.name] = (fields["PPid"], int(fields.get("VmHWM", "0").split()[0]) * 1024)
            for pid, (_, peak) in parents.items():
                above = pid
                while above in parents and above != me:
                    above = parents[above][0]
                if above == me and pid != me:
                    peaks[int(pid)] = max(peak, peaks.get(int(pid), 0))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=1, help="size of the files in gigabytes (1)")
    parser.add_argument("--folder", type=Path, required=True, help="where they are")
    parser.add_argument("--tasks", type=int, default=2, help="(2)")
    parser.add_argument("--steps", type=int, default=10, help="trees (10)")
    options = parser.parse_args()
    nbytes = write_files(options.folder, options.gb)
    rows = read(str(options.folder), columns={"X": None, "y": "y"}, memory_limit=MEMORY_LIMIT)
    print(f"{nbytes / 1e9:.2f} GB, {rows}, {options.tasks} tasks, {options.steps} trees", flush=True)
    began_s = time.perf_counter()
    model = GradientBoostingRegressor(
        max_iter=options.steps, early_stopping=False, random_state=0, on=f"local:{options.tasks}"
    )
    with peaks_of_children() as peaks:
        model.fit(rows)
    print(f"{time.perf_counter() - began_s:.0f} s, losses {[round(each, 5) for each in model.train_score_]}")
    for pid, peak in sorted(peaks.items(), key=lambda each: -each[1])[: 2 * options.tasks]:
        print(f"process {pid}: {peak / 1e6:.0f} MB at most")


if __name__ == "__main__":
    main()
