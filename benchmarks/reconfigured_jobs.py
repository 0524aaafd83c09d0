"""Jobs of torch.distributed whose ranks die one after the other, while the others go on by `_reconfigure()`."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from crews import CallTimes
from groups import _free_port

from ronde.errors import RemoteError, TimeoutError
from ronde.testing import ranks

CONTESTANTS = ("ronde", "gloo")
LIMIT = timedelta(seconds=60)
NOTICED_S = 0.2  # after which every rank has noticed the death of another


def lose_ranks(backend: str, port: int) -> dict[int, float]:
    """Reconfigure whenever the last rank has died. Return the seconds by the number of ranks that remain.

    The time begins when every rank has the handles of all, and ends after the next all-reduce.
    """
    import torch
    import torch.distributed as dist

    import ronde.torch.distributed  # noqa: F401, registers the backend

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=LIMIT)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group/", store),
        rank=rank,
        world_size=size,
        timeout=LIMIT,
        enable_reconfigure=True,
    )
    seconds: dict[int, float] = {}
    for remaining in range(size, 0, -1):
        if rank == remaining:  # the last one of the generation before
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(NOTICED_S)
        store.set(f"{remaining}/{rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"{remaining}/{each}").decode() for each in range(remaining)]
        _meet(store, f"{remaining}/begin", remaining)
        began = time.perf_counter()
        dist._reconfigure(remaining, handles).wait()
        x = torch.ones(1)
        dist.all_reduce(x)
        seconds[remaining] = time.perf_counter() - began
        if x[0] != remaining:
            raise RuntimeError(f"the sum of {remaining} ranks is {x[0]}")
        _meet(store, f"{remaining}/end", remaining)
    del seconds[size]  # no rank had died
    return seconds


def _meet(store: Any, key: str, size: int) -> None:
    """Wait until so many ranks have called this."""
    if store.add(key, 1) == size:
        store.set(f"{key}/all", b"")
    store.get(f"{key}/all")


def measure_reconfigurations(most_ranks: int, rounds: int) -> Iterator[tuple[int, dict[str, CallTimes]]]:
    """Yield the times of all contestants by the number of ranks that remain, the slowest rank's of each job.

    The contestants take turns, one job each in every round.
    """
    jobs: dict[str, list[dict[int, float]]] = {}
    with ranks.template("torch.distributed", "ronde.torch.distributed") as process, ranks.copies_of(process):
        for backend in CONTESTANTS * rounds:
            with ranks.start(lose_ranks, most_ranks + 1, backend, _free_port()) as job:
                try:
                    outcomes = job.outcomes()
                    results = [each.value for each in outcomes if each.value is not None]
                    if not results:
                        raise RemoteError(outcomes[0].traceback_text, 0)
                    longest = {
                        size: max(each[size] for each in results if size in each)
                        for size in range(most_ranks, 1, -1)
                    }
                    jobs.setdefault(backend, []).append(longest)
                except (RemoteError, TimeoutError, ValueError) as error:
                    print(f"a job of {backend} failed: {error}", file=sys.stderr, flush=True)
    for size in range(most_ranks, 1, -1):
        times = {backend: [each[size] for each in done] for backend, done in jobs.items()}
        yield size, {name: CallTimes(statistics.median(each), min(each)) for name, each in times.items()}
