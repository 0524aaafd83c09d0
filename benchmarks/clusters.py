"""Measures a function on a cluster: `ronde.spark.run`, TorchDistributor, a cluster of processes, and no cluster.

    python benchmarks/clusters.py --csv clusters.csv

Each rank makes 20 all-reduces of 1 MiB. Every contestant reduces a PyTorch tensor, so all of them pay for the import of
PyTorch; with `--arrays numpy` Ronde's contestants do not, and the table shows what a start costs. "bare" are processes
that this one starts itself (`ronde.run`), with the same Python and function. In every round each contestant has one
turn in the same session, from the call to its result, in an order that changes from round to round, after a warm-up
round in which Spark starts its Python workers. The table shows medians and the ratios to TorchDistributor and to the
bare processes. It needs PySpark and PyTorch; the executors are processes of this machine. Without PySpark, compare what
is left: what the driver and its agents cost, with a new process for each task.

    python benchmarks/clusters.py --contestants bare ronde-local
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from case_tables import print_load, write_cases

COLUMNS = "case,ranks,contestant,median_ms"
BARE, LOCAL, SPARK, TORCH = "bare", "ronde-local", "ronde-spark", "torch-distributor"
PROTECTIONS = {LOCAL: "messages", f"{LOCAL}-payload": "payload", f"{LOCAL}-secret": "secret"}
ELEMENTS, REDUCTIONS = 1 << 18, 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of workers (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default: 5)")
    parser.add_argument(
        "--contestants", nargs="+", default=[BARE, SPARK, TORCH], choices=[BARE, SPARK, TORCH, *PROTECTIONS]
    )
    parser.add_argument("--tcp", action="store_true", help="let ranks use TCP, as between hosts")
    parser.add_argument(
        "--arrays", default="torch", choices=["torch", "numpy"], help="what Ronde reduces (default: torch)"
    )
    parser.add_argument("--csv", type=Path, help="write the medians into this file")
    options = parser.parse_args()
    if options.tcp:
        os.environ["RONDE_TRANSPORT"] = "tcp"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode
    print_load()
    session = start_session(options.ranks) if {SPARK, TORCH} & set(options.contestants) else None
    turns = {name: turn_of(name, options.ranks, options.arrays) for name in options.contestants}
    times: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(options.rounds + 1):
        for name in random.sample(options.contestants, len(turns)):
            began = time.perf_counter()
            total = turns[name]()
            took_ms = (time.perf_counter() - began) * 1e3
            if total != expected(options.ranks):
                raise RuntimeError(f"{name} gives {total}: expected {expected(options.ranks)}")
            if number:
                times[name].append(took_ms)
    if session is not None:
        session.stop()
    medians = {name: statistics.median(took) for name, took in times.items()}
    what = f"{REDUCTIONS} all-reduces of 1 MiB ({options.arrays})"
    print(f"\n{what}, {options.ranks} workers, from the call to the result")
    print(f"{'':20}{'median ms':>12}{'best ms':>10}{'/bare':>8}{'/' + LOCAL:>14}{'/' + TORCH:>20}")
    for name, median in medians.items():
        bases = {BARE: 8, LOCAL: 14, TORCH: 20}
        ratios = [
            f"{f'{median / medians[base]:.2f}' if base in medians else '-':>{width}}"
            for base, width in bases.items()
        ]
        print(f"{name:20}{median:12.0f}{min(times[name]):10.0f}{''.join(ratios)}", flush=True)
    if options.csv:
        write_cases(options.csv, COLUMNS, [("start", options.ranks, *item) for item in medians.items()])


def start_session(ranks: int) -> Any:
    """Return a Spark session with an executor for each rank."""
    import pyspark
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_HOME", str(Path(pyspark.__file__).parent))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local-cluster[{ranks},1,1024]").appName("benchmark")
    for key, value in {"enabled": "false", "showConsoleProgress": "false"}.items():
        builder = builder.config(f"spark.ui.{key}", value)
    builder = builder.config("spark.driver.memory", "1g")
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def turn_of(name: str, ranks: int, arrays: str) -> Callable[[], float]:
    """Return the function that runs the contestant's job once, and returns the result of rank 0."""
    reduce_with_ronde = reduce_torch_with_ronde if arrays == "torch" else reduce_numpy_with_ronde
    if name == BARE:
        import ronde

        return lambda: ronde.run(reduce_with_ronde, np=ranks)[0]
    if name in PROTECTIONS:
        from ronde.launch.clusters.local import LocalCluster
        from ronde.launch.driver.functions import run_function
        from ronde.launch.job_options import RunOptions

        environment = {"RONDE_PROTECTION": PROTECTIONS[name]}
        cluster, options = LocalCluster(ranks), RunOptions(ranks, verbose=0, env=environment)
        return lambda: run_function(cluster, reduce_with_ronde, (), {}, options)[0]
    if name == SPARK:
        from ronde import spark

        return lambda: spark.run(reduce_with_ronde, num_proc=ranks, verbose=0)[0]
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=ranks, local_mode=False, use_gpu=False)
    return lambda: distributor.run(reduce_with_torch)


def expected(ranks: int) -> float:
    """Return the first element after all reductions."""
    return float(ranks**REDUCTIONS)


def reduce_torch_with_ronde() -> float:
    """Sum ones repeatedly over all ranks, in place."""
    import torch

    import ronde

    ronde.init()
    world, x = ronde.world(), torch.ones(ELEMENTS)
    for _ in range(REDUCTIONS):
        world.allreduce(x, out=x)
    return float(x[0])


def reduce_numpy_with_ronde() -> float:
    """Do the same without PyTorch."""
    import numpy

    import ronde

    ronde.init()
    world, x = ronde.world(), numpy.ones(ELEMENTS, numpy.float32)
    for _ in range(REDUCTIONS):
        world.allreduce(x, out=x)
    return float(x[0])


def reduce_with_torch() -> float:
    """Do the same with torch.distributed, instead of Ronde."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(ELEMENTS)
    for _ in range(REDUCTIONS):
        dist.all_reduce(x)
    result = float(x[0])
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    main()
