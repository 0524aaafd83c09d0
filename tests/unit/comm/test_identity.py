"""The rank of a process and where the ranks meet: from a launcher's environment, and from `init_method`."""

from __future__ import annotations

from typing import Any

import pytest

from ronde.comm.identity import (
    Identity,
    MeetingPoint,
    Surroundings,
    identify,
    interpret_init_arguments,
)
from ronde.errors import UsageError

HERE = Surroundings(uid=1000)
BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "2000"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-7488@1",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3", "PMI_FD": "9"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[01-99]",
}


def meeting_of(environ: dict[str, str], here: Surroundings = HERE, **arguments: Any) -> MeetingPoint:
    meeting = identify(environ, here, **arguments).meeting
    assert meeting is not None
    return meeting


def changed(environ: dict[str, str], **changes: str | None) -> dict[str, str]:
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


# Alone


@pytest.mark.parametrize("environ", [{}, {"PATH": "/bin"}, {"RONDE_STORE": "unix:@x"}, {"MASTER_ADDR": "a"}])
def test_without_a_launcher_we_are_alone(environ: dict[str, str]) -> None:
    assert identify(environ, HERE) == Identity(0, 1, "nobody", None)


def test_a_job_of_one_needs_no_meeting_point() -> None:
    assert identify({"RANK": "0", "WORLD_SIZE": "1"}, HERE) == Identity(0, 1, "the environment", None)


# Launchers


def test_ronde_run() -> None:
    environ = {**BY_HAND, "RONDE_STORE": "unix:@ronde-1", "RONDE_JOB_KEY": "00" * 32}
    meeting = MeetingPoint("unix:@ronde-1", None, "unix:@ronde-1")
    assert identify(environ, HERE) == Identity(1, 4, "ronde run", meeting)


def test_variables_set_by_hand() -> None:
    meeting = MeetingPoint("tcp:head:2000", 0, "tcp:head:2000")
    assert identify(BY_HAND, HERE) == Identity(1, 4, "the environment", meeting)


@pytest.mark.parametrize("host", ["fd00::1", "[fd00::1]"])
def test_a_master_with_an_ipv6_address(host: str) -> None:
    assert meeting_of({**BY_HAND, "MASTER_ADDR": host}).address == "tcp:[fd00::1]:2000"


def test_torchrun_with_the_store_of_its_agent() -> None:
    environ = {**BY_HAND, "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    identity = identify({**environ, "TORCHELASTIC_RESTART_COUNT": "2"}, HERE)
    meeting = MeetingPoint("tcp:head:2000", None, "torchrun r restart 2 at tcp:head:2000", is_torch=True)
    assert identity == Identity(1, 4, "torchrun", meeting)


def test_torchrun_without_the_store_of_its_agent() -> None:
    environ = {**BY_HAND, "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert meeting_of(environ) == MeetingPoint("tcp:head:2000", 0, "tcp:head:2000")


def test_open_mpi_on_one_host() -> None:
    identity = identify(OPEN_MPI, HERE)
    assert (identity.rank, identity.size, identity.launcher) == (1, 2, "Open MPI")
    assert meeting_of(OPEN_MPI).address.startswith("unix:@ronde-1000-")
    assert meeting_of(OPEN_MPI).served_by == 0


def test_open_mpi_on_several_hosts() -> None:
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(UsageError, match="-x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port>"):
        identify(environ, HERE)
    assert meeting_of({**environ, "MASTER_ADDR": "a", "MASTER_PORT": "1"}).address == "tcp:a:1"


def test_mpich_on_one_host() -> None:
    here = Surroundings(uid=1000, hydra_pid=123)
    identity = identify(MPICH, here)
    assert (identity.rank, identity.size, identity.launcher) == (2, 3, "MPICH")
    assert meeting_of(MPICH, here).address.startswith("unix:@ronde-1000-")
    assert meeting_of({**MPICH, "PMI_PORT": "a:1"}).job == "mpich a:1 of user 1000"
    with pytest.raises(UsageError, match="set MASTER_ADDR"):
        identify(MPICH, HERE)


def test_another_pmi_launcher_needs_a_master() -> None:
    with pytest.raises(UsageError, match=r"an MPI launcher started rank 0 of 2.*set MASTER_ADDR"):
        identify({"PMI_RANK": "0", "PMI_SIZE": "2"}, HERE)


def test_slurm_on_several_hosts() -> None:
    identity = identify(SLURM, HERE)
    assert (identity.rank, identity.size, identity.launcher) == (3, 4, "Slurm")
    assert identity.meeting is not None
    scheme, host, port = identity.meeting.address.split(":")
    assert (scheme, host) == ("tcp", "gpu07")
    assert 12_000 <= int(port) < 32_000
    assert identity.meeting.served_by == 0
    assert meeting_of({**SLURM, "SLURM_STEP_ID": "1"}) != identity.meeting


def test_slurm_on_one_host() -> None:
    assert meeting_of({**SLURM, "SLURM_STEP_NUM_NODES": "1"}).address.startswith("unix:@ronde-1000-")


def test_a_batch_script_of_slurm_is_no_task() -> None:
    environ = changed(SLURM, SLURM_STEP_ID=None, SLURM_STEP_NUM_TASKS=None)
    assert identify(environ, HERE) == Identity(0, 1, "nobody", None)


def test_a_shell_of_slurm_counts_the_tasks_of_its_step() -> None:
    environ = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert identify(environ, HERE) == Identity(0, 1, "Slurm", None)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**SLURM, **OPEN_MPI, **BY_HAND}, "the environment"),
        ({**SLURM, **OPEN_MPI}, "Open MPI"),
        ({**SLURM, **MPICH, "PMI_JOBID": "5"}, "MPICH"),
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, "Slurm"),
    ],
)
def test_the_nearest_launcher_counts(environ: dict[str, str], launcher: str) -> None:
    assert identify(environ, HERE).launcher == launcher


@pytest.mark.parametrize(
    "environ", [OPEN_MPI, {**SLURM, "SLURM_STEP_NUM_NODES": "1"}, {**MPICH, "PMI_PORT": "a:1"}]
)
def test_jobs_and_users_do_not_mix(environ: dict[str, str]) -> None:
    other_job = {
        **environ,
        "PMIX_NAMESPACE": "other",
        "SLURM_JOB_ID": "78",
        "PMI_PORT": "a:2",
    }
    meetings = [meeting_of(environ), meeting_of(other_job), meeting_of(environ, Surroundings(uid=1001))]
    assert len({meeting.address for meeting in meetings}) == 3
    assert len({meeting.job for meeting in meetings}) == 3


# Nonsense


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK=0 is set without WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set without RANK"),
        ({**BY_HAND, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is invalid: expected a whole number"),
        ({**BY_HAND, "RANK": "-1"}, "RANK='-1' is invalid"),
        ({**BY_HAND, "RANK": "4"}, "RANK=4 does not fit WORLD_SIZE=4"),
        ({**BY_HAND, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is invalid"),
        (changed(BY_HAND, MASTER_PORT=None), "MASTER_ADDR=head is set without MASTER_PORT"),
        (changed(BY_HAND, MASTER_ADDR=None), "MASTER_PORT=2000 is set without MASTER_ADDR"),
        (
            {**BY_HAND, "MASTER_PORT": "70000"},
            "MASTER_PORT=70000 is invalid: expected a port from 1 to 65535",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set MASTER_ADDR .* and MASTER_PORT"),
        (changed(OPEN_MPI, OMPI_COMM_WORLD_SIZE=None), "OMPI_COMM_WORLD_SIZE is not set"),
        ({**MPICH, "PMI_RANK": "3"}, "PMI_RANK=3 does not fit PMI_SIZE=3"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[7"}, "is not a list of hosts"),
    ],
)
def test_an_inconsistent_environment_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        identify(environ, HERE)


# Arguments


def test_arguments_alone() -> None:
    identity = identify({}, HERE, rank=1, size=3, store="tcp:head:2000")
    meeting = MeetingPoint("tcp:head:2000", 0, "tcp:head:2000")
    assert identity == Identity(1, 3, "ronde.init(rank=, size=)", meeting)
    assert identify({}, HERE, rank=0, size=1).meeting is None


def test_arguments_with_the_launchers_store() -> None:
    meeting = MeetingPoint("unix:@s", None, "unix:@s")
    assert meeting_of({"RONDE_STORE": "unix:@s"}, rank=0, size=2) == meeting
    assert meeting_of({"RONDE_STORE": "unix:@s"}, rank=0, size=2, store="unix:@s") == meeting


def test_a_store_given_goes_before_the_environments() -> None:
    assert meeting_of({**BY_HAND, "RONDE_STORE": "unix:@s"}, store="tcp:a:1") == MeetingPoint(
        "tcp:a:1", 0, "tcp:a:1"
    )


def test_arguments_that_repeat_the_environment() -> None:
    assert identify(BY_HAND, HERE, rank=1, size=4) == identify(BY_HAND, HERE)


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        (BY_HAND, {"size": 3}, "size=3 contradicts WORLD_SIZE=4 of the environment"),
        (BY_HAND, {"rank": 0}, "rank=0 contradicts RANK=1 of the environment"),
        (OPEN_MPI, {"size": 3}, "size=3 contradicts OMPI_COMM_WORLD_SIZE=2 of the environment"),
        ({}, {"rank": 0}, "rank and size belong together"),
        ({}, {"size": 2}, "rank and size belong together"),
        ({}, {"store": "tcp:a:1"}, "neither arguments nor environment give rank and size"),
        ({}, {"rank": 2, "size": 2, "store": "tcp:a:1"}, "rank=2 does not fit size=2"),
        ({}, {"rank": -1, "size": 2, "store": "tcp:a:1"}, "rank=-1 does not fit size=2"),
        ({}, {"rank": 0, "size": 2}, "give store="),
    ],
)
def test_arguments_that_contradict_the_launcher_or_each_other(
    environ: dict[str, str], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        identify(environ, HERE, **arguments)


def meet(
    init_method: str | None, environ: dict[str, str] | None = None, **arguments: Any
) -> tuple[int, int, Any]:
    of_init: dict[str, Any] = {"rank": None, "size": None, "world_size": None, "store": None} | arguments
    given = interpret_init_arguments(init_method, environ=environ or {}, **of_init)
    found = identify(given.environ, HERE, given.rank, given.size, given.store)
    return found.rank, found.size, found.meeting


def served(address: str) -> MeetingPoint:
    return MeetingPoint(address, 0, address)


def test_a_place_to_meet() -> None:
    assert meet("tcp://a:1", rank=1, world_size=2) == (1, 2, served("tcp:a:1"))
    assert meet("tcp://a:1", rank=1, size=2) == meet("tcp://a:1?rank=1&world_size=2")
    assert meet("tcp://[fd00::1]:1/", rank=1, size=2) == (1, 2, served("tcp:[fd00::1]:1"))
    point = MeetingPoint("file:/tmp/x", None, "file:/tmp/x")
    assert meet("file:///tmp/x", rank=1, world_size=2) == (1, 2, point)


@pytest.mark.parametrize("init_method", ["tcp://a:1", "file:///x"])
def test_the_environment_says_what_arguments_do_not(init_method: str) -> None:
    whole = meet(init_method, rank=1, world_size=4)
    assert meet(init_method, BY_HAND) == whole
    assert meet(init_method, BY_HAND, rank=-1, world_size=-1) == whole
    assert meet(init_method, {"RANK": "1"}, world_size=4) == whole
    assert meet(init_method, {"WORLD_SIZE": "4"}, rank=1) == whole


def test_the_environment_alone() -> None:
    assert meet("env://", BY_HAND) == (1, 4, served("tcp:head:2000"))
    place = {"MASTER_ADDR": "head", "MASTER_PORT": "2000"}
    assert meet("env://", place, rank=1, world_size=4) == meet("env://?rank=1&world_size=4", place)
    assert meet("env://", {**BY_HAND, "RONDE_STORE": "unix:@s"})[2] == MeetingPoint(
        "unix:@s", None, "unix:@s"
    )
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert meet("env://", mpi) == (0, 1, None)
    assert meet(None, world_size=1, rank=0) == (0, 1, None)


@pytest.mark.parametrize(
    ("init_method", "arguments", "message"),
    [
        (
            "tcp://a",
            {},
            "init_method='tcp://a' is invalid: expected tcp://host:port, with a port from 1 to 65535",
        ),
        ("tcp://a:0", {}, "init_method='tcp://a:0' is invalid: expected tcp://host:port"),
        ("tcp://::1:5", {}, "init_method='tcp://::1:5' is invalid: expected tcp://host:port"),
        ("tcp://", {}, "init_method='tcp://' is invalid: expected env://, tcp://host:port or file:///path"),
        ("env://x", {}, "init_method='env://x' is invalid: expected env://, tcp"),
        ("udp://x:1", {}, "init_method='udp://x:1' is invalid: expected env://, tcp"),
        ("x", {}, "init_method='x' is invalid: expected env://, tcp"),
        (7, {}, "init_method=7 is invalid: expected env://, tcp"),
        ("file://x", {}, "init_method='file://x' is invalid: expected file:///path, with three slashes"),
        (
            "tcp://a:1?ranks=1",
            {},
            "init_method='tcp://a:1?ranks=1' is invalid: 'ranks=1' is neither rank=N nor",
        ),
        ("tcp://a:1?rank=1", {"rank": 0}, "rank=0 and rank in init_method=1 contradict each other"),
        ("tcp://a:1", {"size": 2, "world_size": 3}, "size=2 and world_size=3 contradict each other"),
        ("tcp://a:1", {"rank": 2, "world_size": 2}, "rank=2 does not fit size=2"),
        ("tcp://a:1", {"rank": 0}, "rank and size belong together"),
        (
            "tcp://a:1",
            {"store": "unix:@x"},
            "store='unix:@x' and init_method='tcp://a:1' contradict each other",
        ),
        (
            "env://",
            {},
            "init_method='env://' takes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment",
        ),
        (
            "tcp://a:1",
            {},
            "store='tcp:a:1' says where to meet, but neither arguments nor environment give rank",
        ),
    ],
)
def test_nonsense(init_method: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        meet(init_method, **arguments)
    assert str(caught.value).startswith(message)
