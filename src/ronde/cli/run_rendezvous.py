"""Converts the options of `ronde run` to a rendezvous configuration. Pure; each contradiction is one sentence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ronde.cli.options import nearest
from ronde.cli.run_arguments import RunArguments
from ronde.cli.run_here import BACKENDS, Here
from ronde.errors import UsageError
from ronde.rendezvous.rendezvous import RendezvousConfig
from ronde.values import FLAG, POSITIVE_SECONDS, SECONDS, TEXT, ValueKind, count_from, seconds_from

if TYPE_CHECKING:
    from ronde.launch.kubernetes.indexed_job import IndexedPod
    from ronde.process.slurm import Step

__all__ = ["ALONE", "STATIC", "pod_of", "rendezvous_of", "start_timeout", "step_of", "with_hosts"]

SECOND = 10**9
LONG = 7 * 24 * 3600 * SECOND
ALONE, STATIC, TCP, FILE = "alone", "static", "tcp", "file"
TCP_PORT, STATIC_PORT = 29400, 29500  # torchrun's
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
    **dict.fromkeys(("is_host", "rehost"), (FLAG, "")),
    **dict.fromkeys(
        ("store_type", "protocol", "ca_cert", "ssl_cert", "ssl_cert_key", "cacert", "cert", "key"), (TEXT, "")
    ),
    # Of torchrun's backends; Ronde's do not need them.
    **dict.fromkeys(("close_timeout", "heartbeat_timeout", "read_timeout"), (POSITIVE_SECONDS, "")),
    "rank": (count_from(0), ""),
    "use_libuv": (FLAG, ""),
    "etcd_prefix": (TEXT, ""),
}


def with_hosts(asked: RunArguments, here: Here, hosts: int) -> RendezvousConfig:
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


def step_of(asked: RunArguments, here: Here) -> Step | None:
    """Return the step of Slurm whose tasks are the agents of this job; None if options choose another rendezvous."""
    return None if _has_own_rendezvous(asked) else here.step


def pod_of(asked: RunArguments, here: Here) -> IndexedPod | None:
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


def rendezvous_of(asked: RunArguments, here: Here) -> RendezvousConfig:
    """Return the rendezvous of machines that each have a `ronde run`, or of this one alone."""
    step = step_of(asked, here)
    if step and step.tasks > 1:
        return _under_slurm(asked, here, step)
    if pod := pod_of(asked, here):
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
    timed = _conf_fields(asked, backend, conf)
    timed.setdefault(
        "join_timeout_ns",
        _timeout(asked, here, "--elastic-timeout", "ELASTIC_TIMEOUT", SECONDS, 600 * SECOND),
    )
    _fit_last_call(timed, least < most and "join_timeout" not in conf and "timeout" in conf)
    if asked.has("--start-timeout") and not by_ssh and not {"join_timeout", "timeout"} & set(conf):
        last_call_ns = timed.get("last_call_ns", 0) if least < most else 0
        timed["first_join_timeout_ns"] = start_timeout(asked, here) + last_call_ns
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
        start_timeout_ns=start_timeout(asked, here),
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


def start_timeout(asked: RunArguments, here: Here) -> int:
    """Return the time limit for everything before the start of the workers."""
    return _timeout(asked, here, "--start-timeout", "START_TIMEOUT", POSITIVE_SECONDS, 300 * SECOND)
