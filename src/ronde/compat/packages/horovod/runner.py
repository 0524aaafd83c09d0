"""`horovod.runner`: `horovod.run` by `ronde.run`, the program horovodrun, and which MPI is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ronde.compat.calls import with_horovods_words
from ronde.errors import UsageError
from ronde.launch.callables import ElasticLaunch
from ronde.launch.config import LaunchConfig, Outputs, Std, WorkerSpec
from ronde.launch.hosts.host_list import parse_hostfile, parse_hosts, place_workers
from ronde.launch.hosts.ssh import is_here
from ronde.net.addresses import addresses_here

from . import add_modules

__all__ = ["run"]

R = TypeVar("R")

# By what `mpirun --version` prints. Intel MPI is made of MPICH's parts, so it comes first.
_NAMES = {"Intel": ("Intel(R) MPI",), "Spectrum": ("IBM Spectrum MPI",), "Open": ("Open MPI", "OpenRTE")}
_NAMES["MPICH"] = ("MPICH", "HYDRA")

_ELASTIC = (
    "min_num_proc",
    "max_num_proc",
    "slots",
    "reset_limit",
    "cooldown_range",
    "host_discovery_script",
    "min_np",
    "max_np",
)


def run(
    func: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[R]:
    """Call `func(*args, **kwargs)` in `num_proc` (or `np`) processes of this machine; return the results by rank.

    Raises WorkerError, which is a RuntimeError, if one fails, and UsageError, which is a ValueError, for what only
    Horovod can do: other machines, which `ronde run -H` reaches, and numbers of processes that change.
    """
    given = locals()
    for name in ("mpi_args", *_ELASTIC):
        if given[name] is not None:
            raise UsageError(
                f"horovod.run({name}=...) is not available: Ronde replaces Horovod in this process"
            )
    if hosts is not None and hostfile is not None:
        raise UsageError("horovod.run: hosts and hostfile contradict each other: both name the hosts")
    if use_gloo and use_mpi:
        raise UsageError("horovod.run: use_gloo and use_mpi contradict each other: leave both out")
    workers = np if np is not None and num_proc == 1 else num_proc
    _check_hosts(hosts, hostfile, workers)
    outputs = Outputs()
    if output_filename is not None:
        outputs = Outputs(log_dir=output_filename, tee={-1: Std.ALL}, by_rank=True)
    python = None if executable is None else shutil.which(executable)
    if executable is not None and python is None:
        raise UsageError(f"horovod.run(executable={executable!r}): no such executable program")
    limit = {"RONDE_START_TIMEOUT": str(start_timeout)} if start_timeout else {}
    worker = WorkerSpec(argv=(), slots=workers, environment=limit)
    launch = ElasticLaunch(LaunchConfig(worker, outputs=outputs), func, python=python)
    with with_horovods_words():
        results = launch(*args, **(kwargs or {}))
    return [results[rank] for rank in sorted(results)]


def _check_hosts(hosts: str | None, hostfile: str | None, workers: int) -> None:
    """Raise UsageError unless all hosts are this one, and have slots for all workers."""
    if hostfile is not None:
        try:
            with open(hostfile, encoding="utf-8") as file:
                listed = parse_hostfile(file.read(), hostfile)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", "it is not text")
            raise UsageError(f"horovod.run: cannot read the hostfile {hostfile}: {reason}") from None
    elif hosts is not None:
        listed = parse_hosts(hosts)
    else:
        return
    own = addresses_here()
    for host in place_workers(listed, workers):
        if not is_here(host.name, own):
            raise UsageError(
                f"horovod.run starts processes on this machine only, and {host.name} is another one: start the script "
                "itself on all of them, by ronde run --horovod -H"
            )


def run_commandline() -> int:
    """Run the command line of this process as `ronde run --horovod` does; return the exit code."""
    from ronde.cli import main  # only programs that start others need it

    return main(["run", "--horovod", *sys.argv[1:]])


def check_build(verbose: bool = False) -> None:
    """Print which libraries are there, and end this program."""
    from ronde.cli.check_build import check_build as describe_build

    print(describe_build())
    sys.exit(0)


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Return whether there is an `mpirun` of a known MPI. `env`: the environment in which it would run (None: this)."""
    return _installed_mpi(env) != ""


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Return whether `mpirun` is that of Open MPI."""
    return _installed_mpi(env) == "Open"


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Return whether `mpirun` is that of IBM Spectrum MPI."""
    return _installed_mpi(env) == "Spectrum"


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    """Return whether `mpirun` is that of MPICH."""
    return _installed_mpi(env) == "MPICH"


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Return whether `mpirun` is that of Intel MPI."""
    return _installed_mpi(env) == "Intel"


def _installed_mpi(env: Mapping[str, str] | None) -> str:
    try:
        done = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, check=True, env=env, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    found = (mpi for mpi, words in _NAMES.items() if any(word in done.stdout for word in words))
    return next(found, "")


add_modules(
    __name__,
    launch=["check_build", "run_commandline"],
    mpi_run=["is_intel_mpi", "is_mpich", "is_open_mpi", "is_spectrum_mpi", "mpi_available"],
)
