"""Joining and leaving again and again in the same processes: nothing grows."""

from __future__ import annotations

import ctypes
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ports import free_port

import ronde
from ronde.testing import ranks

WARM_UP = 10  # cycles after which everything has been loaded and every cache filled
M_ARENA_MAX = -8  # of mallopt(3)


@dataclass(frozen=True)
class Usage:
    """What this process holds."""

    files: int
    threads: int
    mappings: int
    heap_mib: float

    @classmethod
    def now(cls) -> Usage:
        me = Path("/proc/self")
        status = dict(line.split(":", 1) for line in (me / "status").read_text().splitlines())
        return cls(
            files=len(list((me / "fd").iterdir())),
            threads=int(status["Threads"]),
            mappings=len((me / "maps").read_text().splitlines()),
            # Pages of files come and go with what else the machine does.
            heap_mib=int(status["RssAnon"].split()[0]) / 1024,
        )


def cycle(times: int) -> tuple[Usage, Usage, list[float]]:
    """What is held after the warm-up and at the end, and the size of the heap in MiB after each cycle."""
    # Each arena keeps some memory, and how many there are depends on which threads run at the same time.
    assert ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1) == 1
    begin, heaps_mib = Usage.now(), []
    for number in range(WARM_UP + times):
        ronde.init()
        world: Any = ronde.world()
        assert (world.allreduce(np.full(20_000, number)) == world.size * number).all()
        shared = world.empty(1000)
        assert world.allreduce(shared + 1)[0] == world.size
        del shared
        ronde.shutdown()
        heaps_mib.append(Usage.now().heap_mib)
        if number == WARM_UP - 1:
            begin = settled()
    return begin, settled(), heaps_mib[WARM_UP:]


def settled() -> Usage:
    """What is held once all that is ending has ended: a joined thread, the other side's connection to our store."""
    usages = []
    for _ in range(20):
        time.sleep(0.01)
        usages.append(Usage.now())
    return min(usages, key=lambda usage: (usage.files, usage.threads))


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("store", "times"),
    [
        ("of the launcher", 30),
        pytest.param("of the launcher", 300, marks=pytest.mark.slow),
        pytest.param("of rank 0", 300, marks=pytest.mark.slow),
    ],
)
def test_nothing_grows(store: str, transport: str, times: int) -> None:
    environ = {"RONDE_TRANSPORT": transport}
    if store == "of rank 0":
        environ |= {"RONDE_STORE": "", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    for begin, end, heaps_mib in ranks.run(cycle, 2, times, environ=environ, timeout_s=280):
        assert end.files <= begin.files
        assert end.threads == begin.threads
        assert end.mappings <= begin.mappings + 4  # the allocator's own
        # Within some 80 cycles the heap grows by up to 10 MiB that lie free between what lives. It stays at that.
        early, late = heaps_mib[: times // 4], heaps_mib[-(times // 4) :]
        assert statistics.median(late) <= statistics.median(early) + 12
