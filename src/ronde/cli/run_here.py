"""Collects facts about this machine that `ronde run` needs besides its options."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ronde.cli.run_arguments import RunArguments
from ronde.errors import UsageError

if TYPE_CHECKING:
    from ronde.launch.config import LaunchConfig
    from ronde.launch.kubernetes.indexed_job import IndexedPod
    from ronde.process.slurm import Step

__all__ = ["BACKENDS", "Here", "check_tuning", "look_at_machine", "usable_gpus"]

# The built-in ones of rendezvous/rendezvous.
BACKENDS = ("alone", "c10d", "etcd", "etcd-v2", "file", "static", "tcp")

# The first of these variables that is set lists the visible GPUs; the list ends at the first invalid entry, like -1.
_NVIDIA = ("CUDA_VISIBLE_DEVICES",)
_AMD = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


class Here(NamedTuple):
    """Facts about this machine; `gpus` and `hostfile` (its text) only if the options need them.

    `backends`: the names of all known rendezvous; `torchruns_handlers`: of those that only torchrun can use. `step`:
    Slurm's step of which this process, with the user `uid`, is a task. `pod`: the Pod of an Indexed Job of Kubernetes.
    """

    environment: Mapping[str, str]
    cores: int
    gpus: int = 0
    hostfile: str = ""
    backends: Sequence[str] = BACKENDS
    torchruns_handlers: Sequence[str] = ()
    step: Step | None = None
    uid: int = 0
    pod: IndexedPod | None = None


def look_at_machine(asked: RunArguments, variables: Mapping[str, str]) -> Here:
    """Return the facts that the options need. Raises UsageError for a file that cannot be read."""
    from ronde.process.resources import usable_cores

    counts = {asked.value("--num-proc"), asked.value("--nproc-per-node")}
    gpus = 0
    if counts & {"gpu", "auto"}:
        gpus = usable_gpus(variables)
    identity = asked.value("--ssh-identity-file")
    if identity is not None and not os.access(identity, os.R_OK):
        raise UsageError(
            f"{asked.origin('--ssh-identity-file')} {identity} is not a readable file: expected a private key"
        )
    step = None
    if "SLURM_STEP_ID" in variables:
        from ronde.process.slurm import find_step

        step = find_step(variables)
    pod = None
    if "JOB_COMPLETION_INDEX" in variables:
        from ronde.launch.kubernetes.indexed_job import find_pod
        from ronde.net.host import full_host_name, host_name

        pod = find_pod(variables, host_name(), full_host_name())
    hostfile = _hostfile(asked.value("--hostfile"))
    here = Here(variables, usable_cores(), gpus, hostfile, step=step, uid=os.geteuid(), pod=pod)
    if asked.value("--rdzv-backend", "tcp") not in here.backends:
        from ronde.rendezvous.rendezvous import names, torchruns_names  # slow to load

        here = here._replace(backends=names(), torchruns_handlers=torchruns_names())
    return here


def check_tuning(asked: RunArguments, config: LaunchConfig) -> None:
    """Raise UsageError if workers here, with this Python, would lack the package that --autotune needs."""
    option = "--autotune" if asked.has("--autotune") else "--autotune-log"
    is_wanted = asked.value("--autotune", asked.has("--autotune-log"))
    is_here = config.rendezvous.backend == BACKENDS[0] and config.worker.argv[0] == sys.executable
    if not is_wanted or not is_here:
        return
    from importlib.util import find_spec  # here, because few jobs need it

    if find_spec("bayes_opt") is None:
        raise UsageError(
            f"{asked.origin(option)} needs the package bayesian-optimization, which is not installed: "
            "pip install 'ronde[tuning]'"
        )


def _hostfile(path: str | None) -> str:
    if path is None:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the hostfile {path}: {getattr(error, 'strerror', 'it is not text')}"
        ) from None


def usable_gpus(environment: Mapping[str, str], root: str = "/") -> int:
    """Return the number of GPUs of NVIDIA or AMD that this machine has and that the environment shows to programs.

    `root`: the directory of the machine's files.
    """
    import glob  # few jobs need it

    if nvidia := len(glob.glob(f"{root}dev/nvidia[0-9]*")):
        return _visible(nvidia, _NVIDIA, environment)
    nodes = glob.glob(f"{root}sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    return _visible(sum(map(_is_gpu, nodes)), _AMD, environment)


def _visible(present: int, variables: tuple[str, ...], environment: Mapping[str, str]) -> int:
    for variable in variables:
        if variable in environment:
            seen = 0
            for name in (name.strip() for name in environment[variable].split(",")):
                if not name or (name.lstrip("-").isdecimal() and not 0 <= int(name) < present):
                    break
                seen += 1
            return seen if present else 0
    return present


def _is_gpu(path: str) -> bool:
    try:
        with open(path) as file:
            return file.read().strip() not in ("", "0")  # 0 is a processor
    except OSError:
        return False
