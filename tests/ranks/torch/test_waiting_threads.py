"""Several threads wait for a tensor whose result PyTorch completes, on another device or of sparse parts."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import ronde
from ronde.testing import ranks

pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")
CompletedHandle: Any = pytest.importorskip("ronde.torch.handles").CompletedHandle


def results_of_two_threads(handle: Any) -> list[Any]:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(handle.wait())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def complete_once() -> tuple[int, list[float]]:
    """Return how often the result was completed, and what each thread got."""
    hvd.init()
    calls = []

    def finish(result: Any) -> Any:
        calls.append(result)
        time.sleep(0.3)
        result *= 10
        return result

    handle = CompletedHandle(ronde.allreduce_async(np.ones(1), "x", op=ronde.Sum), finish)
    results = results_of_two_threads(handle)
    return len(calls), [float(each[0]) for each in results]


def test_one_thread_completes_a_result_and_the_others_wait() -> None:
    assert ranks.run(complete_once, 1) == [(1, [10.0, 10.0])]
