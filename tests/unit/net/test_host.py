from __future__ import annotations

import os
import subprocess
import sys

from ronde.net.host import host_key, host_name, surroundings


def test_processes_of_one_machine_share_a_key() -> None:
    code = "from ronde.net.host import host_key; print(host_key(''))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == host_key("")


def test_a_host_id_sets_ranks_apart() -> None:
    assert host_key("a") == host_key("a")
    assert len({host_key(""), host_key("a"), host_key("b")}) == 3


def test_the_host_has_a_name() -> None:
    assert host_name()


def test_surroundings_without_mpich() -> None:
    for environ in ({}, {"MPI_LOCALNRANKS": "2"}):
        assert surroundings(environ).uid == os.geteuid()
        assert surroundings(environ).hydra_pid == 0
