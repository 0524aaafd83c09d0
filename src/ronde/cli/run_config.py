"""Converts the options of `ronde run` to a launch configuration. Pure; each contradiction is one sentence.

There are four sorts of jobs: on this machine alone; on machines that each run `ronde run` and meet at an endpoint
(`--nnodes`, `--rdzv-...`, `--master-addr`); the same under Slurm or in the Pods of an Indexed Job of Kubernetes, whose
variables give the endpoint; on hosts where this command starts agents by SSH (`-H`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ronde.cli.engine_options import ENGINE_OPTIONS
from ronde.cli.run_arguments import OPTIONS, RunArguments
from ronde.cli.run_here import Here
from ronde.cli.run_options import KUBERNETES
from ronde.cli.run_rendezvous import ALONE, STATIC, pod_of, rendezvous_of, start_timeout, step_of, with_hosts
from ronde.errors import UsageError
from ronde.launch.config import (
    DEFAULT_SIGNALS,
    Binding,
    Discovery,
    LaunchConfig,
    Outputs,
    RendezvousConfig,
    Ssh,
    Std,
    WorkerSpec,
)
from ronde.launch.plan import OURS, own_gpus
from ronde.values import PORT, SECONDS, ValueKind, seconds_text

__all__ = ["configure", "idle_options", "idle_variables", "worker_settings"]

SECOND = 10**9
BINDINGS = {
    "node": Binding.NUMA,
    "socket": Binding.NUMA,
    "exclusive": Binding.CORES,
    "core-complex": Binding.CORES,
}
# Variables of torchrun's agent, and why they have no effect here.
_TORCHRUNS_VARIABLES = {
    "TORCHELASTIC_ENABLE_FILE_TIMER": (
        "there is no watchdog for torch's file timer; RONDE_STALL_SHUTDOWN ends jobs that hang"
    ),
    "TORCHELASTIC_HEALTH_CHECK_PORT": "there is no health check server",
}
NEVER = str(2**31)  # larger than any tensor: the limit of the setting


def configure(asked: RunArguments, command: Sequence[str], here: Here) -> LaunchConfig:
    """Return the configuration for the command, whose first word is a path. Raises UsageError for contradictions."""
    hosts, discovery = _hosts(asked, here), _discovery(asked, here)
    by_ssh = bool(hosts) or discovery is not None
    slots = hosts[0][1] if hosts else discovery.slots if discovery else _slots(asked, here)
    _check_workers(asked, by_ssh)
    _check_cluster(asked)
    rendezvous = with_hosts(asked, here, len(hosts)) if by_ssh else rendezvous_of(asked, here)
    _check_launcher(asked, rendezvous)
    least, most = asked.value("--min-num-proc", 0), asked.value("--max-num-proc", 0)
    is_alone = rendezvous.backend == ALONE
    worker = _worker(asked, command, slots, here)
    if not by_ssh:
        own_gpus(worker, here.environment)  # raises before this node waits for others
    return LaunchConfig(
        worker=worker,
        rendezvous=rendezvous,
        outputs=_outputs(asked, 0 if by_ssh else slots, here),
        master_addr=_master_addr(asked, rendezvous, by_ssh),
        master_port=(asked.value("--master-port") or None) if is_alone else None,
        local_addr=_local_addr(asked, here, by_ssh),
        interface=_interface(asked),
        hosts=hosts,
        discovery=discovery,
        ssh=Ssh(asked.value("--ssh-port"), asked.value("--ssh-identity-file")),
        min_workers=least or (discovery.first_workers if discovery else 0),
        max_workers=most,
        cooldown_ns=asked.value("--blacklist-cooldown-range"),
        start_timeout_ns=start_timeout(asked, here),
        monitor_interval_ns=asked.value("--monitor-interval", SECOND // 10),
        insecure_job_key=asked.has("--insecure-job-key"),
    )


def _master_addr(asked: RunArguments, rendezvous: RendezvousConfig, by_ssh: bool) -> str | None:
    """Return the user's MASTER_ADDR for a job of this machine; the nodes of any other job agree on one."""
    if by_ssh or rendezvous.max_nodes > 1 or rendezvous.backend == STATIC:
        return None
    given = asked.value("--master-addr") if rendezvous.backend == ALONE else None
    return _bare(given or asked.value("--local-addr"))


def _local_addr(asked: RunArguments, here: Here, by_ssh: bool) -> str | None:
    """Return the user's choice, else the name of this Pod: that of the first Pod may not be known yet."""
    given: str | None = asked.value("--local-addr")
    pod = None if by_ssh or given or asked.has("--network-interfaces") else pod_of(asked, here)
    return pod.own_host if pod else given


def _bare(host: str | None) -> str | None:
    """Return the host without the brackets of an IPv6 address."""
    return host and host.removeprefix("[").removesuffix("]")


# The number of workers


def _number(asked: RunArguments, option: str, here: Here) -> int:
    """Return an option's number of workers, 0 if it was not given."""
    wanted = asked.value(option, 0)
    if wanted == "auto":
        wanted = "gpu" if here.gpus else "cpu"
    if wanted == "gpu" and not here.gpus:
        raise UsageError(
            f"{asked.origin(option)} gpu: this machine has no usable GPU; give a number of "
            "workers, or cpu for one worker per core"
        )
    return {"cpu": here.cores, "gpu": here.gpus}.get(wanted, wanted)  # type: ignore[no-any-return]


def _slots(asked: RunArguments, here: Here) -> int:
    """Return the number of workers on this machine."""
    number, each = _number(asked, "--num-proc", here), _number(asked, "--nproc-per-node", here)
    if number and each and number != each:
        raise UsageError(
            f"{asked.origin('--num-proc')} {number} and {asked.origin('--nproc-per-node')} {each} contradict each "
            "other: this command starts the workers of one machine, so leave one of them out"
        )
    if step := step_of(asked, here):
        return number or each or step.workers
    return number or each or 1


def _check_workers(asked: RunArguments, by_ssh: bool) -> None:
    least, most = asked.value("--min-num-proc"), asked.value("--max-num-proc")
    for name in ("--min-num-proc", "--max-num-proc"):
        if asked.has(name) and not by_ssh:
            raise UsageError(
                f"{asked.origin(name)} needs a list of hosts: add -H, --hostfile or "
                "--host-discovery-script; without SSH, use --nnodes MIN:MAX"
            )
    number = asked.value("--num-proc")
    number = number if isinstance(number, int) else None
    in_order = [("--min-num-proc", least), ("--num-proc", number), ("--max-num-proc", most)]
    given = [(name, value) for name, value in in_order if value is not None]
    for (one, small), (other, large) in zip(given, given[1:]):
        if small > large:
            raise UsageError(
                f"{asked.origin(one)} {small} is more than {asked.origin(other)} {large}: "
                "expected min <= number <= max"
            )


# By SSH


def _hosts(asked: RunArguments, here: Here) -> tuple[tuple[str, int], ...]:
    if not asked.has("--hosts", "--hostfile"):
        return ()
    from ronde.launch.hosts.host_list import parse_hostfile, parse_hosts, place_workers

    if asked.has("--hosts"):
        hosts = parse_hosts(asked.value("--hosts"), asked.origin("--hosts"))
    else:
        hosts = parse_hostfile(here.hostfile, asked.value("--hostfile"))
    each = asked.value("--nproc-per-node")
    if isinstance(each, int):
        for host in hosts:
            if host.slots not in (1, each):
                raise UsageError(
                    f"{asked.origin('--nproc-per-node')} {each} contradicts {host}: leave it out, "
                    "the slots say how many workers a host gets"
                )
        hosts = tuple(host._replace(slots=each) for host in hosts)
    placed = place_workers(hosts, _number(asked, "--num-proc", here) or None)
    if asked.has("--min-num-proc"):  # an elastic job may use all slots, and begins with this number
        placed = hosts
    return tuple((host.name, host.slots) for host in placed)


def _discovery(asked: RunArguments, here: Here) -> Discovery | None:
    if not asked.has("--host-discovery-script"):
        for name in ("--slots-per-host", "--blacklist-cooldown-range"):
            if asked.has(name) and not asked.has("--hosts", "--hostfile"):
                raise UsageError(
                    f"{asked.origin(name)} needs hosts that come and go: add --host-discovery-script"
                )
        return None
    each = asked.value("--nproc-per-node")
    slots = asked.value("--slots-per-host", each if isinstance(each, int) else 1)
    return Discovery(asked.value("--host-discovery-script"), slots, _number(asked, "--num-proc", here))


# Workers and their output


def _check_launcher(asked: RunArguments, rendezvous: RendezvousConfig) -> None:
    if asked.value("--launcher") == "mpi" and rendezvous.backend != ALONE:
        raise UsageError(
            f"{asked.origin('--launcher')} mpi starts workers on this machine only: leave out the options that name "
            "other machines"
        )
    if asked.value("--launcher") == "mpi" and asked.has("--job-key-by-descriptor"):
        raise UsageError(
            f"{asked.origin('--job-key-by-descriptor')} is for workers that `ronde run` starts itself: leave it out, "
            "or leave out --launcher mpi"
        )


def _check_cluster(asked: RunArguments) -> None:
    for option in OPTIONS:
        if option.group == KUBERNETES and asked.has(option.name):
            raise UsageError(
                f"{asked.origin(option.name)} needs --cluster kubernetes: add it, or leave this out"
            )


def _worker(asked: RunArguments, command: Sequence[str], slots: int, here: Here) -> WorkerSpec:
    preload: tuple[str, ...] | None = asked.value("--preload")
    binding = Binding(asked.value("--bind", "none"))
    return WorkerSpec(
        argv=tuple(command),
        slots=slots,
        role=asked.value("--role", "default"),
        max_restarts=asked.value("--max-restarts", 0),
        max_changes=asked.value("--reset-limit", -1),
        environment={**_exports(asked, here), **worker_settings(asked, here.environment)},
        exported=frozenset(asked.value("--export", ())),
        preload=() if preload == ("none",) else preload,
        fork=asked.value("--start-method", "spawn") != "spawn",
        key_by_descriptor=asked.has("--job-key-by-descriptor"),
        binding=BINDINGS.get(asked.value("--numa-binding", ""), binding),
        signals=tuple(sorted({*DEFAULT_SIGNALS, *asked.value("--signals-to-handle", ())})),
        virtual_local_rank=asked.has("--virtual-local-rank"),
        **_patience(asked, here),
    )


def _patience(asked: RunArguments, here: Here) -> dict[str, Any]:
    """Return how long workers may take to end, if an option or torchrun's variable says so."""
    variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    text = here.environment.get(variable, "").strip()
    if asked.has("--shutdown-timeout"):
        patience_ns = asked.value("--shutdown-timeout")
    elif text:
        patience_ns = SECONDS.read(text, f"{variable}={text}")
    else:
        return {}
    return {"patience_ns": patience_ns, "farewell_ns": patience_ns}


def _exports(asked: RunArguments, here: Here) -> dict[str, str]:
    exports: tuple[str, ...] = asked.value("--export", ())
    for name in exports:
        said = f"{asked.origin('--export')} {name}"
        if name in OURS:
            raise UsageError(f"{said}: ronde run sets {name} for each worker: leave it out")
        if name not in here.environment:
            raise UsageError(f"{said}: the environment has no such variable")
        if name == "MASTER_PORT":
            text = here.environment[name]
            PORT.read(text, f"{said}: {text}")
    return {name: here.environment[name] for name in exports}


def _outputs(asked: RunArguments, slots: int, here: Here) -> Outputs:
    """Return the outputs; `slots` is 0 if other machines may have other numbers of workers."""
    tee = asked.value("--tee", {-1: Std.ALL} if asked.has("--output-filename") else {})
    which = {"--redirects": asked.value("--redirects", {}), "--tee": tee}
    for option, streams in which.items():
        for rank in streams:
            if slots and rank >= slots:
                raise UsageError(
                    f"{asked.origin(option)} names local rank {rank}, but {slots} workers are numbered from 0 to "
                    f"{slots - 1}"
                )
    shown = asked.value("--local-ranks-filter")
    if slots and shown is not None and min(shown) >= slots:
        raise UsageError(
            f"{asked.origin('--local-ranks-filter')} names no existing worker, so no output would be shown: "
            f"workers are numbered from 0 to {slots - 1}"
        )
    filters = {Std.OUT: "--duplicate-stdout-filters", Std.ERR: "--duplicate-stderr-filters"}
    prefix = asked.value("--prefix")
    if prefix is None and (template := here.environment.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")):
        prefix = template.replace("${role_name}", "{role}").replace("${", "{")
    return Outputs(
        log_dir=asked.value("--log-dir", asked.value("--output-filename")),
        redirects=which["--redirects"],
        tee=which["--tee"],
        filter=shown,
        prefix=prefix,
        timestamps=asked.has("--prefix-output-with-timestamp"),
        by_rank=asked.has("--output-filename"),
        duplicates={std: asked.value(option) for std, option in filters.items() if asked.value(option)},
    )


def _interface(asked: RunArguments) -> str | None:
    name: str | None = asked.value("--network-interfaces")
    if name is not None and "," in name:
        raise UsageError(
            f"{asked.origin('--network-interfaces')} {name} names several: Ronde uses one network interface, "
            "so name the one that reaches the other machines"
        )
    return name


# The engine's settings, and options without effect


def worker_settings(asked: RunArguments, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the workers as variables; some of them extend those of `environment`, this process's."""
    settings = {}
    for option in ENGINE_OPTIONS:
        if option.variable and option.metavar and option.name in asked.given:
            settings[option.variable] = _variable_text(option.kind, asked.value(option.name))
    settings |= _flags(asked)
    if asked.has("--autotune-log"):
        settings.setdefault("RONDE_AUTOTUNE", "1")
    if asked.has("--start-timeout"):
        settings["RONDE_START_TIMEOUT"] = seconds_text(asked.value("--start-timeout"))
    if asked.has("--network-interfaces"):
        settings["RONDE_INTERFACE"] = asked.value("--network-interfaces")
        if not environment.get("NCCL_SOCKET_IFNAME"):
            settings["NCCL_SOCKET_IFNAME"] = settings["RONDE_INTERFACE"]  # NCCL makes its own connections
    if asked.has("--horovod"):
        from ronde.compat import PACKAGES

        settings["PYTHONPATH"] = os.pathsep.join(filter(None, [PACKAGES, environment.get("PYTHONPATH")]))
    return settings


def _variable_text(kind: ValueKind, value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return seconds_text(value) if kind.unit == "s" else str(value)


def _flags(asked: RunArguments) -> dict[str, str]:
    """Return the variables of flags."""
    found = {}
    for option in ENGINE_OPTIONS:
        if option.variable and not option.metavar and option.name in asked.given:
            yes = asked.value(option.name)
            match option.name:
                case "--hierarchical-allreduce" if yes:
                    found[option.variable] = "hierarchical"
                case "--hierarchical-allreduce":
                    found["RONDE_HIERARCHICAL_BYTES"] = NEVER
                case "--stall-check" if yes:
                    found["HOROVOD_STALL_CHECK_DISABLE"] = "0"  # overrides the environment
                case "--stall-check":
                    found[option.variable] = "0"
                case "--no-log-hide-timestamp":
                    found[option.variable] = "0" if yes else "1"
                case _:
                    found[option.variable] = "1" if yes else "0"
    return found


def idle_options(asked: RunArguments) -> list[str]:
    """Return a sentence for each option without effect that a command line or file sets."""
    why = {option.name: option.idle for option in ENGINE_OPTIONS if option.idle}
    if asked.has("--standalone"):
        why["--rdzv-endpoint"] = "with --standalone one machine runs without a rendezvous"
    return [
        f"{asked.origin(name)} has no effect: {reason}"
        for name, reason in why.items()
        if name in asked.given and not asked.origin(name).startswith("PET_")
    ]


def idle_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that torchrun's agent would follow and Ronde does not."""
    return [
        f"{name} has no effect: {reason}"
        for name, reason in _TORCHRUNS_VARIABLES.items()
        if environment.get(name, "").strip() not in ("", "0")
    ]
