"""Functions that tests of clusters run as ranks, in a file without pytest, and what a job with MPI has left."""

from __future__ import annotations

import base64
import os
import re
import signal
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urljoin

import ronde
import ronde.elastic
from ronde.environment import environment

__all__ = [
    "Trained",
    "computes",
    "finds_key",
    "finds_key_in_spark",
    "kills",
    "leftovers",
    "raises",
    "trains_in_place",
    "waits_for_death",
]

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


@dataclass
class Trained:
    """How a rank has trained: its last place, and the steps at which its process has entered the training function."""

    rank: int
    size: int
    entries: list[int] = field(default_factory=list)


def trains_in_place(folder: Path, kill_task: Callable[[], None]) -> Trained:
    """Train until there are two ranks; in the middle, rank 1 of two loses its task by this function, and waits."""
    killed = folder / "killed"
    entries: list[int] = []

    @ronde.elastic.run
    def train(state: ronde.elastic.ObjectState) -> Trained:
        entries.append(state.step)
        while state.step < 20 or ronde.size() < 2:
            if state.step == 10 and ronde.rank() == 1 and not killed.exists():
                killed.touch()
                kill_task()
                time.sleep(FOREVER_S)
            ronde.allreduce(1.0, name="x")
            if state.step != 10 or killed.exists():  # else the second rank is not there yet
                state.step += 1
            state.commit()
            time.sleep(0.02)
        return Trained(ronde.rank(), ronde.size(), entries)

    return train(ronde.elastic.ObjectState(step=0))


def finds_key() -> list[str]:
    """Return the processes whose command line or environment has the key of the job, besides its ranks, and files."""
    found = _files_with_key(Path(tempfile.gettempdir()), "spark-*/**/*")
    key = os.environ["RONDE_JOB_KEY"].encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            if key in words or (key in variables and b"LOCAL_RANK=" not in variables):
                found.append(words.decode(errors="replace"))
    return found


def finds_key_in_spark(pages: str, folders: list[Path]) -> tuple[list[str], list[str]]:
    """Return where Spark shows the key, besides `finds_key`: its web pages and REST API, and files; and all pages.

    `pages`: the URL of Spark's pages; `folders`: with the logs of executors and events.
    """
    found = finds_key()
    for folder in folders:
        found += _files_with_key(folder, "**/*")
    rest = f"{pages}/api/v1/applications"
    unseen, seen = [f"{pages}/jobs/", rest], []
    while unseen:
        page = unseen.pop()
        seen.append(page)
        with suppress(OSError), urllib.request.urlopen(page, timeout=60) as answer:
            text = answer.read()
            if _has_key(text):
                found.append(page)
            links = re.findall(r"""href=["']([^"'#\s]+)""", text.decode(errors="replace"))
            if page == rest:
                app = re.findall(rb'"id" : "([^"]+)"', text)[0].decode()
                lists = ("jobs", "stages?details=true", "allexecutors", "environment", "sql", "storage/rdd")
                links += [f"{rest}/{app}/{name}" for name in lists]
            wanted = {urljoin(page, link.replace("&amp;", "&")) for link in links}
            aside = {each for each in wanted if any(word in each for word in ("/static/", "kill", "sort="))}
            unseen += {each for each in wanted if each.startswith(pages)} - {*aside, *seen, *unseen}
    return found, seen


def _files_with_key(folder: Path, pattern: str) -> list[str]:
    found = []
    for file in folder.glob(pattern):
        with suppress(OSError):
            if file.is_file() and _has_key(file.read_bytes()):
                found.append(str(file))
    return found


def _has_key(data: bytes) -> bool:
    """Return whether the key of the job is there, as it is or as text."""
    text = os.environ["RONDE_JOB_KEY"]
    key = bytes.fromhex(text)
    return any(each in data for each in (key, text.encode(), base64.b64encode(key)))


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
