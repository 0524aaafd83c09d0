"""How long fits take, of several libraries in turns, with the CPU time of all their processes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["FitTimes", "measure_fits", "print_fits"]


class FitTimes(NamedTuple):
    """The medians of CPU time and time of a fit, in seconds, and what the last one returned."""

    cpu_s: float
    wall_s: float
    result: Any


def measure_fits(fits: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, FitTimes]:
    """Return the times of each fit by contestant. They take turns.

    The CPU time is that of this process and all that it has started, the JVM too.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in fits}
    results = {}
    for number in range(rounds + 1):
        for name, fit in fits.items():
            began_cpu_s, began_s = cpu_s(), time.perf_counter()
            results[name] = fit()
            if number:  # the first round was the warm-up
                times[name].append((cpu_s() - began_cpu_s, time.perf_counter() - began_s))
    return {
        name: FitTimes(
            statistics.median(cpu for cpu, _ in took),
            statistics.median(wall for _, wall in took),
            results[name],
        )
        for name, took in times.items()
    }


def print_fits(title: str, times: Mapping[str, FitTimes], rival: str) -> None:
    """Print a table of the times, with the ratio of CPU times to the rival's."""
    print(f"\n{title}")
    print(f"{'':18}{'CPU s':>8}{'s':>8}{'CPU /' + rival:>18}")
    for name, each in times.items():
        ratio = each.cpu_s / times[rival].cpu_s
        print(f"{name:18}{each.cpu_s:8.2f}{each.wall_s:8.2f}{ratio:18.2f}", flush=True)


def cpu_s() -> float:
    """Return the CPU time of this process, of those that it has started, and of those that these have started."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended; its parent's sum contains it
            continue
        stats[int(path.parent.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    family = {os.getpid()}
    while more := {pid for pid, (parent, _) in stats.items() if parent in family} - family:
        family |= more
    return sum(stats[pid][1] for pid in family) / os.sysconf("SC_CLK_TCK")
