"""Converts the options of `ronde run` to a launch configuration. Pure; each contradiction is one sentence.

There are four sorts of jobs: on this machine alone; on machines that each run `ronde run` and meet at an endpoint
(`--nnodes`, `--rdzv-...`, `--master-addr`); the same under Slurm or in the Pods of an Indexed Job of Kubernetes, whose
variables give the endpoint; on hosts where this command starts agents by SSH (`-H`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ronde.cli.engine_options import ENGINE_OPTIONS
from ronde.cli.options import nearest
from ronde.cli.run_arguments import OPTIONS, RunArguments
from ronde.cli.run_here import BACKENDS, Here
from ronde.cli.run_options import KUBERNETES
from ronde.errors import UsageError
from ronde.launch.config import (
    DEFAULT_SIGNALS,
    Binding,
    Discovery,
    LaunchConfig,
    Outputs,
    Ssh,
    Std,
    WorkerSpec,
)
from ronde.launch.launch_plan import OURS, own_gpus
from ronde.rendezvous.rendezvous import RendezvousConfig
from ronde.values import (
    FLAG,
    PORT,
    POSITIVE_SECONDS,
    SECONDS,
    TEXT,
    ValueKind,
    count_from,
    seconds_from,
    seconds_text,
)

if TYPE_CHECKING:
    from ronde.launch.kubernetes.indexed_job import IndexedPod
    from ronde.process.slurm import Step

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

LONG = 7 * 24 * 3600 * SECOND
ALONE, STATIC, TCP, FILE = "alone", "static", "tcp", "file"
TCP_PORT, STATIC_PORT = 29400, 29500  # torchrun's
LOSSES = 100  # --max-restarts, where --min-np or --spares allow losses
MANY_NODES = 1 << 16  # no limit for hosts of a discovery script
BY_HOST_AND_PORT = (STATIC, TCP, "c10d")

_SOON = seconds_from("a number of seconds, 0.1 or more", 10**8)  # a shorter time is a mistake

# The keys of --rdzv-conf: how a value is read, and the field of RendezvousConfig that it sets, if any.
_CONF_KEYS = {
    "timeout": (_SOON, "join_timeout_ns"),
    "join_timeout": (_SOON, "join_timeout_ns"),
    "last_call_timeout": (SECONDS, "last_call_ns"),
    "keep_alive_interval": (_SOON, "heartbeat_ns"),
    "exit_barrier_timeout": (SECONDS, "exit_barrier_ns"),
    "keep_alive_max_attempt": (count_from(1), "missing_heartbeats"),
    # Of Ronde's own backends, which check store_type and protocol themselves.
    **dict.fromkeys(("is_host", "rehost", "run_once"), (FLAG, "")),
    **dict.fromkeys(
        ("store_type", "protocol", "ca_cert", "ssl_cert", "ssl_cert_key", "cacert", "cert", "key"), (TEXT, "")
    ),
    # Of torchrun's backends; Ronde's do not need them.
    **dict.fromkeys(("close_timeout", "heartbeat_timeout", "read_timeout"), (POSITIVE_SECONDS, "")),
    "rank": (count_from(0), ""),
    "use_libuv": (FLAG, ""),
    "etcd_prefix": (TEXT, ""),
}


def configure(asked: RunArguments, command: Sequence[str], here: Here) -> LaunchConfig:
    """Return the configuration for the command, whose first word is a path. Raises UsageError for contradictions."""
    hosts, discovery = _hosts(asked, here), _discovery(asked, here)
    by_ssh = bool(hosts) or discovery is not None
    slots = hosts[0][1] if hosts else discovery.slots if discovery else _slots(asked, here)
    _check_workers(asked, by_ssh)
    _check_cluster(asked)
    rendezvous = _with_hosts(asked, here, len(hosts)) if by_ssh else _rendezvous_of(asked, here)
    _check_launcher(asked, rendezvous)
    least, most = asked.value("--min-num-proc", 0), asked.value("--max-num-proc", 0)
    is_alone = rendezvous.backend == ALONE
    worker = _worker(asked, command, slots, here)
    if not by_ssh:
        worker = _with_continuing(asked, worker, is_alone)
        rendezvous = replace(rendezvous, min_slots=0 if is_alone else least)
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
        min_workers=(least if by_ssh else 0) or (discovery.first_workers if discovery else 0),
        max_workers=most,
        cooldown_ns=asked.value("--blacklist-cooldown-range"),
        start_timeout_ns=_start_timeout(asked, here),
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
    pod = None if by_ssh or given or asked.has("--network-interfaces") else _pod_of(asked, here)
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
    if step := _step_of(asked, here):
        return number or each or step.workers
    return number or each or 1


def _with_continuing(asked: RunArguments, worker: WorkerSpec, is_alone: bool) -> WorkerSpec:
    """Return what the workers of this machine run if those that continue may go on without lost ones."""
    if asked.has("--min-num-proc", *(["--spares"] if is_alone else [])) and not asked.has("--max-restarts"):
        worker = replace(worker, max_restarts=LOSSES)
    if not is_alone:
        return replace(worker, min_slots=1 if asked.has("--min-num-proc") else 0)
    least = asked.value("--min-num-proc", 0)
    if least > worker.slots:
        raise UsageError(
            f"{asked.origin('--min-num-proc')} {least} is more than the {worker.slots} workers of this machine: "
            "expected at most that many"
        )
    return replace(worker, min_slots=least, spares=asked.value("--spares", 0))


def _check_workers(asked: RunArguments, by_ssh: bool) -> None:
    least, most = asked.value("--min-num-proc"), asked.value("--max-num-proc")
    if asked.has("--max-num-proc") and not by_ssh:
        raise UsageError(
            f"{asked.origin('--max-num-proc')} needs a list of hosts: add -H, --hostfile or "
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


# The rendezvous


def _with_hosts(asked: RunArguments, here: Here, hosts: int) -> RendezvousConfig:
    """Return the rendezvous of agents that this command starts; `hosts` is 0 if a script finds the hosts."""
    for name in ("--node-rank", "--master-addr", "--master-port"):
        if asked.has(name):
            raise UsageError(
                f"{asked.origin(name)} and a list of hosts contradict each other: -H numbers the hosts, "
                "which meet at this machine"
            )
    if asked.has("--nnodes") and asked.value("--nnodes") != (hosts, hosts):
        raise UsageError(
            f"{asked.origin('--nnodes')} and a list of hosts contradict each other: the list gives the number of "
            "machines, and --min-np the smallest number of workers"
        )
    is_fixed = hosts and not asked.has("--min-num-proc")
    least, most = (hosts, hosts) if is_fixed else (1, hosts or MANY_NODES)
    backend = _backend(asked, here) or TCP
    if backend == STATIC:
        raise UsageError("a list of hosts needs no static rendezvous: leave --rdzv-backend out")
    return _meeting(asked, here, backend, least, most)


def _step_of(asked: RunArguments, here: Here) -> Step | None:
    """Return the step of Slurm whose tasks are the agents of this job; None if options choose another rendezvous."""
    return None if _has_own_rendezvous(asked) else here.step


def _pod_of(asked: RunArguments, here: Here) -> IndexedPod | None:
    """Return the Pod of the Indexed Job whose Pods are the agents of this job; None if there is no such job.

    Kubernetes does not tell how many Pods there are, so --nnodes does.
    """
    return here.pod if asked.value("--nnodes", (1, 1))[1] > 1 and not _has_own_rendezvous(asked) else None


def _has_own_rendezvous(asked: RunArguments) -> bool:
    """Return whether options choose another rendezvous than that of the platform."""
    options = (
        *("--standalone", "--rdzv-endpoint", "--rdzv-backend", "--master-addr", "--launcher"),
        *("--hosts", "--hostfile", "--host-discovery-script"),
    )
    return asked.has(*options) or asked.value("--node-rank") is not None


def _in_indexed_job(asked: RunArguments, here: Here, pod: IndexedPod) -> RendezvousConfig:
    """Return the rendezvous of the Pods of an Indexed Job: the first one serves the store.

    A Pod that is lost gets a successor, so nodes wait for others. The first Pod may start late. A Pod that has
    succeeded waits for all others, because Kubernetes may end those of an elastic job then.
    """
    least, most = asked.value("--nnodes")
    _check_range(asked, least, most)
    if pod.index >= most + asked.value("--spares", 0):
        raise UsageError(
            f"{asked.origin('--nnodes')} says {most} machines, but this is Pod {pod.index} of the Indexed Job "
            f"{pod.job}, which count from 0: give the Job as many `completions` as --nnodes says"
        )
    meeting = _meeting(asked, here, TCP, least, most, f"{pod.first_host()}:{TCP_PORT}")
    if "exit_barrier_timeout" not in meeting.options:
        meeting = replace(meeting, exit_barrier_ns=LONG)
    if not asked.has("--start-timeout"):
        meeting = replace(meeting, start_timeout_ns=max(meeting.start_timeout_ns, meeting.join_timeout_ns))
    return replace(
        meeting,
        run_id=asked.value("--rdzv-id", pod.job),
        node_rank=pod.index if pod.index < most else -1,
        options={"is_host": "true" if pod.index == 0 else "false", **meeting.options},
    )


def _under_slurm(asked: RunArguments, here: Here, step: Step) -> RendezvousConfig:
    """Return the rendezvous of the tasks of a step: the first one serves the store."""
    least, most = asked.value("--nnodes", (step.tasks, step.tasks))
    _check_range(asked, least, most)
    if most > step.tasks:
        raise UsageError(
            f"{asked.origin('--nnodes')} says {most} machines, but Slurm has started {step.tasks} tasks: leave it "
            f"out, or start {most} by srun -n {most}"
        )
    host, port = step.endpoint()
    rendezvous = _meeting(asked, here, TCP, least, most, f"{host}:{port}")
    return replace(
        rendezvous,
        run_id=asked.value("--rdzv-id", step.name(here.uid)),
        node_rank=step.task if most == step.tasks else -1,
        supply=step.tasks,
        options={"is_host": "true" if step.task == 0 else "false", **rendezvous.options},
    )


def _rendezvous_of(asked: RunArguments, here: Here) -> RendezvousConfig:
    """Return the rendezvous of machines that each have a `ronde run`, or of this one alone."""
    step = _step_of(asked, here)
    if step and step.tasks > 1:
        return _under_slurm(asked, here, step)
    if pod := _pod_of(asked, here):
        return _in_indexed_job(asked, here, pod)
    least, most = asked.value("--nnodes", (1, 1))
    _check_range(asked, least, most)
    if asked.has("--standalone") and most > 1:
        raise UsageError(
            f"{asked.origin('--standalone')} and {asked.origin('--nnodes')} {most} contradict each other: "
            "a standalone job has one machine"
        )
    backend = _backend(asked, here)
    has_place = asked.has("--rdzv-endpoint")
    is_numbered = asked.has("--master-addr") or asked.value("--node-rank") is not None
    if asked.has("--standalone") or (most == 1 and not has_place and backend in (None, *BY_HOST_AND_PORT)):
        backend = ALONE
    elif backend is None:
        backend = STATIC if is_numbered or not has_place else TCP
    if most == 1 and backend in BY_HOST_AND_PORT and asked.value("--rdzv-endpoint", "").endswith(":0"):
        backend = ALONE  # torchrun's examples use localhost:0
    rank = asked.value("--node-rank")
    if rank is not None and rank >= most:
        raise UsageError(
            f"{asked.origin('--node-rank')} {rank} is out of range: {most} machines are numbered from 0 to {most - 1}"
            if most > 1
            else f"{asked.origin('--node-rank')} {rank} is out of range: there is one machine, number 0; "
            "--nnodes says how many there are"
        )
    if backend == STATIC and least != most:
        raise UsageError(
            f"a static rendezvous has a fixed number of machines, not {asked.origin('--nnodes')} {least}:{most}: "
            "give --nnodes N, or --rdzv-backend tcp and --rdzv-endpoint"
        )
    return _meeting(asked, here, backend, least, most)


def _meeting(
    asked: RunArguments, here: Here, backend: str, least: int, most: int, endpoint: str | None = None
) -> RendezvousConfig:
    by_ssh = asked.has("--hosts", "--hostfile", "--host-discovery-script")
    conf: Mapping[str, str] = asked.value("--rdzv-conf", {})
    timed = {**_conf_fields(asked, backend, conf), **_heartbeats(asked, conf)}
    timed.setdefault(
        "join_timeout_ns",
        _timeout(asked, here, "--elastic-timeout", "ELASTIC_TIMEOUT", SECONDS, 600 * SECOND),
    )
    _fit_last_call(timed, least < most and "join_timeout" not in conf and "timeout" in conf)
    if asked.has("--start-timeout") and not by_ssh and not {"join_timeout", "timeout"} & set(conf):
        last_call_ns = timed.get("last_call_ns", 0) if least < most else 0
        timed["first_join_timeout_ns"] = _start_timeout(asked, here) + last_call_ns
    if backend in (TCP, "c10d") and _store_type(asked, conf) == FILE:  # like torchrun
        backend = FILE
    rank = asked.value("--node-rank")
    return RendezvousConfig(
        backend=backend,
        endpoint="" if backend == ALONE else endpoint or _endpoint(asked, backend, most),
        run_id=asked.value("--rdzv-id", "" if backend == ALONE or by_ssh else "none"),
        min_nodes=least,
        max_nodes=most,
        node_rank=rank if rank is not None else 0 if backend == STATIC else -1,
        spares=asked.value("--spares", 0),
        start_timeout_ns=_start_timeout(asked, here),
        options=conf,
        **timed,
    )


def _conf_fields(asked: RunArguments, backend: str, conf: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the configuration that --rdzv-conf sets. A third party's backend checks its own keys."""
    found: dict[str, Any] = {}
    for name, text in conf.items():
        shown, (kind, field) = (
            f"{asked.origin('--rdzv-conf')} {name}={text}",
            _CONF_KEYS.get(name, (None, "")),
        )
        if kind is None:
            if backend in BACKENDS:
                raise UsageError(f"{shown}: {name} is not known{nearest(name, [*_CONF_KEYS])}")
            continue
        if not field and backend not in BACKENDS:
            continue
        value = kind.read(text, shown)
        if field:
            found[field] = value
    return found


def _heartbeats(asked: RunArguments, conf: Mapping[str, str]) -> dict[str, int]:
    """Return the interval for which a silent node costs the others --heartbeat-timeout: see `rendezvous/liveness`."""
    if not asked.has("--heartbeat-timeout"):
        return {}
    for name in ("keep_alive_interval", "keep_alive_max_attempt"):
        if name in conf:
            raise UsageError(
                f"{asked.origin('--heartbeat-timeout')} and {asked.origin('--rdzv-conf')} {name} contradict each "
                "other: give one of them"
            )
    return {"heartbeat_ns": asked.value("--heartbeat-timeout") // (RendezvousConfig.missing_heartbeats + 1)}


def _store_type(asked: RunArguments, conf: Mapping[str, str]) -> str:
    text = conf.get("store_type", TCP)
    if text.lower() not in (TCP, FILE):
        raise UsageError(
            f"{asked.origin('--rdzv-conf')} store_type={text} is invalid: expected {TCP} or {FILE}"
        )
    return text.lower()


def _fit_last_call(timed: dict[str, Any], adds: bool) -> None:
    """Make the time for joining longer than the last call for more nodes.

    torchrun's `timeout` does not include the last call, so that `adds` to it; otherwise the last call becomes shorter.
    """
    default = RendezvousConfig.last_call_ns
    if adds:
        timed["join_timeout_ns"] += timed.get("last_call_ns", default)
    else:
        timed.setdefault("last_call_ns", min(default, timed["join_timeout_ns"] // 2))


def _check_range(asked: RunArguments, least: int, most: int) -> None:
    if least > most:
        raise UsageError(
            f"{asked.origin('--nnodes')} {least}:{most} contradicts itself: "
            f"the smaller number comes first, as in {most}:{least}"
        )


def _backend(asked: RunArguments, here: Here) -> str | None:
    name: str | None = asked.value("--rdzv-backend")
    if name is not None and name not in here.backends:
        known = ", ".join(here.backends)
        if name in here.torchruns_handlers:
            raise UsageError(
                f"{asked.origin('--rdzv-backend')} {name} is a rendezvous handler of torchrun's (entry point "
                f"torchrun.handlers), which ronde run cannot use: take one of {known}, or start the script by "
                "torchrun, under which ronde.init() finds its place too"
            )
        raise UsageError(
            f"{asked.origin('--rdzv-backend')} {name} is not known{nearest(name, here.backends)} (available: {known})"
        )
    return name


def _endpoint(asked: RunArguments, backend: str, nodes: int) -> str:
    place: str = asked.value("--rdzv-endpoint", "").strip()
    if backend == STATIC:
        return _static_endpoint(asked, place, nodes)
    if not place:
        if asked.has("--hosts", "--hostfile", "--host-discovery-script") and backend in BY_HOST_AND_PORT:
            return ""  # this machine
        form = {FILE: "the path of a file that all machines see"}.get(backend, "HOST:PORT")
        raise UsageError(f"the rendezvous {backend} needs an endpoint: give --rdzv-endpoint {form}")
    if backend in BY_HOST_AND_PORT:
        return _host_and_port(asked.origin("--rdzv-endpoint"), place, TCP_PORT)
    return os.path.abspath(place) if backend == FILE else place


def _static_endpoint(asked: RunArguments, place: str, nodes: int) -> str:
    host = asked.value("--master-addr")
    if place:
        return _host_and_port(
            asked.origin("--rdzv-endpoint"), place, asked.value("--master-port", STATIC_PORT)
        )
    if not host:
        raise UsageError(
            f"{nodes} machines need an endpoint: give --master-addr HOST and --node-rank N, "
            "or --rdzv-backend tcp and --rdzv-endpoint HOST:PORT, the same on all of them"
        )
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (":" in bare and not _is_ipv6(bare)) or any(letter.isspace() or letter in "/@,[]" for letter in bare):
        raise UsageError(
            f"{asked.origin('--master-addr')} {host} is invalid: expected a host name or an address; the port "
            "is that of --master-port"
        )
    host = f"[{bare}]" if ":" in bare else bare
    if asked.value("--master-port") == 0:
        raise UsageError(
            f"{asked.origin('--master-port')} 0 is invalid: the other machines have to know the port"
        )
    return f"{host}:{asked.value('--master-port', STATIC_PORT)}"


def _is_ipv6(text: str) -> bool:
    import socket

    try:
        socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    except OSError:
        return False
    return True


def _host_and_port(origin: str, place: str, port: int) -> str:
    """Return HOST:PORT, with this port if the place has none.

    Several places are an error: at each, a part of the machines could meet and start a job. An etcd is consistent.
    """
    if "," in place:
        raise UsageError(
            f"{origin} {place} names several endpoints, but the machines must meet at one: give one of them (if its "
            "store is lost, they meet again at another machine), or use --rdzv-backend etcd with all of its members"
        )
    from ronde.net.addresses import parse_tcp

    has_port = ":" in (place.rpartition("]")[2] if place.startswith("[") else place)
    text = place if has_port else f"{place}:{port}"
    try:
        address = parse_tcp(text)
    except UsageError:
        address = None
    if address is None or any(letter.isspace() or letter in "/@," for letter in address.host):
        raise UsageError(
            f"{origin} {place} is invalid: expected HOST:PORT, like node1:29400 or [fd00::1]:29400"
        )
    if not address.port:
        raise UsageError(f"{origin} {place} is invalid: the other machines have to know the port")
    return str(address).removeprefix("tcp:")


def _timeout(
    asked: RunArguments, here: Here, option: str, variable: str, kind: ValueKind, default: int
) -> int:
    """Return the time of an option, or else of Ronde's or Horovod's variable."""
    if asked.has(option):
        return int(asked.value(option))
    for name in (f"RONDE_{variable}", f"HOROVOD_{variable}"):
        if text := here.environment.get(name, "").strip():
            return int(kind.read(text, f"{name}={text}"))
    return default


def _start_timeout(asked: RunArguments, here: Here) -> int:
    """Return the time limit for everything before the start of the workers."""
    return _timeout(asked, here, "--start-timeout", "START_TIMEOUT", POSITIVE_SECONDS, 300 * SECOND)
