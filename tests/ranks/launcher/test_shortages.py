"""A resource that the kernel, a container or a limit denies: one sentence with the remedy, in launcher and worker."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ranks.without_calls import NUMBERS

ROOT = Path(__file__).parents[3]
HANGING_S = 120

pytestmark = pytest.mark.alone  # what is left for others is short as well
PROGRAM = """
import numpy
import ronde

ronde.init()
print(ronde.allreduce(numpy.ones(1), name="x"))
"""
LIMITED = r"""
import re, resource, sys
import numpy, ronde, ronde.engine.process

size = int(re.search(r"VmSize:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[1]) * 2**20,) * 2)
ronde.init()
"""
SECCOMP = pytest.mark.skipif(platform.machine() not in NUMBERS, reason="no numbers of system calls")


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RONDE_", "HOROVOD_"))}
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return subprocess.run(
        words,
        cwd=folder,
        env={**clean, "PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
        timeout=HANGING_S,
    )


def used_by_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def launch(tmp_path: Path) -> list[str]:
    (tmp_path / "hello.py").write_text(PROGRAM)
    return [sys.executable, "-m", "ronde", "run", "-n", "2", "hello.py"]


@SECCOMP
@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "is_launchers"), [("eventfd", True), ("pidfd_open", True), ("memfd_create", False)]
)
def test_a_system_call_that_is_refused(
    call: str, is_launchers: bool, launch: list[str], tmp_path: Path
) -> None:
    done = run(sys.executable, "-m", "tests.ranks.without_calls", call, *launch, folder=tmp_path)
    assert done.returncode > 0
    assert re.search(f"refuses {call}: use Linux 5.4 or later, and a container whose seccomp", done.stderr)
    assert ("Traceback" in done.stderr) != is_launchers  # a worker's shows where it has called ronde.init


@SECCOMP
@pytest.mark.slow
def test_a_store_that_may_not_accept_ends_the_job(launch: list[str], tmp_path: Path) -> None:
    before_s = used_by_children_s()
    done = run(sys.executable, "-m", "tests.ranks.without_calls", "accept,accept4", *launch, folder=tmp_path)
    assert done.returncode == 1
    [said] = [
        line for line in done.stderr.splitlines() if "cannot accept connections and tries again" in line
    ]
    assert "Function not implemented" in said
    assert re.search(
        r"ronde: the store at \S+ accepts no more connections, and ranks cannot meet there: Function not "
        "implemented; a container or sandbox may forbid the system call accept4: SIGTERM to ranks 0, 1",
        done.stderr,
    )
    assert used_by_children_s() - before_s < 6  # it gives up after 10 s, in which it does not spin


@SECCOMP
@pytest.mark.slow
def test_all_cores_count_if_the_usable_ones_are_unknown(launch: list[str], tmp_path: Path) -> None:
    done = run(
        sys.executable, "-m", "tests.ranks.without_calls", "sched_getaffinity", *launch, folder=tmp_path
    )
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] [1.]", "[1] [1.]"]), done.stderr


@pytest.mark.slow
def test_a_limit_of_file_sizes_concerns_shared_memory(launch: list[str], tmp_path: Path) -> None:
    done = run("bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *launch, folder=tmp_path)
    assert "UsageError: the limit of file sizes is too low for shared memory" in done.stderr
    assert "ulimit -f unlimited" in done.stderr


def test_too_little_address_space_for_memory_or_threads(tmp_path: Path) -> None:
    program = tmp_path / "limited.py"
    program.write_text(LIMITED)
    done = run(sys.executable, "limited.py", "2", folder=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert re.search(r"UsageError: this process gets no more (memory|threads): .*ulimit -v", last)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("ip") is None or shutil.which("unshare") is None, reason="there is no ip or unshare"
)
@pytest.mark.parametrize(
    ("before", "more", "says"),
    [
        ("ip link set lo up; ip address flush dev lo", [], "this machine has no address 127.0.0.1"),
        (
            "true",
            ["--nnodes", "2", "--rdzv-endpoint", "localhost:29411"],
            "no network interface reaches localhost",
        ),
    ],
)
def test_no_loopback_address(
    before: str, more: list[str], says: str, launch: list[str], tmp_path: Path
) -> None:
    words = [*launch[:-1], *more, launch[-1]]
    done = run("unshare", "--net", "bash", "-c", f'{before}; exec "$@"', "bash", *words, folder=tmp_path)
    assert done.returncode == 2
    [sentence] = [line for line in done.stderr.splitlines() if line.startswith("ronde run: ")]
    assert says in sentence
    assert "ip link set lo up" in sentence
    assert "Traceback" not in done.stderr
