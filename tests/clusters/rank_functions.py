"""Functions that tests of clusters run as ranks, in a file without pytest, and what a job with MPI has left."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import ronde
from ronde.environment import environment

__all__ = ["computes", "finds_key", "kills", "leftovers", "raises", "waits_for_death"]

_MARKS = ("TEST_RUN_OF_RONDE", "TEST_ENGINE_OF_RONDE")
FOREVER_S = 600  # how long the other ranks would go on


def computes(factor: int) -> tuple[float, int, int, int, int, str]:
    """Return a sum that MPI has made, the rank twice, the local rank, and a variable of MPI."""
    from mpi4py import MPI

    ronde.init()
    total = float(ronde.allreduce(float(factor * (ronde.rank() + 1)), op=ronde.Sum))
    print("rank", ronde.rank(), "is done")
    world = MPI.COMM_WORLD
    assert world.Get_size() == ronde.size()
    interface = environment().get("OMPI_MCA_btl_tcp_if_include", "")
    return total, ronde.rank(), world.Get_rank(), ronde.local_rank(), ronde.local_size(), interface


def raises() -> None:
    """Raise on rank 1."""
    ronde.init()
    if ronde.rank() == 1:
        raise LookupError("no such column")
    time.sleep(FOREVER_S)


def kills(victim: str, folder: Path) -> None:
    """Kill this rank, or the processes of this job with a program; note when."""
    ronde.init()
    ronde.allreduce(1.0, name="all are there")
    if ronde.rank() == 1:
        pids = [os.getpid()] if victim == "rank" else programs(victim)
        assert pids
        (folder / "killed").write_text(str(time.monotonic()))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    time.sleep(FOREVER_S)


def waits_for_death(folder: Path) -> None:
    """Note this process once all ranks use MPI, and go on."""
    ronde.init()
    ronde.allreduce(1.0, name="all are there")
    (folder / str(os.getpid())).touch()
    time.sleep(FOREVER_S)


def finds_key() -> list[str]:
    """Return the processes whose command line or environment has the key of the job, besides its ranks, and files."""
    key = os.environ["RONDE_JOB_KEY"].encode()
    found = []
    for file in Path(tempfile.gettempdir()).glob("spark-*/**/*"):
        with suppress(OSError):
            if file.is_file() and any(
                each in file.read_bytes() for each in (key, bytes.fromhex(key.decode()))
            ):
                found.append(str(file))
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            if key in words or (key in variables and b"LOCAL_RANK=" not in variables):
                found.append(words.decode(errors="replace"))
    return found


def programs(name: str) -> list[int]:
    """Return the running processes of this test run with this program as their first word, or one of the next."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")[:4]
            if any(os.path.basename(word) == name.encode() for word in words) and _is_ours(folder):
                found.append(int(folder.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def leftovers() -> list[int]:
    """Return the processes of MPI that still run."""
    return [
        pid for name in ("mpirun", "prterun", "prted", "ronde.launch.mpi.rank_task") for pid in programs(name)
    ]


def _is_ours(folder: Path) -> bool:
    """Return whether a process carries the mark of this test run, which an engine has under another name."""
    marks = [value for name, value in environment().items() if name in _MARKS]
    variables = (folder / "environ").read_bytes()
    return any(f"_OF_RONDE={mark}".encode() in variables for mark in marks)
