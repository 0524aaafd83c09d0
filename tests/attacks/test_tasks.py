"""Strangers at the port to which the tasks of a cluster connect: none gets in, and the job goes on."""

from __future__ import annotations

import io
import os
import pickle
import random
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.crowds import crowd

import ronde
from ronde.errors import TimeoutError
from ronde.launch.clusters.cluster import SlotEvents, Ticket
from ronde.launch.clusters.local import LocalCluster
from ronde.launch.driver.functions import run_function
from ronde.launch.driver.task import run_task
from ronde.launch.job_options import RunOptions
from ronde.net.addresses import parse_address

pytestmark = pytest.mark.slow

PATIENCE_S = 240  # against hanging only
CONNECTIONS, FRAMES = 2_000, 50  # 10^5 frames
FLOOD = 1_000
LENGTHS = (0, 1, 16, 2**16, 2**24, 2**31, 2**32 - 1)  # of frames that are cut off
GROWTH_BYTES = 64 << 20


class WatchedCluster(LocalCluster):
    """Keeps the tickets, which say where the driver listens."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.tickets: list[Ticket] = []

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        self.tickets += tickets
        super().request(tickets, events)


def works(folder: Path) -> tuple[int, float]:
    """Take steps until a file is there; note their number."""
    ronde.init()
    step = 0
    while not ronde.broadcast_object((folder / "stop").exists(), name="stop"):
        total = float(ronde.allreduce(1.0, op=ronde.Sum, name="x"))
        step += 1
        if ronde.rank() == 0:
            (folder / "new").write_text(str(step))
            (folder / "new").rename(folder / "step")
    return step, total


def step_of(folder: Path, above: int = 0) -> int:
    """Wait until the job is beyond a step; return the one at which it is."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with suppress(FileNotFoundError):
            if (step := int((folder / "step").read_text())) > above:
                return step
        assert time.monotonic() < deadline, "the job stands still"
        time.sleep(0.02)


def used_bytes() -> int:
    """Return the memory of this process, which is that of the driver."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


def send_frames(address: tuple[str, int], bomb: bytes) -> None:
    """Send random frames, also with lengths that their bytes do not have, and pickles."""
    rng = random.Random(13)
    for _ in range(CONNECTIONS):
        frames = []
        for _ in range(FRAMES):
            body = bomb if rng.random() < 0.1 else rng.randbytes(rng.randrange(64))
            length = rng.choice(LENGTHS) if rng.random() < 0.2 else len(body)
            frames.append(length.to_bytes(4, "big") + body)
        with suppress(ConnectionError), socket.create_connection(address, PATIENCE_S) as sock:
            sock.sendall(b"".join(frames))


def test_no_stranger_gets_in_and_the_job_goes_on(tmp_path: Path) -> None:
    cluster, results = WatchedCluster(2), []
    options = RunOptions(2, stdout=io.StringIO(), stderr=io.StringIO())
    job = threading.Thread(
        target=lambda: results.extend(run_function(cluster, works, (tmp_path,), {}, options)), daemon=True
    )
    job.start()
    before = step_of(tmp_path)
    ticket = cluster.tickets[0]
    where = ticket.addresses[0]
    endpoint = parse_address(where)
    used = used_bytes()
    with crowd(where, FLOOD, words=b"\0" * 16):
        send_frames((endpoint.host, endpoint.port), pickle.dumps(Bomb(tmp_path / "exploded")))
        with pytest.raises(TimeoutError, match="job key"):
            run_task(replace(ticket, job_key=bytes(32), start_timeout_ns=10**9))
        step_of(tmp_path, above=before)
    assert not (tmp_path / "exploded").exists()
    assert used_bytes() - used < GROWTH_BYTES
    step_of(tmp_path, above=step_of(tmp_path))
    (tmp_path / "stop").touch()
    job.join(PATIENCE_S)
    assert [total for _, total in results] == [2.0, 2.0]
