"""Launches that fail at once, with one sentence that names the mistake and the remedy, and exit code 2.

tests/unit/cli has the contradictions between options; these mistakes only show when the launch begins.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import free_port

HANGING_S = 60
SILENT = ("RONDE_", "PET_", "HOROVOD_", "SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE")
NO_HOST = "no-such-host.invalid"  # RFC 2606: never resolves


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SILENT)}
    return {**clean, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "ronde", "run", *words]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('it runs')\n")
    return tmp_path


@pytest.fixture
def port() -> int:
    return free_port("127.0.0.1")


@pytest.fixture
def stranger() -> Iterator[int]:
    """A port where a foreign service listens."""
    with socket.create_server(("127.0.0.1", 0)) as service:
        yield service.getsockname()[1]


def refuse(here: Path, line: str, **variables: str) -> list[str]:
    """Return the lines on stderr of a launch that must fail with exit code 2."""
    done = subprocess.run(
        command(*line.split(), "train.py"),
        cwd=here,
        env=environment(**variables),
        check=False,
        capture_output=True,
        text=True,
        timeout=HANGING_S,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "--nnodes 3:2",
            "ronde run: --nnodes 3:2 contradicts itself: the smaller number comes first, as in 2:3",
        ),
        (
            "--nnodes 2",
            "ronde run: 2 machines need an endpoint: give --master-addr HOST",
        ),
        (
            "--nnodes 2 --rdzv-backend zookeeper --rdzv-endpoint a:1",
            "ronde run: --rdzv-backend zookeeper is not known (available: alone, c10d, etcd, etcd-v2, file,",
        ),
        (
            f"--nnodes 2 --rdzv-endpoint {NO_HOST}:1",
            f"ronde run: the host name '{NO_HOST}' cannot be resolved",
        ),
        (
            "--nnodes 2 --rdzv-endpoint localhost:1 --local-addr no.invalid",
            "ronde run: --local-addr no.invalid cannot be",
        ),
        (
            "--nnodes 2 --rdzv-endpoint localhost:1 --network-interface no0",
            "ronde run: there is no network interface 'no0'",
        ),
        ("--hostfile absent", "ronde run: cannot read the hostfile absent: No such file or directory"),
        (
            "--hostfile empty",
            "ronde run: there is no host in empty: write one on each line, like `host slots=4`",
        ),
        (
            "-H a:2,,b:2",
            "ronde run: -H a:2,,b:2 is invalid: expected hosts separated by commas, like a:2,b:2",
        ),
        (
            "--host-discovery-script ./no -np 1 --network-interface lo",
            "ronde run: cannot run the host discovery script",
        ),
        (
            "--log-dir /dev/null/logs",
            "ronde run: cannot write logs to /dev/null/logs: Not a directory; --log-dir must",
        ),
        ("--config-file absent.yaml", "ronde run: "),
        ("-i absent -H localhost", "ronde run: -i "),
        ("--cache-capacty 3", "ronde run: unknown option --cache-capacty; did you mean --cache-capacity?"),
    ],
)
def test_one_sentence(here: Path, line: str, sentence: str) -> None:
    (here / "empty").touch()
    lines = refuse(here, line)
    assert len(lines) == 1
    assert lines[0].startswith(sentence)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ('exec "$@" --help > /dev/full', "cannot write to standard output: No space left on device"),
        (
            'mkdir gone; cd gone; rmdir ../gone; exec "$@" train.py',
            "the current directory no longer exists: change to another one",
        ),
    ],
    ids=["disk", "directory"],
)
def test_what_surrounds_it_is_amiss(here: Path, script: str, sentence: str) -> None:
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command()],
        cwd=here,
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=HANGING_S,
    )
    assert (done.returncode, done.stderr) == (2, f"ronde run: {sentence}\n")


def test_a_script_that_finds_no_hosts(here: Path) -> None:
    """The script fails at its first call."""
    (here / "find").write_text("#!/bin/sh\necho lost >&2; exit 3\n")
    (here / "find").chmod(0o755)
    lines = refuse(here, "--host-discovery-script find -n 1 --network-interface lo")
    assert lines == [f"ronde run: {here}/find failed with exit code 3: lost"]


def test_a_job_key_that_is_none(here: Path, port: int) -> None:
    secret = "not-a-key"
    (line,) = refuse(here, f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{port}", RONDE_JOB_KEY=secret)
    assert line.startswith("ronde run: RONDE_JOB_KEY: a job key has 64 hexadecimal digits")
    assert secret not in line


@pytest.mark.parametrize("place", ["tcp --rdzv-endpoint 192.0.2.1:1", "file --rdzv-endpoint place"])
def test_several_machines_without_a_job_key(here: Path, place: str) -> None:
    """Without a home directory there is no file for the key; on one machine there is another place."""
    line = f"--nnodes 2 --rdzv-backend {place}"
    (sentence,) = refuse(here, line, HOME=str(here / "not" / "there"), XDG_CONFIG_HOME="")
    assert sentence.startswith(
        "ronde run: there is no job key, without which strangers could join: there is no key file"
    )
    assert "set RONDE_JOB_KEY_FILE to it, or set RONDE_INSECURE_JOB_KEY=1" in sentence


def test_an_endpoint_without_a_store(here: Path, port: int) -> None:
    begun = time.monotonic()
    line = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf is_host=false --start-timeout 1"
    lines = refuse(here, line)
    assert time.monotonic() - begun < HANGING_S / 2
    assert re.search(
        rf"waited 1 s for the store at tcp:127.0.0.1:{port}: .*; start the node that serves", lines[-1]
    )


@pytest.mark.parametrize(
    "options", ["--rdzv-conf is_host=true --rdzv-endpoint {}", "--node-rank 0 --rdzv-endpoint {}"]
)
def test_a_port_that_is_taken(here: Path, stranger: int, options: str) -> None:
    place = f"127.0.0.1:{stranger}"
    (line,) = refuse(here, f"--nnodes 2 {options.format(place)}")
    assert line == (
        f"ronde run: cannot serve at tcp:{place}: Address already in use; end the process that uses it or choose "
        "another address"
    )


def test_another_job_key(here: Path, port: int) -> None:
    """The right node waits on and reports the refused one, which ends at once."""
    line = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{port}"
    right = subprocess.Popen(
        command(*line.split(), "train.py"),
        cwd=here,
        env=environment(RONDE_JOB_KEY="11" * 32),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert right.stderr is not None
        assert "1 of 2 nodes is here; waiting for the others" in right.stderr.readline()
        (sentence,) = refuse(here, f"{line} --rdzv-conf is_host=false", RONDE_JOB_KEY="22" * 32)
        assert (
            "does not know the job key (RONDE_JOB_KEY) of this job; does it belong to another job?"
            in sentence
        )
        assert "22" * 32 not in sentence
        refused = right.stderr.readline()
        assert re.search(r"turned away a connection from 127.0.0.1:\d+: .*does not know the job key", refused)
        assert right.poll() is None
    finally:
        right.terminate()
        right.communicate()


def test_nodes_that_do_not_come(here: Path, port: int) -> None:
    lines = refuse(here, f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf join_timeout=1")
    assert "waited 1 s for all nodes: 1 of 2 nodes is here; start the others, or wait longer" in lines[-1]


def test_nodes_that_do_not_come_within_the_start_timeout(here: Path, port: int) -> None:
    lines = refuse(here, f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{port} --start-timeout 1")
    assert lines[-1] == (
        "ronde: waited 1 s for all nodes: 1 of 2 nodes is here; start the others, or wait longer (--start-timeout)"
    )


def test_a_host_that_ssh_cannot_find(here: Path) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("needs ssh")
    lines = refuse(here, f"-H {NO_HOST}:1 --start-timeout 20 --network-interface lo")
    assert any(NO_HOST in line for line in lines)


@pytest.mark.parametrize(("limit", "says"), [("-Sn 40", "it is away"), ("-n 40", "Too many open files")])
def test_more_hosts_than_descriptors(here: Path, limit: str, says: str) -> None:
    """The launcher raises the limit if it may; otherwise a host that cannot start counts as failed."""
    ssh = here / "ssh"
    ssh.write_text("#!/bin/sh\nsleep 1; echo it is away >&2; exit 255\n")
    ssh.chmod(0o755)
    hosts = ",".join(f"host{number}:1" for number in range(20))
    words = command("-H", hosts, "--network-interface", "lo", "train.py")
    done = subprocess.run(
        ["bash", "-c", f'ulimit {limit}; exec "$@"', "bash", *words],
        cwd=here,
        env=environment(PATH=f"{here}:{os.environ['PATH']}"),
        check=False,
        capture_output=True,
        text=True,
        timeout=HANGING_S,
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_agents_take_no_modules_from_where_they_start(here: Path) -> None:
    (here / "secrets.py").write_text("raise SystemExit('foreign code')\n")
    words = [sys.executable, "-P", "-m", "ronde", "run", "-H", "localhost:1", "train.py"]
    done = subprocess.run(
        words, cwd=here, env=environment(), check=False, capture_output=True, text=True, timeout=HANGING_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "it runs" in done.stdout


def test_variables_are_named_as_they_are_written(here: Path) -> None:
    (line,) = refuse(here, "--nnodes 2 --master-addr localhost", PET_NODE_RANK="2")
    assert line == "ronde run: PET_NODE_RANK 2 is out of range: 2 machines are numbered from 0 to 1"


def limited(here: Path, limit: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """Run a job of this many ranks from a shell with a limit of file descriptors."""
    (here / "join.py").write_text(
        "import numpy, ronde\nronde.init()\nronde.allreduce(numpy.ones(2), name='x')\nprint('joined')\n"
    )
    words = ["bash", "-c", f'ulimit {limit} && exec "$@"', "bash", *command("-n", str(ranks), "join.py")]
    return subprocess.run(
        words, cwd=here, env=environment(), check=False, capture_output=True, text=True, timeout=HANGING_S
    )


@pytest.mark.parametrize(("ranks", "limit", "needed"), [(1, 8, 12), (16, 64, 72)])
def test_a_hard_limit_of_descriptors_is_named_before_anything_starts(
    here: Path, ranks: int, limit: int, needed: int
) -> None:
    done = limited(here, f"-n {limit}", ranks)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(
        f"ronde run: -n {ranks} needs {needed} file descriptors in this process, which has "
    )
    assert f"may have {limit}: raise the hard limit (ulimit -Hn)" in line


@pytest.mark.slow
def test_a_soft_limit_of_descriptors_is_raised(here: Path) -> None:
    done = limited(here, "-Sn 24", 4)
    assert (done.returncode, done.stdout.count("joined")) == (0, 4), done.stderr


def test_ranks_on_other_hosts_take_no_descriptors_before_they_are_known(here: Path, port: int) -> None:
    """One of 2000 ranks on 250 hosts, of which few share its host, needs no descriptor for each rank."""
    words = [
        "bash",
        "-c",
        'ulimit -n 256 && exec "$@"',
        "bash",
        sys.executable,
        "-c",
        "import ronde; ronde.init()",
    ]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "9", "WORLD_SIZE": "2000"}
    done = subprocess.run(
        words,
        cwd=here,
        env=environment(**place, RONDE_START_TIMEOUT="1"),
        check=False,
        capture_output=True,
        text=True,
        timeout=HANGING_S,
    )
    assert "waited 1 s for the store" in done.stderr
