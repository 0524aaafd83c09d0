"""Formats the launch plan for `ronde run --dry-run`, without secrets."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping

from ronde.launch.config import Binding, LaunchConfig, Outputs, RendezvousConfig, Std
from ronde.launch.launch_plan import assignments

__all__ = ["describe_launch"]

STREAMS = {Std.NONE: "nothing", Std.OUT: "stdout", Std.ERR: "stderr", Std.ALL: "stdout and stderr"}


def describe_launch(config: LaunchConfig, environment: Mapping[str, str]) -> str:
    """Return the plan as text: complete for a job of this machine, the known part for any other."""
    is_alone = config.rendezvous.backend == "alone"
    about = [*_hosts(config), *([] if is_alone else _rendezvous(config.rendezvous)), *_policy(config)]
    about += _outputs(config.outputs)
    if is_alone:
        from ronde.launch.agent.agent import plan_here

        known = plan_here(config, environment).describe()
        return known + "".join(f"{line}\n" for line in (["", *about] if about else []))
    spec = config.worker
    lines = [_size(config), *about, "", "its command:", f"    {shlex.join(spec.argv)}"]
    variables = {**spec.environment, **({} if spec.key_by_descriptor else {"RONDE_JOB_KEY": ""})}
    lines += ["", "environment of every worker, besides the variables for its rank:"]
    lines += [f"    {text}" for text in assignments(set(variables.items()), spec.exported)]
    return "\n".join(lines) + "\n"


def _size(config: LaunchConfig) -> str:
    if config.hosts:
        total = sum(slots for _, slots in config.hosts)
        return f"{_plural(total, 'worker')} on {_plural(len(config.hosts), 'host')}"
    if config.discovery:
        most = f", at most {config.max_workers}" if config.max_workers else ""
        first = config.discovery.first_workers
        begins = f", {first} at first" if first > config.min_workers else ""
        least = f"{max(1, config.min_workers)} workers or more{begins}{most}"
        return f"{least}, on the hosts that {config.discovery.script} finds"
    return f"{_plural(config.worker.slots, 'worker')} on this machine, which is one of {_nodes(config.rendezvous)}"


def _nodes(meeting: RendezvousConfig) -> str:
    if meeting.min_nodes == meeting.max_nodes:
        return f"{meeting.max_nodes}"
    return f"{meeting.min_nodes} to {meeting.max_nodes}"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _hosts(config: LaunchConfig) -> Iterator[str]:
    for name, slots in config.hosts:
        yield f"host {name}: {_plural(slots, 'worker')}"
    if found := config.discovery:
        yield f"hosts: printed by {found.script}, with {_plural(found.slots, 'slot')} where it gives no number"
    if found or config.min_workers:
        cooldown = "for good"
        if config.cooldown_ns:
            cooldown = f"for {config.cooldown_ns[0] / 1e9:g} to {config.cooldown_ns[1] / 1e9:g} s"
        yield f"a failed host is set aside {cooldown}"
    if config.hosts or config.discovery:
        port = f", port {config.ssh.port}" if config.ssh.port else ""
        key = f", key {config.ssh.identity_file}" if config.ssh.identity_file else ""
        yield f"reached by ssh{port}{key}"


def _rendezvous(meeting: RendezvousConfig) -> Iterator[str]:
    place, name = meeting.endpoint or "a store in this process", meeting.run_id or "by chance"
    yield f"rendezvous: {meeting.backend} at {place}, named {name}"
    yield f"    machines: {_nodes(meeting)}" + (f", and {meeting.spares} spare" if meeting.spares else "")
    if meeting.node_rank >= 0:
        yield f"    this one is number {meeting.node_rank}"
    yield (
        f"    waits {meeting.join_timeout_ns / 1e9:g} s for enough of them, then {meeting.last_call_ns / 1e9:g} s for "
        "more"
    )
    silence_ns = meeting.heartbeat_ns * meeting.missing_heartbeats
    yield f"    one that is silent for {silence_ns / 1e9:g} s is lost"
    if meeting.options:
        yield "    options: " + ", ".join(f"{key}={value}" for key, value in sorted(meeting.options.items()))


def _policy(config: LaunchConfig) -> Iterator[str]:
    spec = config.worker
    if spec.max_restarts:
        yield f"after a failure: all workers are started again, {_plural(spec.max_restarts, 'time')} at most"
    if spec.preload:
        yield f"started again from a process that has imported {', '.join(spec.preload)}"
    if spec.binding is not Binding.NONE:
        yield f"bound to {'NUMA nodes' if spec.binding is Binding.NUMA else 'equal shares of the cores'}"


def _outputs(outputs: Outputs) -> Iterator[str]:
    if outputs.log_dir or outputs.redirects or outputs.tee:
        yield f"log directory: {os.path.abspath(outputs.log_dir) if outputs.log_dir else 'a new temporary one'}"
    for what, streams in (("into files only", outputs.redirects), ("into files too", outputs.tee)):
        for rank, std in sorted(streams.items()):
            yield f"    {what}: {STREAMS[std]} of {'all workers' if rank < 0 else f'local rank {rank}'}"
    if outputs.filter is not None:
        yield f"shown: only local ranks {', '.join(map(str, sorted(outputs.filter)))}"
