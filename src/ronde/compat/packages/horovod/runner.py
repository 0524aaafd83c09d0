"""`horovod.runner`: `horovod.run` by `ronde.run`, the program horovodrun, and which MPI is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from ronde.compat.calls import with_horovods_words
from ronde.environment import environment
from ronde.errors import UsageError
from ronde.launch.callables import ElasticLaunch
from ronde.launch.config import LaunchConfig, Outputs, Std, WorkerSpec
from ronde.launch.driver.functions import call_on_hosts
from ronde.launch.hosts.host_list import Host, parse_hostfile, parse_hosts, place_workers
from ronde.launch.hosts.ssh import is_here
from ronde.net.addresses import addresses_here

from . import add_modules

__all__ = ["run"]

R = TypeVar("R")

# By what `mpirun --version` prints. Intel MPI is made of MPICH's parts, so it comes first.
_NAMES = {"Intel": ("Intel(R) MPI",), "Spectrum": ("IBM Spectrum MPI",), "Open": ("Open MPI", "OpenRTE")}
_NAMES["MPICH"] = ("MPICH", "HYDRA")

# The arguments of `run` that describe a job on several hosts, by the option of `ronde run` with the same meaning.
_OPTIONS = {
    "num_proc": "-np",
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "slots": "--slots-per-host",
    "reset_limit": "--reset-limit",
    "cooldown_range": "--blacklist-cooldown-range",
    "hosts": "-H",
    "hostfile": "--hostfile",
    "host_discovery_script": "--host-discovery-script",
    "start_timeout": "--start-timeout",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "output_filename": "--output-filename",
    "network_interfaces": "--network-interfaces",
}
LOSSES = 100  # workers that an elastic job on this machine may lose, without a `reset_limit`


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
    """Call `func(*args, **kwargs)` in `num_proc` (or `np`) processes; return the results by rank.

    With `min_num_proc` the job goes on with fewer processes, and those that train under `horovod.torch.elastic.run`
    keep running when others are lost. `hosts`, `hostfile` and `host_discovery_script` mean what they mean for
    `ronde run --horovod`.

    Raises WorkerError, which is a RuntimeError, if a process fails, and UsageError, which is a ValueError, for invalid
    arguments.
    """
    if mpi_args is not None:
        raise UsageError("horovod.run(mpi_args=...) is not available: Ronde replaces Horovod in this process")
    if hosts is not None and hostfile is not None:
        raise UsageError("horovod.run: hosts and hostfile contradict each other: both name the hosts")
    if use_gloo and use_mpi:
        raise UsageError("horovod.run: use_gloo and use_mpi contradict each other: leave both out")
    given = locals()
    workers = np if np is not None and num_proc == 1 else num_proc
    least = min_np if min_num_proc is None else min_num_proc
    most = max_np if max_num_proc is None else max_num_proc
    given |= {"num_proc": max(workers, least or 1), "min_num_proc": least, "max_num_proc": most}
    listed = _read_hosts(hosts, hostfile)
    is_here = host_discovery_script is None and _are_here(listed, given["num_proc"], least)
    with with_horovods_words():
        if not is_here:
            return call_on_hosts(_config(given), func, args, kwargs or {})
        results = _launch_here(given, func, listed)(*args, **(kwargs or {}))
    return [results[rank] for rank in sorted(results)]


def _launch_here(
    given: Mapping[str, Any], func: Callable[..., R], listed: Sequence[Host]
) -> ElasticLaunch[..., R]:
    """Return what calls the function in processes of this machine. `given`: the arguments of `run`."""
    workers, least, most = (given[name] for name in ("num_proc", "min_num_proc", "max_num_proc"))
    restarts = 0
    if least is not None:
        workers = max(workers, sum(host.slots for host in listed))
        workers = workers if most is None else min(workers, most)
        restarts = LOSSES if given["reset_limit"] is None else given["reset_limit"]
        if least > workers:
            raise UsageError(f"horovod.run: min_num_proc={least} is more than max_num_proc={most}")
    outputs = Outputs()
    if given["output_filename"] is not None:
        outputs = Outputs(log_dir=given["output_filename"], tee={-1: Std.ALL}, by_rank=True)
    executable = given["executable"]
    python = None if executable is None else shutil.which(executable)
    if executable is not None and python is None:
        raise UsageError(f"horovod.run(executable={executable!r}): no such executable program")
    limit = {"RONDE_START_TIMEOUT": str(given["start_timeout"])} if given["start_timeout"] else {}
    worker = WorkerSpec(
        argv=(), slots=workers, min_slots=least or 0, max_restarts=restarts, environment=limit
    )
    return ElasticLaunch(LaunchConfig(worker, outputs=outputs), func, python=python)


def _read_hosts(hosts: str | None, hostfile: str | None) -> Sequence[Host]:
    """Return the hosts that the user lists; none if there is no list."""
    if hostfile is not None:
        try:
            with open(hostfile, encoding="utf-8") as file:
                return parse_hostfile(file.read(), hostfile)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", "it is not text")
            raise UsageError(f"horovod.run: cannot read the hostfile {hostfile}: {reason}") from None
    return () if hosts is None else parse_hosts(hosts)


def _are_here(listed: Sequence[Host], workers: int, least: int | None) -> bool:
    """Return whether all workers may run on this machine. Raises UsageError if the hosts have too few slots."""
    if not listed:
        return True
    placed = place_workers(tuple(listed), workers)
    own = addresses_here()
    return all(is_here(host.name, own) for host in (placed if least is None else listed))


def _config(given: Mapping[str, Any]) -> LaunchConfig:
    """Return the configuration of `ronde run --horovod` with the options of these arguments."""
    from ronde.cli.run_arguments import parse_arguments  # only such jobs need these
    from ronde.cli.run_config import configure
    from ronde.cli.run_here import look_at_machine

    if given["executable"] is not None:
        raise UsageError(
            "horovod.run: executable is for this machine only: leave it out, or leave out the hosts"
        )
    given = {**given, "network_interfaces": given["network_interfaces"] or given["network_interface"]}
    words = ["--horovod"]
    for name, option in _OPTIONS.items():
        value = given[name]
        if value is not None:
            many = isinstance(value, list | tuple)
            joined = [",".join(value)] if name == "network_interfaces" and many else None
            words += [option, *(joined or map(str, value if many else [value]))]
    variables = environment()
    asked = parse_arguments([*words, "function"], variables)
    return configure(asked, (), look_at_machine(asked, variables))


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


def in_thread(
    target: Callable[..., object],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call `target(*args)` in a new thread; return the thread, which has been started.

    Args:
        name: Name of the thread (None: Python's).
        daemon: Do not keep the process from ending.
        silent: Ignore exceptions of the target instead of printing them.

    Raises ValueError if `args` is no tuple: `(x,)` passes one argument.
    """
    if not isinstance(args, tuple):
        raise ValueError(f"in_thread(args={args!r}): args must be a tuple; (x,) passes one argument")

    def run_silently(*args: Any) -> None:
        with suppress(Exception):
            target(*args)

    thread = threading.Thread(target=run_silently if silent else target, args=args, name=name, daemon=daemon)
    thread.start()
    return thread


add_modules(
    __name__,
    launch=["check_build", "run_commandline"],
    mpi_run=["is_intel_mpi", "is_mpich", "is_open_mpi", "is_spectrum_mpi", "mpi_available"],
    util=["in_thread"],
)
add_modules(f"{__name__}.util", threads=["in_thread"])
