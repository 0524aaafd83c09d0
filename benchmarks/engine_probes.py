"""Measures the engine's other costs: processor time, wakeups, and whether it needs the interpreter's lock.

Every function here except `probe` is a program for ranks.
"""

from __future__ import annotations

import gc
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import ronde
from ronde.testing import ranks

TENSORS = 100
BYTES = 4096
WARM_UP_ROUNDS = 3
LATE_S = 2.0
IDLE_S = 5.0
JOBS = 5  # how many times a probe starts anew, if the placement of its threads matters
GIL_TENSORS = 300
SUBMITTED_S = 0.3  # long enough for rank 1 to have submitted everything
SPIN_S = 2.5
SETTLED_S = 0.3  # background work after the first calls is over


class Result(NamedTuple):
    """One line of the report; `value_us` only if it is a time."""

    case: str
    text: str
    value_us: float | None = None


def submit_cpu(module: str, rounds: int) -> float:
    """Seconds of this thread's processor time per submission of a cached tensor: median over rounds."""
    submit, tensors = (numpy_submitter if module == "ronde" else torch_submitter)()
    times = []
    for _ in range(WARM_UP_ROUNDS + rounds):
        gc.collect()
        start_together()
        began = time.thread_time()
        handles = [submit(x, name) for x, name in tensors]
        times.append((time.thread_time() - began) / TENSORS)
        for handle in handles:
            ronde.synchronize(handle)
    return statistics.median(times[WARM_UP_ROUNDS:])


def start_together() -> None:
    """Meet the other ranks. Not by ronde.barrier: that is negotiated every time, which takes the interpreter."""
    ronde.allreduce(np.zeros(1, np.float32), "start")


def numpy_submitter() -> tuple[Callable[[Any, str], Any], list[tuple[Any, str]]]:
    """The function that submits, and tensors with their names."""
    ronde.init()
    tensors = [(np.zeros(BYTES // 4, np.float32), f"tensor.{i}") for i in range(TENSORS)]
    return lambda x, name: ronde.allreduce_async(x, name, ronde.Sum, out=x), tensors


def torch_submitter() -> tuple[Callable[[Any, str], Any], list[tuple[Any, str]]]:
    """The same with PyTorch's tensors."""
    import torch

    torch.set_num_threads(1)
    hvd: Any = importlib.import_module("ronde.torch")
    hvd.init()
    tensors = [(torch.zeros(BYTES // 4), f"tensor.{i}") for i in range(TENSORS)]
    return lambda x, name: hvd.allreduce_async_(x, name=name, op=hvd.Sum), tensors


def waiting_share() -> float:
    """Rank 0 waits for a tensor that the others submit late: its processor time over the time it waited."""
    ronde.init()
    x = np.zeros(BYTES // 4, np.float32)
    for _ in range(WARM_UP_ROUNDS):
        ronde.allreduce(x, "late", out=x)
    start_together()
    if ronde.rank() > 0:
        time.sleep(LATE_S)
    began, used = time.perf_counter(), time.process_time()
    ronde.allreduce_async(x, "late", out=x).wait()
    return (time.process_time() - used) / (time.perf_counter() - began)


def idle_share() -> float:
    """The processor time of a rank with nothing to do, over the time that passes."""
    ronde.init()
    x = np.zeros(BYTES // 4, np.float32)
    for _ in range(WARM_UP_ROUNDS):
        ronde.allreduce(x, "x", out=x)
    start_together()
    time.sleep(SETTLED_S)
    began, used = time.perf_counter(), time.process_time()
    time.sleep(IDLE_S)
    return (time.process_time() - used) / (time.perf_counter() - began)


def spinning_peer() -> tuple[list[float], list[float]]:
    """Rank 1 submits everything and then keeps its interpreter; the others submit one by one.

    Returns the latencies, and when they ended on the clock that all processes of a machine share; of rank 1: when it
    began and ended to spin.
    """
    ronde.init()
    tensors = [(np.zeros(BYTES // 4, np.float32), f"tensor.{i}") for i in range(GIL_TENSORS)]
    for _ in range(WARM_UP_ROUNDS):
        for handle in [ronde.allreduce_async(x, name, out=x) for x, name in tensors]:
            handle.wait()
        start_together()
    time.sleep(SETTLED_S)
    start_together()
    if ronde.rank() == 1:
        return [], _submit_and_spin(tensors)
    time.sleep(SUBMITTED_S)
    latencies, ends = [], []
    for x, name in tensors:
        began = time.perf_counter()
        ronde.allreduce(x, name, out=x)
        ends.append(time.perf_counter())
        latencies.append(ends[-1] - began)
    return latencies, ends


def _submit_and_spin(tensors: list[tuple[Any, str]]) -> list[float]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    handles = [ronde.allreduce_async(x, name, out=x) for x, name in tensors]
    began = time.perf_counter()
    end = began + SPIN_S
    while time.perf_counter() < end:
        pass
    sys.setswitchinterval(interval)
    for handle in handles:
        handle.wait()
    return [began, end]


def probe(case: str, size: int, rounds: int) -> Iterator[Result]:
    """Run one of PROBES on `size` ranks and yield its lines; RemoteError and TimeoutError pass through."""
    match case:
        case "submit cpu":
            for module in ("ronde", "ronde.torch"):
                seconds = max(ranks.run(submit_cpu, size, module, rounds))
                text = (
                    f"{module}: {seconds * 1e6:.2f} us of the submitting thread's processor time per tensor"
                )
                yield Result(f"submit cpu {module}", text, seconds * 1e6)
        case "waiting":
            share = statistics.median(ranks.run(waiting_share, size)[0] for _ in range(JOBS))
            yield Result(case, f"rank 0 waits {LATE_S:g} s for a handle: {share:.3%} of a core")
        case "idle":
            shares = ranks.run(idle_share, size)
            each = ", ".join(f"{share:.4%}" for share in shares)
            yield Result(case, f"{IDLE_S:g} s with nothing to do, share of a core by rank: {each}")
        case "gil":
            yield _judge_gil([ranks.run(spinning_peer, size) for _ in range(JOBS)])


def _judge_gil(jobs: list[list[tuple[list[float], list[float]]]]) -> Result:
    medians_us, in_time, longest_us = [], 0, 0.0
    for (latencies, ends), (_, (began, end)), *_ in jobs:
        # Latencies after the end are short in any case, and do not count.
        counted = [each if began <= at <= end else math.inf for each, at in zip(latencies, ends)]
        medians_us.append(statistics.median(counted) * 1e6)
        in_time += sum(each < math.inf for each in counted)
        longest_us = max(longest_us, max(latencies) * 1e6)
    each_us = ", ".join(f"{median_us:.1f}" for median_us in sorted(medians_us))
    text = (
        f"rank 0's latency while rank 1 keeps its interpreter: medians of {len(jobs)} jobs {each_us} us, "
        f"longest {longest_us:.1f} us; {in_time} of {len(jobs) * GIL_TENSORS} ended while it did"
    )
    return Result("gil", text, statistics.median(medians_us))


PROBES = ("submit cpu", "waiting", "idle", "gil")
