"""Finds this process's rank, and where the ranks meet, in the environment that its launcher has set. Pure.

The launchers, in the order in which they are looked for (the nearest to the process first):
  1. RANK and WORLD_SIZE: `ronde run`, torchrun, or a user by hand;
  2. Open MPI's mpirun; 3. MPICH's mpiexec and its relatives; 4. Slurm's srun.

Where the ranks meet, by the first rule that applies:
  - an address given to `ronde.init`: rank 0 serves a store there; a file needs no server;
  - RONDE_STORE: the launcher serves a store there;
  - torchrun's agent: its own store listens at MASTER_ADDR and MASTER_PORT;
  - MASTER_ADDR and MASTER_PORT: rank 0 serves a store there;
  - all ranks on one host: rank 0 serves a store at an abstract Unix socket named after user and job;
  - Slurm: rank 0 serves a store on the first host of the step, at a port that follows from job and step.

`MeetingPoint.job` keeps jobs apart and is no secret. The job key is given, or follows from it and a secret of the user
(`net/job_keys`).

`ronde.init(init_method=...)` has the meaning that torch.distributed gives it:

    env://                everything is in the environment, or an argument where that has no variable
    tcp://host:port       rank 0 serves a store there
    file:///path          the ranks meet in a file that all of them can open

`rank` and `world_size` are arguments, part of the URL (`tcp://host:port?rank=0&world_size=2`), or the environment's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ronde.errors import UsageError
from ronde.process import slurm
from ronde.process.slurm import launcher_number

__all__ = [
    "Identity",
    "InitArguments",
    "MeetingPoint",
    "Surroundings",
    "identify",
    "interpret_init_arguments",
]

Environment = Mapping[str, str]

FORMS = "expected env://, tcp://host:port or file:///path"
ARGUMENTS = "ronde.init(rank=, size=)"


@dataclass(frozen=True)
class Surroundings:
    """Facts about the process besides its environment.

    `uid`: its user. `hydra_pid`: the process id of MPICH's proxy among its ancestors, 0 if there is none.
    """

    uid: int
    hydra_pid: int = 0


@dataclass(frozen=True)
class MeetingPoint:
    """Where the ranks of a job find each other.

    `address`: of a store: `unix:@name`, `tcp:host:port` or `file:/path`. `served_by`: the rank that serves it there,
    None if it is served already. `job`: names the job, with the same text on all its ranks and another one for any
    other job. `is_torch`: it is torch.distributed's store.
    """

    address: str
    served_by: int | None
    job: str
    is_torch: bool = False


@dataclass(frozen=True)
class Identity:
    """One rank: `rank` of `size`, started by `launcher`. `meeting`: None for a lone process."""

    rank: int
    size: int
    launcher: str
    meeting: MeetingPoint | None


@dataclass(frozen=True)
class _Launched:
    """What a launcher's variables say. `job`: empty if they do not name it.

    `is_one_host`: all ranks are on one host. `names`: the variables of rank and size.
    """

    rank: int
    size: int
    launcher: str
    names: tuple[str, str]
    is_one_host: bool = False
    job: str = ""
    step: slurm.Step | None = None


def identify(
    environ: Environment,
    here: Surroundings,
    rank: int | None = None,
    size: int | None = None,
    store: str | None = None,
) -> Identity:
    """Return the identity by the launcher's environment or the arguments of `ronde.init`; alone if neither has one.

    Raises UsageError if they contradict each other or are invalid.
    """
    launched = _from_launcher(environ)
    if launched is None:
        launched = _from_arguments(rank, size, store)
    else:
        _check_contradiction(launched, "rank", rank, launched.names[0], launched.rank)
        _check_contradiction(launched, "size", size, launched.names[1], launched.size)
    if launched.size == 1:
        return Identity(0, 1, launched.launcher, None)
    meeting = _meeting_point(environ, here, launched, store)
    return Identity(launched.rank, launched.size, launched.launcher, meeting)


def _from_launcher(environ: Environment) -> _Launched | None:
    for find in (_from_rank, _from_open_mpi, _from_hydra, _from_slurm, _from_pmi):
        launched = find(environ)
        if launched:
            if not 0 <= launched.rank < launched.size:
                raise UsageError(
                    f"{launched.names[0]}={launched.rank} does not fit {launched.names[1]}={launched.size}: "
                    "ranks count from 0 to size - 1"
                )
            return launched
    return None


def _from_arguments(rank: int | None, size: int | None, store: str | None) -> _Launched:
    if rank is None and size is None:
        if store is None:
            return _Launched(0, 1, "nobody", ("rank", "size"))
        raise UsageError(
            f"store={store!r} says where to meet, but neither arguments nor environment give rank and size"
        )
    if rank is None or size is None:
        raise UsageError(
            "rank and size belong together: give both, or let a launcher like `ronde run` set both"
        )
    if not 0 <= rank < size:
        raise UsageError(f"rank={rank} does not fit size={size}: ranks count from 0 to size - 1")
    return _Launched(rank, size, ARGUMENTS, ("rank", "size"))


def _check_contradiction(
    launched: _Launched, name: str, given: int | None, variable: str, found: int
) -> None:
    if given is not None and given != found:
        raise UsageError(
            f"{name}={given} contradicts {variable}={found} of the environment ({launched.launcher}); "
            f"leave {name} out, or start the job with {name} {given}"
        )


# The launchers


def _from_rank(environ: Environment) -> _Launched | None:
    given = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
    if not given:
        return None
    if len(given) == 1:
        missing = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise UsageError(f"{given[0]}={environ[given[0]]} is set without {missing}: set both, or neither")
    launcher = "the environment"
    if environ.get("RONDE_STORE"):
        launcher = "ronde run"
    elif environ.get("TORCHELASTIC_RUN_ID"):
        launcher = "torchrun"
    return _from_variables(environ, "RANK", "WORLD_SIZE", launcher)


def _from_open_mpi(environ: Environment) -> _Launched | None:
    if not environ.get("OMPI_COMM_WORLD_RANK"):
        return None
    launched = _from_variables(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    local_size = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    return replace(launched, job=job and f"openmpi {job}", is_one_host=local_size == str(launched.size))


def _from_hydra(environ: Environment) -> _Launched | None:
    if not environ.get("PMI_RANK") or not environ.get("MPI_LOCALNRANKS"):
        return None
    launched = _from_variables(environ, "PMI_RANK", "PMI_SIZE", "MPICH")
    job = environ.get("PMI_JOBID") or environ.get("PMIX_NAMESPACE") or environ.get("PMI_PORT", "")
    is_one_host = environ["MPI_LOCALNRANKS"] == str(launched.size)
    return replace(launched, job=job and f"mpich {job}", is_one_host=is_one_host)


def _from_slurm(environ: Environment) -> _Launched | None:
    step = slurm.find_step(environ)
    if step is None:
        return None
    return _Launched(
        step.task,
        step.tasks,
        "Slurm",
        ("SLURM_PROCID", step.size_name),
        is_one_host=step.is_one_host,
        job=step.job,
        step=step,
    )


def _from_pmi(environ: Environment) -> _Launched | None:
    """Other launchers that speak PMI; they do not report how many ranks are on this host."""
    if not environ.get("PMI_RANK"):
        return None
    return _from_variables(environ, "PMI_RANK", "PMI_SIZE", "an MPI launcher")


def _from_variables(environ: Environment, rank_name: str, size_name: str, launcher: str) -> _Launched:
    rank, size = launcher_number(environ, rank_name), launcher_number(environ, size_name)
    if size < 1:
        raise UsageError(f"{size_name}={size} is invalid: expected at least 1 rank")
    return _Launched(rank, size, launcher, (rank_name, size_name))


# The meeting point


def _meeting_point(
    environ: Environment, here: Surroundings, launched: _Launched, store: str | None
) -> MeetingPoint:
    launcher_store = environ.get("RONDE_STORE")
    if store and store != launcher_store:
        return MeetingPoint(store, None if store.startswith("file:") else 0, store)
    if launcher_store:
        return MeetingPoint(launcher_store, None, launcher_store)
    address = _master_address(environ)
    if address and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        job = f"torchrun {environ.get('TORCHELASTIC_RUN_ID', '')} restart {attempt} at {address}"
        return MeetingPoint(address, None, job, is_torch=True)
    if address:
        return MeetingPoint(address, 0, address)
    if launched.launcher == "MPICH" and not launched.job and here.hydra_pid:
        launched = replace(launched, job=f"mpich {here.hydra_pid}")
    if launched.job and launched.is_one_host:
        name = hashlib.sha256(launched.job.encode()).hexdigest()[:16]
        return MeetingPoint(f"unix:@ronde-{here.uid}-{name}", 0, f"{launched.job} of user {here.uid}")
    if launched.job and launched.step and launched.step.hosts:
        host, port = launched.step.endpoint()
        return MeetingPoint(f"tcp:{host}:{port}", 0, f"{launched.job} of user {here.uid}")
    raise _no_meeting_point(launched)


def _master_address(environ: Environment) -> str | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host and not port:
        return None
    if not host or not port:
        there, missing = ("MASTER_ADDR", "MASTER_PORT") if host else ("MASTER_PORT", "MASTER_ADDR")
        raise UsageError(f"{there}={host or port} is set without {missing}: set both, or neither")
    number = launcher_number(environ, "MASTER_PORT")
    if not 0 < number < 65536:
        raise UsageError(f"MASTER_PORT={port} is invalid: expected a port from 1 to 65535")
    host = host.removeprefix("[").removesuffix("]")
    return f"tcp:[{host}]:{number}" if ":" in host else f"tcp:{host}:{number}"


def _no_meeting_point(launched: _Launched) -> UsageError:
    started = f"{launched.launcher} started rank {launched.rank} of {launched.size}"
    sentence = f"{started}, but nothing says where the ranks meet"
    if launched.launcher == "Open MPI":
        return UsageError(
            f"{sentence}: pass `-x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port>` to mpirun"
        )
    if launched.launcher == ARGUMENTS:
        return UsageError(f"{sentence}: give store='tcp:<host of rank 0>:<free port>' too")
    return UsageError(
        f"{sentence}: set MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port there) for all ranks"
    )


# The argument `init_method`


@dataclass(frozen=True)
class InitArguments:
    """The arguments of `identify` that an `init_method` stands for."""

    environ: Environment
    rank: int | None
    size: int | None
    store: str | None


def interpret_init_arguments(
    init_method: str | None,
    rank: int | None,
    size: int | None,
    world_size: int | None,
    store: str | None,
    environ: Environment,
) -> InitArguments:
    """Return the arguments of `identify` for those of `ronde.init`; -1 counts as not given. Raises UsageError."""
    size = _agreed("size", size, "world_size", _unless_negative(world_size))
    if init_method is None:
        return InitArguments(environ, rank, size, store)
    if not isinstance(init_method, str):
        raise UsageError(f"init_method={init_method!r} is invalid: {FORMS}")
    if store is not None:
        raise UsageError(
            f"store={store!r} and init_method={init_method!r} contradict each other: both say where to meet"
        )
    scheme, slashes, rest = init_method.partition("://")
    place, _, query = rest.partition("?")
    if not slashes or scheme not in ("env", "tcp", "file") or (scheme == "env") == bool(place):
        raise UsageError(f"init_method={init_method!r} is invalid: {FORMS}")
    given = _query_arguments(init_method, query)
    rank = _agreed("rank", _unless_negative(rank), "rank in init_method", given.get("rank"))
    size = _agreed("world_size", size, "world_size in init_method", given.get("world_size"))
    environ = _complete_environment(environ, rank, size)
    if scheme == "tcp":
        return InitArguments(environ, rank, size, _tcp_store(init_method, place))
    if scheme == "file":
        if not place.startswith("/") or place.endswith("/"):
            raise UsageError(
                f"init_method={init_method!r} is invalid: expected file:///path, with three slashes"
            )
        return InitArguments(environ, rank, size, f"file:{place}")
    if rank is None and not environ.get("RANK") and not _has_launcher(environ):
        raise UsageError(
            f"init_method={init_method!r} takes RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment, "
            "which does not have them: start the script by `ronde run`, or set them"
        )
    return InitArguments(environ, rank, size, None)


def _unless_negative(value: int | None) -> int | None:
    return None if value == -1 else value


def _agreed(name: str, value: int | None, other: str, again: int | None) -> int | None:
    if value is not None and again is not None and value != again:
        raise UsageError(f"{name}={value} and {other}={again} contradict each other: give one of them")
    return again if value is None else value


def _query_arguments(init_method: str, query: str) -> dict[str, int]:
    found = {}
    for part in filter(None, query.split("&")):
        name, _, text = part.partition("=")
        if name not in ("rank", "world_size") or not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise UsageError(
                f"init_method={init_method!r} is invalid: {part!r} is neither rank=N nor world_size=N"
            )
        found[name] = int(text)
    return found


def _complete_environment(environ: Environment, rank: int | None, size: int | None) -> Environment:
    """Return the environment, with rank or size from the argument if it has only the other one."""
    if rank is not None and environ.get("WORLD_SIZE") and not environ.get("RANK"):
        return {**environ, "RANK": str(rank)}
    if size is not None and environ.get("RANK") and not environ.get("WORLD_SIZE"):
        return {**environ, "WORLD_SIZE": str(size)}
    return environ


def _tcp_store(init_method: str, place: str) -> str:
    host, colon, port = place.rstrip("/").rpartition(":")
    is_right = bool(colon and host) and (":" in host) == (host.startswith("[") and host.endswith("]"))
    if not is_right or "/" in host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(
            f"init_method={init_method!r} is invalid: expected tcp://host:port, with a port from 1 to 65535"
        )
    return f"tcp:{host}:{port}"


def _has_launcher(environ: Environment) -> bool:
    """Return whether a launcher with other variables has started this process (`comm/identity`)."""
    return any(environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"))
