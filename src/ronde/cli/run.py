"""`ronde run`: starts a program in several processes, on this and other machines."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence

from ronde.cli import show
from ronde.cli.options import describe_options, read_options
from ronde.cli.run_arguments import OPTIONS, RunArguments, parse_arguments
from ronde.errors import UsageError
from ronde.launch.config import Binding, LaunchConfig, Outputs, RendezvousConfig, Std
from ronde.launch.launch_plan import assignments

__all__ = ["describe_launch", "find_command", "full_help", "run", "short_help"]

USAGE = """\
usage: ronde run [options] [--] script.py [arguments]
       ronde run [options] -m module [arguments]
       ronde run [options] program [arguments]

Starts a program in several worker processes and gives each of them a rank. Each line of output
starts with [rank], or with [host:rank] in a job of several machines. If a worker fails, ronde run
ends the others, prints the last output of the failed worker, and exits with its exit code. Ctrl-C
ends all workers.

    ronde run -n 4 train.py --epochs 3
    ronde run -H node1:4,node2:4 train.py
    ronde run --nnodes 2 --nproc-per-node 4 --rdzv-endpoint node1:29400 train.py  # on both machines
    ronde run --cluster kubernetes --image lab/train --nnodes 2 --gpus 8 train.py
"""
ENDING = """
Options end at the script; the words after it are the script's own arguments. Option names may
contain underscores (--nproc_per_node). An option may also come from a variable
(PET_NPROC_PER_NODE=4) or a --config-file; the command line overrides both. Workers find torchrun's
variables in their environment: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT and so on.
"""


SURPLUS = 4  # the exit code of an agent for which the job was full


def full_help() -> str:
    """Return the help with all options."""
    return USAGE + describe_options(OPTIONS) + ENDING


def short_help() -> str:
    """Return the help with the most common options."""
    common = describe_options([option for option in OPTIONS if option.common])
    return f"{USAGE}{common}\nThese are the most common options; ronde run --help prints all.\n"


def run(argv: Sequence[str]) -> int:
    """Run the words after `ronde run` and return the exit code. Raises UsageError."""
    words, _ = read_options(argv, OPTIONS)
    for option, text in {"--help": full_help, "-h": short_help, "--version": _version}.items():
        if option in words:
            show(text())
            return 0
    # Imports from here on, because help and mistakes in words do not need them.
    from ronde.environment import environment

    variables = environment()
    if "--check-build" in words:
        from ronde.cli.check_build import check_build

        show(check_build())
        return 0
    return _launch(parse_arguments(argv, variables), variables)


def _launch(asked: RunArguments, variables: Mapping[str, str]) -> int:
    if asked.has("--cluster"):
        from ronde.cli.run_kubernetes import run_on_kubernetes

        return run_on_kubernetes(asked, variables)
    from ronde.cli.run_config import configure, idle_options, idle_variables
    from ronde.cli.run_here import check_tuning, look_at_machine

    command = find_command(
        asked.name,
        asked.arguments,
        module=asked.has("--module"),
        no_python=asked.has("--no-python"),
        run_path=asked.has("--run-path"),
        search_path=variables.get("PATH"),
    )
    here = look_at_machine(asked, variables)
    config = configure(asked, command, here)
    check_tuning(asked, config)
    for sentence in [*idle_options(asked), *idle_variables(variables)]:
        print(f"ronde: {sentence}", file=sys.stderr)
    if asked.value("--launcher") == "mpi":
        from ronde.launch.mpi import mpirun

        environment = {**variables, **config.worker.environment}
        if asked.has("--dry-run"):
            show(mpirun.plan_here(command, config.worker.slots, environment).describe())
            return 0
        return mpirun.run_here(command, config.worker.slots, environment)
    if asked.has("--dry-run"):
        show(describe_launch(config, variables))
        return 0
    if protection := config.worker.environment.get("RONDE_PROTECTION"):
        from ronde.environment import set_variable

        set_variable("RONDE_PROTECTION", protection)  # the launcher's connections follow its environment
    from ronde.process.signals import explain_deadly_signals

    explain_deadly_signals(config.worker.signals)
    if config.hosts or config.discovery:
        from ronde.launch.hosts.host_agents import run_hosts

        return run_hosts(config, variables)
    from ronde.launch.agent.agent import run_agent
    from ronde.net.descriptors import make_room

    make_room(4 * config.worker.slots + 8, f"-n {config.worker.slots}")
    result = run_agent(config, variables, reads=True)
    if here.pod and asked.has("--nnodes"):
        from ronde.launch.kubernetes.indexed_job import pod_exit_code

        return pod_exit_code(result.exit_code, bool(result.failures) or result.is_closed)
    return SURPLUS if result.is_surplus else result.exit_code


def _version() -> str:
    from ronde.cli import version

    return f"ronde {version()}\n"


# --dry-run


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
    timeout_ns = meeting.silence_ns + meeting.heartbeat_ns
    yield f"    the others go on without one that is silent for {timeout_ns / 1e9:g} s"
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


# The command of the workers


def find_command(
    name: str,
    arguments: Sequence[str],
    *,
    module: bool,
    no_python: bool,
    search_path: str | None,
    run_path: bool = False,
) -> list[str]:
    """Return the command whose first word is a path: `name` with its arguments.

    This Python runs a module (`module`), a directory with a __main__.py, a file that ends in .py, .pyz or .zip, and any
    file with `run_path`. Everything else, and with `no_python` any file, is a program: a file of that name or, if there
    is none and the name has no slash, the first one in `search_path` (PATH). A text file that is not executable and
    names no other interpreter is a script, too. Raises UsageError if the file does not exist, is another directory, or
    may not be read or executed.
    """
    if module:
        return [sys.executable, "-m", name, *arguments]
    if not no_python and _is_package(name):
        return [sys.executable, name, *arguments]
    if run_path or (name.endswith((".py", ".pyz", ".zip")) and not no_python):
        _check_file(name, "script", os.R_OK, "it may not be read")
        return [sys.executable, name, *arguments]
    if os.sep not in name and not os.path.isfile(name):
        if found := shutil.which(name, path=search_path):
            return [found, *arguments]
    if not no_python and _is_script(name):
        return [sys.executable, name, *arguments]
    _check_file(name, "program", os.X_OK, "it is not executable (chmod +x would make it so)")
    _check_program(name)
    return [name if os.sep in name else os.path.join(".", name), *arguments]


def _is_package(name: str) -> bool:
    return os.path.isdir(name) and os.path.isfile(os.path.join(name, "__main__.py")) and name[-3:] != ".py"


def _is_script(name: str) -> bool:
    if not os.path.isfile(name) or os.access(name, os.X_OK) or not os.access(name, os.R_OK):
        return False
    with open(name, "rb") as file:
        head = file.read(1024)
    first = head.partition(b"\n")[0]
    return b"\0" not in head and (b"python" in first or not first.startswith(b"#!"))


def _check_file(name: str, kind: str, right: int, without: str) -> None:
    if os.path.isdir(name):
        raise UsageError(f"cannot run {name!r}: it is a directory, not a {kind}")
    if not os.path.exists(name):
        raise UsageError(f"{kind} {name!r} not found" + _where(name, kind))
    if not os.access(name, right):
        raise UsageError(f"cannot run {name!r}: {without}")


def _check_program(name: str) -> None:
    """Raise UsageError if it is a text file that names no existing interpreter. An unreadable file passes."""
    if not os.access(name, os.R_OK) or not os.path.isfile(name):
        return
    with open(name, "rb") as file:
        head = file.read(1024)
    first = head.partition(b"\n")[0]
    if first.startswith(b"#!"):
        interpreter = os.fsdecode((first[2:].split() or [b""])[0])
        if not os.path.exists(interpreter):
            raise UsageError(
                f"cannot run {name!r}: its first line names {interpreter!r}, which does not exist"
            )
    elif b"\0" not in head:
        raise UsageError(f"cannot run {name!r}: its first line names no interpreter, as in #!/bin/sh")


def _where(name: str, kind: str) -> str:
    if os.path.isabs(name):
        return ""
    elsewhere = " or in PATH" if kind == "program" and os.sep not in name else ""
    return f" in {os.getcwd()}{elsewhere}"
