"""`ronde run`: starts a program in several processes, on this and other machines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ronde.cli import show
from ronde.cli.options import describe_options, read_options
from ronde.cli.run_arguments import OPTIONS, RunArguments, parse_arguments

__all__ = ["full_help", "run", "short_help"]

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
    from ronde.launch.command import find_command

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
        from ronde.cli.run_plan import describe_launch

        show(describe_launch(config, variables))
        return 0
    if protection := config.worker.environment.get("RONDE_PROTECTION"):
        from ronde.environment import set_variable

        set_variable("RONDE_PROTECTION", protection)  # the launcher's connections follow its environment
    from ronde.process.deadly_signals import explain_deadly_signals

    explain_deadly_signals(config.worker.signals)
    if config.hosts or config.discovery:
        from ronde.launch.hosts.host_agents import run_hosts

        return run_hosts(config, variables)
    from ronde.launch.agent.agent import run_agent
    from ronde.net.descriptor_limit import make_room

    make_room(4 * config.worker.slots + 8, f"-n {config.worker.slots}")
    result = run_agent(config, variables, reads=True)
    if here.pod and asked.has("--nnodes"):
        from ronde.launch.kubernetes.indexed_job import pod_exit_code

        return pod_exit_code(result.exit_code, bool(result.failures) or result.is_closed)
    return SURPLUS if result.is_surplus else result.exit_code


def _version() -> str:
    from ronde.cli import version

    return f"ronde {version()}\n"
