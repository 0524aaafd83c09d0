"""The command that starts an agent on another host, and the variables that travel there."""

from __future__ import annotations

import shlex
import socket
import sys

import pytest

from ronde.errors import UsageError
from ronde.launch.config import LaunchConfig, RendezvousConfig, Ssh, WorkerSpec
from ronde.launch.driver.driver_messages import hello
from ronde.launch.hosts.ssh import is_here, ssh_command, travelling

CONFIG = LaunchConfig(
    WorkerSpec(("/bin/true",)), rendezvous=RendezvousConfig(heartbeat_ns=2 * 10**9, missing_heartbeats=3)
)
SECRET = "ab" * 32


def test_the_command_asks_nothing_and_holds_no_secret() -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": "/a b:/c",
        "RONDE_JOB_KEY": SECRET,
        "RONDE_LOG": "1",
    }
    words = ssh_command("me@b", Ssh(2222, "/keys/id"), CONFIG, environment, 20)
    assert words[:4] == ["/usr/bin/ssh", "-T", "-a", "-x"]  # neither our agent's keys nor our display
    options = {"BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=2", "ServerAliveCountMax=3"}
    assert {word.removeprefix("-o") for word in words if word.startswith("-o")} == options
    assert "-p2222" in words
    assert "-i/keys/id" in words
    assert words[-3:-1] == ["--", "me@b"]
    started = shlex.split(words[-1])
    python = [sys.executable, "-P", "-m", "ronde.launch.driver.agent_main"]
    assert started == ["exec", "env", "PYTHONPATH=/a b:/c", *python]
    assert SECRET not in " ".join(words)


def test_without_ssh_there_are_no_other_hosts() -> None:
    with pytest.raises(UsageError, match="there is no `ssh` in PATH"):
        ssh_command("b", Ssh(), CONFIG, {"PATH": "/nowhere"}, 20)


def test_variables_of_the_job_travel_and_secrets_stay() -> None:
    environment = dict.fromkeys(
        ["PATH", "PYTHONPATH", "RONDE_LOG_LEVEL", "HOROVOD_CYCLE_TIME", "NCCL_DEBUG", "OMP_NUM_THREADS"]
        + ["NCCL_IB_PKEY", "RONDE_AUTOTUNE", "TORCH_NCCL_BLOCKING_WAIT", "MKL_NUM_THREADS", "PYTHONHASHSEED"],
        "1",
    )
    stays = dict.fromkeys(
        ["RONDE_JOB_KEY", "RONDE_JOB_KEY_FILE", "RONDE_JOB_KEY_FD", "RONDE_STORE", "RONDE_HOST_ID", "HOME"]
        + [
            "CUDA_VISIBLE_DEVICES",
            "SSH_AUTH_SOCK",
            "TORCH_HUB_TOKEN",
            "MKL_SECRET",
            "OMP_X",
            "PYTHON_KEYRING_BACKEND",
        ]
        + ["HOROVOD_SECRET_KEY", "NCCL_TOKEN", "PET_PASSWORD", "GLOO_AUTH", "RONDE_API_KEY"],
        "1",
    )
    assert travelling({**environment, **stays}) == environment


def test_which_hosts_are_this_machine() -> None:
    for name in ("localhost", "127.0.0.1", "::1", socket.gethostname(), "10.0.0.7"):
        assert is_here(name, ["10.0.0.7"])
    assert not is_here("10.0.0.8", ["10.0.0.7"])
    assert not is_here(f"{socket.gethostname()}.invalid", [])
    assert not is_here("me@localhost", [])  # somebody else, here


def test_the_greeting_is_one_line() -> None:
    assert hello().startswith(b"ronde agent ")
    assert hello().count(b"\n") == 1
