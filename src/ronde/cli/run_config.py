"""From what the user asked of `ronde run` to what is launched. Pure; every contradiction is one sentence.

Three sorts of jobs: of this machine alone; of machines that each have a `ronde run` of their own and meet somewhere
(`--nnodes`, `--rdzv-...`, `--master-addr`); of hosts on which this command starts agents by SSH (`-H`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ronde.cli.options import nearest
from ronde.cli.run_arguments import RunArguments
from ronde.cli.run_settings import worker_settings
from ronde.errors import UsageError
from ronde.launch.config import (
    Binding,
    Discovery,
    LaunchConfig,
    Outputs,
    RendezvousConfig,
    Ssh,
    Std,
    WorkerSpec,
)

__all__ = ["Here", "configure"]

SECOND = 10**9
ALONE, STATIC, TCP, FILE = "alone", "static", "tcp", "file"
TCP_PORT, STATIC_PORT = 29400, 29500  # torchrun's
MANY_NODES = 1 << 16  # as many as a script may find
BY_HOST_AND_PORT = (STATIC, TCP, "c10d")
BINDINGS = {"node": Binding.NUMA, "socket": Binding.NUMA, "exclusive": Binding.CORES}


class Here(NamedTuple):
    """What has to be known of this machine: `gpus` and `hostfile` (its text) only if they are asked for.

    `backends`: the names of all rendezvous that are known.
    """

    environment: Mapping[str, str]
    cores: int
    gpus: int = 0
    hostfile: str = ""
    backends: Sequence[str] = (STATIC, TCP, "c10d", FILE, "etcd", "etcd-v2")


def configure(asked: RunArguments, command: Sequence[str], here: Here) -> LaunchConfig:
    """Return the configuration for the command, whose first word is a path. Raises UsageError for contradictions."""
    hosts, discovery = _hosts(asked, here), _discovery(asked)
    by_ssh = bool(hosts) or discovery is not None
    slots = hosts[0][1] if hosts else discovery.slots if discovery else _slots(asked, here)
    _check_workers(asked, by_ssh)
    rendezvous = _with_hosts(asked, here, len(hosts)) if by_ssh else _rendezvous(asked, here)
    _check_launcher(asked, rendezvous)
    least, most = asked.value("--min-num-proc", 0), asked.value("--max-num-proc", 0)
    number = _number(asked, "--num-proc", here) if discovery else 0
    is_alone = rendezvous.backend == ALONE
    return LaunchConfig(
        worker=_worker(asked, command, slots, here),
        rendezvous=rendezvous,
        outputs=_outputs(asked, 0 if by_ssh else slots, here),
        master_addr=asked.value("--master-addr") if is_alone else None,
        master_port=asked.value("--master-port") if is_alone else None,
        local_addr=asked.value("--local-addr"),
        interface=_interface(asked),
        hosts=hosts,
        discovery=discovery,
        ssh=Ssh(asked.value("--ssh-port"), asked.value("--ssh-identity-file")),
        min_workers=least or number,
        max_workers=most,
        start_timeout_ns=_timeout(asked, here, "--start-timeout", "START_TIMEOUT", 300 * SECOND),
        verbose=asked.has("--verbose"),
        monitor_interval_ns=asked.value("--monitor-interval", SECOND // 10),
    )


# How many workers


def _number(asked: RunArguments, option: str, here: Here) -> int:
    """Return a number of workers, 0 if it was not given."""
    wanted = asked.value(option, 0)
    if wanted == "auto":
        wanted = "gpu" if here.gpus else "cpu"
    if wanted == "gpu" and not here.gpus:
        raise UsageError(
            f"{asked.origin(option)} gpu: there is no GPU on this machine that may be used; "
            "say how many workers, or cpu for one on each core"
        )
    return {"cpu": here.cores, "gpu": here.gpus}.get(wanted, wanted)  # type: ignore[no-any-return]


def _slots(asked: RunArguments, here: Here) -> int:
    """Return how many workers this machine gets."""
    number, each = _number(asked, "--num-proc", here), _number(asked, "--nproc-per-node", here)
    if number and each and number != each:
        raise UsageError(
            f"{asked.origin('--num-proc')} {number} and {asked.origin('--nproc-per-node')} {each} contradict each "
            "other: this command starts the workers of one machine, so leave one of them out"
        )
    return number or each or 1


def _check_workers(asked: RunArguments, by_ssh: bool) -> None:
    least, most = asked.value("--min-num-proc"), asked.value("--max-num-proc")
    for name in ("--min-num-proc", "--max-num-proc"):
        if asked.has(name) and not by_ssh:
            raise UsageError(
                f"{asked.origin(name)} is for hosts that come and go: name them with -H, --hostfile or "
                "--host-discovery-script; without SSH --nnodes MIN:MAX is what you need"
            )
    number = asked.value("--num-proc")
    number = number if isinstance(number, int) else None
    in_order = [("--min-num-proc", least), ("--num-proc", number), ("--max-num-proc", most)]
    given = [(name, value) for name, value in in_order if value is not None]
    for (one, small), (other, large) in zip(given, given[1:]):
        if small > large:
            raise UsageError(
                f"{asked.origin(one)} {small} is more than {asked.origin(other)} {large}: "
                "it has to be min <= number <= max"
            )


# By SSH


def _hosts(asked: RunArguments, here: Here) -> tuple[tuple[str, int], ...]:
    if not asked.has("--hosts", "--hostfile"):
        return ()
    from ronde.core.host_list import parse_hostfile, parse_hosts, place

    if asked.has("--hosts"):
        hosts = parse_hosts(asked.value("--hosts"))
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
    return tuple((host.name, host.slots) for host in place(hosts, _number(asked, "--num-proc", here) or None))


def _discovery(asked: RunArguments) -> Discovery | None:
    if not asked.has("--host-discovery-script"):
        for name in ("--slots-per-host", "--blacklist-cooldown-range", "--reset-limit"):
            if asked.has(name) and not asked.has("--hosts", "--hostfile"):
                raise UsageError(
                    f"{asked.origin(name)} is for hosts that come and go: add --host-discovery-script"
                )
        return None
    each = asked.value("--nproc-per-node")
    slots = asked.value("--slots-per-host", each if isinstance(each, int) else 1)
    return Discovery(asked.value("--host-discovery-script"), slots, asked.value("--blacklist-cooldown-range"))


def _with_hosts(asked: RunArguments, here: Here, hosts: int) -> RendezvousConfig:
    """Return the rendezvous of agents that are started from here; `hosts` is 0 if a script finds them."""
    for name in ("--node-rank", "--master-addr", "--master-port"):
        if asked.has(name):
            raise UsageError(
                f"{asked.origin(name)} and a list of hosts contradict each other: -H numbers the hosts by itself "
                "and lets them meet here"
            )
    least, most = asked.value("--nnodes", (hosts, hosts))
    _check_range(asked, least, most)
    if hosts and most != hosts:
        raise UsageError(
            f"{asked.origin('--nnodes')} says {most} machines, but {hosts} of the hosts are needed: leave it out, "
            "or name as many hosts"
        )
    if asked.has("--min-num-proc") or not hosts:
        least, most = 1, hosts or MANY_NODES
    backend = _backend(asked, here) or TCP
    if backend == STATIC:
        raise UsageError("a list of hosts needs no static rendezvous: leave --rdzv-backend out")
    return _meeting(asked, here, backend, least, most)


# Machines that meet


def _rendezvous(asked: RunArguments, here: Here) -> RendezvousConfig:
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
        backend = ALONE  # as torchrun's own examples have it, with localhost:0
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
            "say --nnodes N, or give --rdzv-backend tcp and --rdzv-endpoint"
        )
    return _meeting(asked, here, backend, least, most)


def _meeting(asked: RunArguments, here: Here, backend: str, least: int, most: int) -> RendezvousConfig:
    conf: Mapping[str, str] = asked.value("--rdzv-conf", {})
    timed = _conf_times(asked, conf)
    timed.setdefault(
        "join_timeout_ns", _timeout(asked, here, "--elastic-timeout", "ELASTIC_TIMEOUT", 600 * SECOND)
    )
    if backend in (TCP, "c10d") and conf.get("store_type") == FILE:  # as torchrun has it
        backend = FILE
    rank = asked.value("--node-rank")
    return RendezvousConfig(
        backend=backend,
        endpoint="" if backend == ALONE else _endpoint(asked, backend, most),
        run_id=asked.value("--rdzv-id", "" if backend == ALONE else "none"),
        min_nodes=least,
        max_nodes=most,
        node_rank=rank if rank is not None else 0 if backend == STATIC else -1,
        spares=asked.value("--spares", 0),
        options=conf,
        **timed,
    )


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
        raise UsageError(
            f"{asked.origin('--rdzv-backend')} {name} is not known{nearest(name, here.backends)} (known are {known})"
        )
    return name


def _endpoint(asked: RunArguments, backend: str, nodes: int) -> str:
    place: str = asked.value("--rdzv-endpoint", "").strip()
    if backend == STATIC:
        return _static_endpoint(asked, place, nodes)
    if not place:
        if asked.has("--hosts", "--hostfile", "--host-discovery-script") and backend in BY_HOST_AND_PORT:
            return ""  # here
        form = {FILE: "the path of a file that all machines see"}.get(backend, "HOST:PORT")
        raise UsageError(
            f"the rendezvous {backend} needs a place where the machines meet: give --rdzv-endpoint {form}"
        )
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
            f"{nodes} machines need a place where they meet: give --master-addr HOST and --node-rank N, "
            "or --rdzv-backend tcp and --rdzv-endpoint HOST:PORT, the same on all of them"
        )
    bare = host.removeprefix("[").removesuffix("]")
    host = f"[{bare}]" if ":" in bare else bare
    return _host_and_port(
        asked.origin("--master-addr"), f"{host}:{asked.value('--master-port', STATIC_PORT)}", 0
    )


def _host_and_port(origin: str, place: str, port: int) -> str:
    """Return HOST:PORT, with this port if the place has none."""
    from ronde.net.addresses import parse_tcp

    has_port = ":" in (place.rpartition("]")[2] if place.startswith("[") else place)
    text = place if has_port else f"{place}:{port}"
    try:
        address = parse_tcp(text)
    except UsageError:
        address = None
    if address is None or any(letter.isspace() or letter in "/@," for letter in address.host):
        raise UsageError(
            f"{origin} {place} makes no sense: it should be HOST:PORT, like node1:29400 or [fd00::1]:29400"
        )
    if not address.port:
        raise UsageError(f"{origin} {place} makes no sense: the other machines have to know the port")
    return str(address).removeprefix("tcp:")


_TIMES = {
    "timeout": "join_timeout_ns",
    "join_timeout": "join_timeout_ns",
    "last_call_timeout": "last_call_ns",
    "keep_alive_interval": "heartbeat_ns",
    "exit_barrier_timeout": "exit_barrier_ns",
}


def _conf_times(asked: RunArguments, conf: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the configuration that --rdzv-conf sets."""
    from ronde.cli.run_values import count, seconds

    found: dict[str, Any] = {}
    for key, text in conf.items():
        try:
            if key in _TIMES:
                found[_TIMES[key]] = seconds(text)
            elif key == "keep_alive_max_attempt":
                found["missing_beats"] = count(text)
        except ValueError:
            right = "a number of seconds" if key in _TIMES else "a whole number from 1"
            raise UsageError(
                f"{asked.origin('--rdzv-conf')} {key}={text} makes no sense: it should be {right}"
            ) from None
    return found


def _timeout(asked: RunArguments, here: Here, option: str, variable: str, default: int) -> int:
    """Return the time of an option, or of a variable that is ours or Horovod's."""
    if asked.has(option):
        return int(asked.value(option))
    from ronde.cli.run_values import seconds

    for name in (f"RONDE_{variable}", f"HOROVOD_{variable}"):
        if text := here.environment.get(name, "").strip():
            try:
                return seconds(text)
            except ValueError:
                raise UsageError(f"{name}={text} makes no sense: it should be a number of seconds") from None
    return default


# Workers and their output


def _check_launcher(asked: RunArguments, rendezvous: RendezvousConfig) -> None:
    if asked.value("--launcher") == "mpi" and rendezvous.backend != ALONE:
        raise UsageError(
            f"{asked.origin('--launcher')} mpi starts workers on this machine only: leave out what names other machines"
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
        environment=worker_settings(asked, here.environment),
        preload=() if preload == ("none",) else preload,
        binding=BINDINGS.get(asked.value("--numa-binding", ""), binding),
        patience_ns=asked.value("--shutdown-timeout", 5 * SECOND),
    )


def _outputs(asked: RunArguments, slots: int, here: Here) -> Outputs:
    """Return where output goes; `slots` is 0 if other machines may have other numbers of workers."""
    tee = asked.value("--tee", {-1: 3} if asked.has("--output-filename") else {})
    which = {"--redirects": asked.value("--redirects", {}), "--tee": tee}
    for option, streams in which.items():
        for rank in streams:
            if slots and rank >= slots:
                raise UsageError(
                    f"{asked.origin(option)} names local rank {rank}, but {slots} workers are numbered from 0 to "
                    f"{slots - 1}"
                )
    prefix = asked.value("--prefix")
    if prefix is None and (template := here.environment.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")):
        prefix = template.replace("${role_name}", "{role}").replace("${", "{")
    return Outputs(
        log_dir=asked.value("--log-dir", asked.value("--output-filename")),
        redirects=_streams(which["--redirects"]),
        tee=_streams(which["--tee"]),
        filter=asked.value("--local-ranks-filter"),
        prefix=prefix,
        timestamps=asked.has("--prefix-output-with-timestamp"),
    )


def _streams(numbers: Mapping[int, int]) -> dict[int, Std]:
    return {rank: Std(number) for rank, number in numbers.items() if number or rank >= 0}


def _interface(asked: RunArguments) -> str | None:
    name: str | None = asked.value("--network-interfaces")
    if name is not None and "," in name:
        raise UsageError(
            f"{asked.origin('--network-interfaces')} {name} names several: Ronde uses one network interface, "
            "so name the one that reaches the other machines"
        )
    return name
