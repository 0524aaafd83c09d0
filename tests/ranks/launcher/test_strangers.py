"""Another user of this machine, who knows Ronde and the name of a job, cannot become one of its ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.other_user import as_nobody
from tests.ports import free_port

from ronde.comm.identity import Surroundings, identify
from ronde.net.addresses import parse_address, resolve
from ronde.net.authentication import Role, authenticate, protection_of
from ronde.settings import JobKey
from ronde.stores.server import STORE_PURPOSE
from ronde.stores.tcp import StoreClient

pytestmark = [pytest.mark.root, pytest.mark.slow]

LONG_S = 60
PROGRAM = """
import json, os, sys, time
import numpy, ronde

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
if rank == 0:
    print(json.dumps(dict(os.environ)), flush=True)
while rank and not os.path.exists("go"):
    time.sleep(0.02)
ronde.init()
print(int(ronde.world().allreduce(numpy.array([1]))[0]), flush=True)
"""
# What a launcher leaves behind, which tells nothing when these tests run under one.
SPEAKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "RONDE_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SPEAKS)}
    return {**clean, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def enter(address: str, job: str) -> None:
    """Connect with the key that follows from the name of the job."""
    StoreClient(address, JobKey.derived_from(job), 10 * 10**9, patience_ns=0).close()


def shake_hands(address: str, job: str) -> None:
    """Do the handshake without checking the server's user."""
    endpoint = resolve(parse_address(address))[0]
    with socket.socket(endpoint.family) as sock:
        sock.connect(endpoint.sockaddr)
        key = JobKey.derived_from(job)
        authenticate(
            sock,
            Role.CLIENT,
            key,
            STORE_PURPOSE,
            protection_of(sock, False),
            time.monotonic_ns() + 10 * 10**9,
        )


def attack(job: subprocess.Popen[str]) -> None:
    """Attack while rank 0 waits for rank 1; the ranks must meet all the same."""
    assert job.stdout is not None
    said = json.loads(job.stdout.readline())
    point = identify(said, Surroundings(os.geteuid())).meeting
    assert point is not None
    deadline = time.monotonic() + LONG_S
    while "refused" in (answer := as_nobody(shake_hands, point.address, point.job)):
        assert time.monotonic() < deadline  # it does not serve yet
    assert answer.startswith(("AuthenticationError", "Connection", "BrokenPipe")), answer
    answer = as_nobody(enter, point.address, point.job)
    assert answer.startswith("AuthenticationError"), answer


def test_under_open_mpi(tmp_path: Path) -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("needs Open MPI beside this Python")
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    with subprocess.Popen(
        [mpirun, *options, sys.executable, "-c", PROGRAM],
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        attack(job)
        (tmp_path / "go").touch()
        assert job.communicate(timeout=LONG_S)[0].split() == ["2", "2"]


def test_by_hand_at_a_port_of_loopback(tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=environment(RANK=str(rank), **place),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        attack(ranks[0])
        (tmp_path / "go").touch()
        assert [rank.communicate(timeout=LONG_S)[0].split() for rank in ranks] == [["2"], ["2"]]
    finally:
        for rank in ranks:
            with rank:
                rank.kill()
