"""A stranger on the same network knows Ronde, the job's name and where it meets, and has a host of its own.

It has no file of the user's. It becomes no rank and no node, and nothing that it sends is unpickled; the job, which was
given no key, goes on with those that share the user's home directory.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ronde.testing.hosts import Hosts

PORT = 29_517
LONG_S = 100
RANK = """
import os, sys
import ronde
ronde.init()
sys.stdout.write(f"met {ronde.allgather_object(os.environ['WHO'])}\\n")
"""
SPEAKS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "RONDE_",
    "OMPI_",
    "PMI",
    "SLURM_",
    "TORCHELASTIC_",
    "PET_",
)


class _Trap:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


class Job:
    """Processes on hosts, with the home directory of the user or, on the stranger's, another one."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, host: int, command: list[str], home: str = "ours", **variables: str
    ) -> subprocess.Popen[str]:
        (self.folder / home).mkdir(exist_ok=True)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(SPEAKS)}
        path = os.pathsep.join(path for path in sys.path if path)
        who = {"XDG_CONFIG_HOME": str(self.folder / home), "WHO": home, "PYTHONPATH": path}
        process = subprocess.Popen(
            [*self.hosts.command(host), sys.executable, *command],
            env={**clean, **who, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as three:
        yield three


@pytest.fixture
def job(hosts: Hosts, tmp_path: Path) -> Iterator[Job]:
    job = Job(hosts, tmp_path)
    yield job
    for process in job.started:
        with process:
            process.kill()


def refused(stranger: subprocess.Popen[str]) -> str:
    out, err = stranger.communicate(timeout=LONG_S)
    assert stranger.returncode != 0
    assert "met" not in out
    return err


SEND = """
import contextlib, socket, sys, time
for _ in range(2_000):
    with contextlib.suppress(ConnectionRefusedError):
        sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
        break
    time.sleep(0.05)
sock.sendall(bytes.fromhex(sys.argv[3]))
with contextlib.suppress(ConnectionError):
    assert not sock.recv(1)
print("sent")
"""


def send_a_trap(job: Job, address: str, trap: Path) -> None:
    """From the stranger's host, without any handshake."""
    trapped = pickle.dumps(_Trap(trap)).hex()
    sender = job.start(2, ["-c", SEND, address, str(PORT), trapped * 8])
    out, err = sender.communicate(timeout=LONG_S)
    assert out == "sent\n", err


@pytest.mark.parametrize("guess", ["", "1"], ids=["with a key of its own", "with the key of the job's name"])
def test_it_becomes_no_rank(job: Job, guess: str) -> None:
    place = {"MASTER_ADDR": job.hosts.ipv4(0), "MASTER_PORT": str(PORT), "WORLD_SIZE": "2"}
    first = job.start(0, ["-c", RANK], RANK="0", **place)
    trap = job.folder / "sprung"
    send_a_trap(job, job.hosts.ipv4(0), trap)
    stranger = job.start(2, ["-c", RANK], "strangers", RANK="1", RONDE_INSECURE_JOB_KEY=guess, **place)
    said = refused(stranger)
    assert "AuthenticationError: the store at tcp:" in said
    assert "does not know the job key" in said
    assert ("give all machines the same RONDE_JOB_KEY_FILE" in said) == (not guess)
    second = job.start(1, ["-c", RANK], RANK="1", **place)
    for process in (first, second):
        out, err = process.communicate(timeout=LONG_S)
        assert out == "met ['ours', 'ours']\n", err
    assert not trap.exists()


def test_it_becomes_no_node(job: Job) -> None:
    (job.folder / "script.py").write_text(RANK)
    where = ["--nnodes", "2", "--rdzv-endpoint", f"{job.hosts.ipv4(0)}:{PORT}", "--rdzv-id", "job"]
    command = ["-m", "ronde", "run", *where, str(job.folder / "script.py")]
    first = job.start(0, command)
    assert first.stderr is not None
    assert "waiting for the others" in first.stderr.readline()
    for option in ([], ["--insecure-job-key"]):
        stranger = job.start(2, [*command[:3], *option, *command[3:]], "strangers")
        assert "does not know the job key" in refused(stranger)
    second = job.start(1, command)
    for process in (first, second):
        out, err = process.communicate(timeout=LONG_S)
        assert "met ['ours', 'ours']\n" in out, err


def test_without_a_home_directory_nothing_is_served(job: Job) -> None:
    place = {"MASTER_ADDR": job.hosts.ipv4(0), "MASTER_PORT": str(PORT), "WORLD_SIZE": "2", "RANK": "0"}
    nowhere = str(job.folder / "not" / "there")
    alone = job.start(0, ["-c", RANK], **place, HOME=nowhere, XDG_CONFIG_HOME="")
    assert "UsageError: there is no job key, without which strangers could join" in refused(alone)
