from __future__ import annotations

import subprocess
import sys

import pytest

from ronde.net.host import host_identity, host_name


def test_processes_of_one_machine_share_a_key() -> None:
    code = "from ronde.net.host import host_identity; print(host_identity(''))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == host_identity("")


def test_a_host_id_sets_ranks_apart() -> None:
    assert host_identity("a") == host_identity("a")
    assert len({host_identity(""), host_identity("a"), host_identity("b")}) == 3


@pytest.mark.parametrize("namespace", ["--net", "--ipc", "--mount"])
def test_a_container_is_another_host(namespace: str) -> None:
    own_memory = "mount -t tmpfs none /dev/shm && " if namespace == "--mount" else ""
    code = "from ronde.net.host import host_identity; print(host_identity(''))"
    command = [
        "unshare",
        "--map-root-user",
        namespace,
        "sh",
        "-c",
        f'{own_memory}exec {sys.executable} -c "{code}"',
    ]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        pytest.skip(f"this user may not make namespaces: {child.stderr.strip()}")
    assert child.stdout.strip() != host_identity("")


def test_the_host_has_a_name() -> None:
    assert host_name()
