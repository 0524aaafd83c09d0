"""Process groups of the backend "ronde" between two hosts with two ranks each."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest

from ronde.errors import PeerLostError
from ronde.testing import faults
from ronde.testing.hosts import Hosts
from ronde.testing.worker import tell

torch: Any = pytest.importorskip("torch")
dist: Any = pytest.importorskip("torch.distributed")
rtd: Any = pytest.importorskip("ronde.torch.distributed")

PORT = 29411
LOST_AFTER_S = 3


def join(host: str) -> tuple[int, int, Any]:
    """Join the default group at PyTorch's store on this host. Return rank, size and the store."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(host, PORT, size, is_master=rank == 0, timeout=timedelta(seconds=60))
    limit = timedelta(seconds=60)
    dist.init_process_group("ronde", store=store, rank=rank, world_size=size, timeout=limit)
    return rank, size, store


def operations(host: str) -> list[Any]:
    rank, size, _ = join(host)
    total = torch.full((100_000,), rank + 1.0)
    dist.all_reduce(total)
    across = dist.new_group([1, 2])
    pair = torch.full((3,), float(rank))
    if rank in (1, 2):
        dist.all_reduce(pair, group=across)
    received = torch.zeros(50_000)
    works = [
        dist.isend(torch.full((50_000,), float(rank)), (rank + 2) % size, tag=7),
        dist.irecv(received, (rank - 2) % size, tag=7),
    ]
    for work in works:
        work.wait()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 20))
    model(torch.full((4, 50), rank + 1.0)).sum().backward()
    gradient = model.module.weight.grad
    dist.destroy_process_group()
    return [float(total[-1]), float(pair[0]), float(received[-1]), float(gradient[0, 0])]


def test_operations_between_hosts() -> None:
    with Hosts(2, ranks_per_host=2) as two:
        results = two.run(operations, two.ipv4(0))
    assert [result[0] for result in results] == [10.0] * 4
    assert [result[1] for result in results] == [0.0, 3.0, 3.0, 3.0]
    assert [result[2] for result in results] == [2.0, 3.0, 0.0, 1.0]
    assert [result[3] for result in results] == [10.0] * 4  # 4 rows, mean of 1 to 4


def survive(host: str) -> tuple[int, str, float]:
    """The second host is lost. The first one goes on with its two ranks."""
    rank, size, store = join(host)
    store.set(f"handle/{rank}", rtd.get_reconfigure_handle())
    handles = [store.get(f"handle/{each}").decode() for each in range(size)]
    dist.barrier()
    tell()
    try:
        while True:
            dist.all_reduce(torch.ones(10))
    except PeerLostError as error:
        lost = error
    rtd.reconfigure(1, handles[:2])
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return lost.rank, lost.host, float(total)


@pytest.mark.parametrize("how", ["kill", "cable"])
def test_the_ranks_of_a_host_go_on_without_the_other_host(how: str) -> None:
    environ = {"RONDE_PEER_TIMEOUT": str(LOST_AFTER_S)}
    with Hosts(2, ranks_per_host=2) as two, two.start(survive, two.ipv4(0), environ=environ) as job:
        for rank in range(4):
            job.told(rank)
        if how == "cable":
            two.disconnect(1)
            time.sleep(2 * LOST_AFTER_S)  # the others go on meanwhile
        for rank in (2, 3):
            faults.kill(job.pids[rank])
        outcomes = job.outcomes()
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.traceback_text
        rank, host, total = outcome.value
        assert rank in (2, 3)
        assert host
        assert total == 2
