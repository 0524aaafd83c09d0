"""Counts the files of Ronde that a call walks through: how many of them a reader opens to follow it.

    python benchmarks/files_crossed.py                  # all walks
    python benchmarks/files_crossed.py run --list       # one, with its files in the order of their first call

A file counts if one of its functions runs in the process that is followed, in any thread; what an import runs does not
count. A crossing is a call from a function of one file to one of another. The walks are

    run       the launcher of `ronde run -n 2`, whose workers do nothing
    driver    the driver of a function on a cluster of two tasks
    fit       `KMeans(n_clusters=8).fit(X)` with 2,000 rows
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

IS_FUNCTION = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("walks", nargs="*", metavar="walk", help=f"{', '.join(WALKS)} (default: all)")
    parser.add_argument("--list", action="store_true", help="name the files")
    parser.add_argument("--followed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [walk for walk in options.walks if walk not in WALKS]:
        parser.error(f"unknown walk {unknown[0]!r}: expected {', '.join(WALKS)}")
    if options.followed:
        follow(options.walks[0], options.list)
        return
    for walk in options.walks or WALKS:  # each in a process that has not yet loaded anything
        words = [sys.executable, __file__, walk, "--followed", *["--list"] * options.list]
        subprocess.run(words, check=True)


def follow(walk: str, names_files: bool) -> None:
    """Print how many files the walk crosses in this process, and how often it goes from one to another."""
    import ronde

    home = Path(ronde.__file__).parent
    files: dict[str, None] = {}
    crossings = 0

    def note_call(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal crossings
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{home}/"):
            return
        if code.co_flags & IS_FUNCTION != IS_FUNCTION or code.co_name == "<module>":
            return
        files.setdefault(code.co_filename)
        origin = frame.f_back.f_code.co_filename if frame.f_back else ""
        crossings += origin.startswith(f"{home}/") and origin != code.co_filename

    prepared = WALKS[walk]()
    threading.setprofile(note_call)
    sys.setprofile(note_call)
    try:
        prepared()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    print(f"{walk}: {len(files)} files, {crossings} crossings", flush=True)
    if names_files:
        print(*(f"    {Path(file).relative_to(home)}" for file in files), sep="\n", flush=True)


def launch_two_workers() -> Callable[[], object]:
    from ronde.cli import main as command

    return lambda: command(["run", "-n", "2", "--no-python", "true"])


def drive_two_tasks() -> Callable[[], object]:
    import ronde
    from ronde.launch.clusters.local import LocalCluster

    return lambda: ronde.run(abs, args=(-1,), np=2, cluster=LocalCluster(2))


def fit_kmeans() -> Callable[[], object]:
    import numpy

    from ronde.ml import KMeans

    rows = numpy.random.default_rng(0).standard_normal((2000, 8))
    return lambda: KMeans(n_clusters=8).fit(rows)


WALKS = {"run": launch_two_workers, "driver": drive_two_tasks, "fit": fit_kmeans}

if __name__ == "__main__":
    main()
