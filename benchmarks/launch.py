"""Measures how long a launcher takes for a script that prints its rank: `ronde run` and torchrun.

    python benchmarks/launch.py --csv launch.csv

In every round each contestant has one turn, from the start of the command to its end, in an order that changes from
round to round; the table shows medians, the time that a launcher adds to the bare script, and the ratio to torchrun. It
skips contestants that are not installed. This Python runs all of them, with the files in memory after a warm-up round.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from case_tables import print_load, write_cases

COLUMNS = "case,ranks,contestant,median_ms"
SCRIPT = "import os\nprint(os.environ.get('RANK', '0'))\n"
BARE, RONDE, TORCHRUN = "bare", "ronde", "torchrun"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of workers (default: 2)")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant (default: 15)")
    parser.add_argument(
        "--contestants", nargs="+", default=[BARE, RONDE, TORCHRUN], choices=[BARE, RONDE, TORCHRUN]
    )
    parser.add_argument("--csv", type=Path, help="write the medians into this file")
    options = parser.parse_args()
    contestants = [
        name for name in options.contestants if name != TORCHRUN or importlib.util.find_spec("torch")
    ]
    print_load()
    rows: list[Sequence[str | int | float]] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "rank.py")
        script.write_text(SCRIPT)
        for ranks in options.ranks:
            rows += measure(script, ranks, contestants, options.rounds)
    if options.csv:
        write_cases(options.csv, COLUMNS, rows)


def measure(
    script: Path, ranks: int, contestants: Sequence[str], rounds: int
) -> list[tuple[str, int, str, float]]:
    """Return a row for each contestant, and print the table."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name in random.sample(contestants, len(contestants)):
            took_ms = turn(command(name, script, ranks), 1 if name == BARE else ranks)
            if number:
                times[name].append(took_ms)
    medians = {name: statistics.median(took) for name, took in times.items()}
    print(f"\nstart of a script that prints its rank, {ranks} workers")
    print(f"{'':12}{'median ms':>12}{'best ms':>10}{'over bare':>12}{'/torchrun':>11}")
    for name, median in medians.items():
        over = f"{median - medians[BARE]:12.0f}" if BARE in medians else f"{'-':>12}"
        ratio = f"{median / medians[TORCHRUN]:11.3f}" if TORCHRUN in medians else f"{'-':>11}"
        print(f"{name:12}{median:12.0f}{min(times[name]):10.0f}{over}{ratio}", flush=True)
    return [("start", ranks, name, median) for name, median in medians.items()]


def command(name: str, script: Path, ranks: int) -> list[str]:
    """Return how the contestant starts the script."""
    if name == BARE:
        return [sys.executable, str(script)]
    if name == RONDE:
        return [
            sys.executable,
            "-c",
            "from ronde.cli import command; command()",
            "run",
            "-n",
            str(ranks),
            str(script),
        ]
    options = ["--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(script)]


def turn(words: list[str], lines: int) -> float:
    """Run the command and return how long it took, in ms. Raises RuntimeError if its output is wrong."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun prints a warning without it
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode
    began = time.perf_counter()
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
    took_ms = (time.perf_counter() - began) * 1e3
    if done.returncode or len(done.stdout.splitlines()) != lines:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return took_ms


if __name__ == "__main__":
    main()
