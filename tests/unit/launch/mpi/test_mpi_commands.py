"""What mpirun and its daemons are asked to do on a cluster."""

from __future__ import annotations

import pytest

from ronde.errors import UsageError
from ronde.launch.driver.driver_messages import DaemonOrder
from ronde.launch.driver.task_registry import Task
from ronde.launch.mpi.mpi_commands import (
    check_version,
    daemon_command,
    host_slots,
    mpirun_command,
    mpirun_environment,
)


def task(slot: int, host_id: str) -> Task:
    return Task(id=slot, slot=slot, attempt=0, host="executor", host_id=host_id)


def test_hosts_are_named_by_their_identity_in_the_order_of_the_ranks() -> None:
    hosts = host_slots([task(0, "b"), task(2, "b"), task(1, "a")])
    assert [[each.slot for each in there] for there in hosts.values()] == [[0, 2], [1]]
    assert all(name.startswith("host-") and len(name) == 21 for name in hosts)
    assert list(hosts) == list(host_slots([task(5, "b"), task(6, "a")])), "the same on every run"


def test_mpirun_starts_every_daemon_itself_and_they_connect_to_it_alone() -> None:
    words = mpirun_command(
        ["/mpi/bin/mpirun"], "/tmp/shell", {"host-b": 2, "host-a": 1}, interfaces=["eth0", "ib0"]
    )
    line = " ".join(words)
    assert line.startswith(
        "/mpi/bin/mpirun --leave-session-attached --host host-b:2,host-a:1 -n 3 --map-by slot"
    )
    for parameter in (
        "plm_rsh_agent /tmp/shell",
        "plm_rsh_no_tree_spawn 1",
        "routed_radix 3",
        "oob_tcp_if_include eth0,ib0",
    ):
        assert f"--mca {parameter}" in line
    assert words[-1].endswith("-P -m ronde.launch.mpi.rank_task")


def test_options_of_the_user_come_before_the_program() -> None:
    words = mpirun_command(["mpirun", "--mca", "pml", "ob1"], "shell", {"h": 1}, is_root=True)
    assert words.index("ob1") < words.index("/bin/sh")
    assert "--allow-run-as-root" in words
    assert "oob_tcp_if_include" not in words


@pytest.mark.parametrize(
    "option",
    [
        '--prtemca prte_if_include "eth0"',
        '--prtemca oob_tcp_if_include "eth0,ib0"',
        '-mca oob_tcp_if_include "eth0"',
        "-mca oob_tcp_if_include eth0",
        '--prtemca prte_tmpdir_base "/tmp/driver"',
        '-mca orte_tmpdir_base "/tmp/driver"',
    ],
)
def test_a_daemon_gets_no_option_that_holds_for_the_driver_only(option: str) -> None:
    command = f'PATH=/a:$PATH;export PATH;/a/prted --prtemca ess "env" {option} --prtemca plm "ssh"'
    assert (
        daemon_command(command)
        == 'PATH=/a:$PATH;export PATH;/a/prted --prtemca ess "env" --prtemca plm "ssh"'
    )


def test_mpirun_does_not_see_the_allocation_around_the_driver() -> None:
    mine = {"PATH": "/bin", "OMPI_MCA_pml": "ob1", "LD_LIBRARY_PATH": "/lib"}
    around = {"SLURM_JOB_ID": "1", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}
    assert mpirun_environment({**mine, **around}) == mine


def test_another_mpi_is_named() -> None:
    check_version("mpirun (Open MPI) 5.0.11\n\nReport bugs to")
    check_version("mpirun (OpenRTE) 4.1.4")
    with pytest.raises(
        UsageError, match="not Open MPI's but HYDRA build details: put Open MPI's first in PATH"
    ):
        check_version("HYDRA build details:\n  Version: 4.2")


def test_an_order_of_a_daemon_is_no_assignment() -> None:
    order = DaemonOrder("prted", {"A": "1"}, ("tcp:10.0.0.1:5",), 10)
    line = order.encode()
    assert line.endswith(b"\n")
    assert DaemonOrder.decode(line.rstrip()) == order
    assert DaemonOrder.decode(b'{"agent": ""}') is None
