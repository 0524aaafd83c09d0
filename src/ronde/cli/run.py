"""`ronde run`: start a program in several processes, here and on other machines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ronde.cli.options import describe, read
from ronde.cli.run_arguments import OPTIONS, RunArguments, parse_arguments
from ronde.errors import UsageError

if TYPE_CHECKING:
    from ronde.cli.run_config import Here

__all__ = ["full_help", "run", "short_help"]

USAGE = """\
usage: ronde run [options] [--] script.py [arguments]
       ronde run [options] -m module [arguments]
       ronde run [options] program [arguments]

Starts a program in several processes and tells each its rank. Lines of output are preceded by
[rank]. If one process fails the others are ended, and its last words are shown last; Ctrl-C ends
all of them. The exit code is that of the first process that failed.

    ronde run -n 4 train.py --epochs 3
    ronde run -H node1:4,node2:4 train.py
    ronde run --nnodes 2 --nproc-per-node 4 --rdzv-endpoint node1:29400 train.py  # on both machines
"""
ENDING = """
Options end at the script: what follows it is passed on as it is. Names may be written with
underscores (--nproc_per_node), and given by variables (PET_NPROC_PER_NODE=4) or in a --config-file;
the command line goes first. Workers find torchrun's variables in their environment: RANK,
LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and so on.
"""


def full_help() -> str:
    """Return the help with all options."""
    return USAGE + describe(OPTIONS) + ENDING


def short_help() -> str:
    """Return the help with the options that are used most."""
    common = describe([option for option in OPTIONS if option.common])
    return f"{USAGE}{common}\nThese are the options that are used most; ronde run --help prints all.\n"


def run(argv: Sequence[str]) -> int:
    """Do what the words after `ronde run` ask for and return the exit code. Raises UsageError."""
    words, _ = read(argv, OPTIONS)
    for option, text in {"--help": full_help, "-h": short_help, "--version": _version}.items():
        if option in words:
            print(text(), end="")
            return 0
    # Only now: help and mistakes in words are answered before anything else is loaded.
    from ronde.settings import environment

    variables = environment()
    if "--check-build" in words:
        from ronde.cli.check_build import check_build

        print(check_build(), end="")
        return 0
    return _launch(parse_arguments(argv, variables), variables)


def _launch(asked: RunArguments, variables: Mapping[str, str]) -> int:
    from ronde.cli.run_config import configure
    from ronde.cli.run_settings import idle_options
    from ronde.launch.command import find_command

    command = find_command(
        asked.name,
        asked.arguments,
        module=asked.has("--module"),
        no_python=asked.has("--no-python"),
        run_path=asked.has("--run-path"),
        search_path=variables.get("PATH"),
    )
    config = configure(asked, command, _here(asked, variables))
    for sentence in idle_options(asked):
        print(f"ronde: {sentence}", file=sys.stderr)
    if asked.value("--launcher") == "mpi":
        from ronde.launch import mpirun

        environment = {**variables, **config.worker.environment}
        if asked.has("--dry-run"):
            print(mpirun.plan_here(command, config.worker.slots, environment).describe(), end="")
            return 0
        return mpirun.run_here(command, config.worker.slots, environment)
    if asked.has("--dry-run"):
        from ronde.cli.run_plan import describe_launch

        print(describe_launch(config, variables), end="")
        return 0
    from ronde.launch.agent import run_agent

    return run_agent(config, variables).exit_code


def _here(asked: RunArguments, variables: Mapping[str, str]) -> Here:
    """Look at this machine, as far as the options ask for it."""
    from ronde.cli.run_config import Here
    from ronde.net.processes import usable_cores

    counts = {asked.value("--num-proc"), asked.value("--nproc-per-node")}
    gpus = 0
    if counts & {"gpu", "auto"}:
        from ronde.launch.gpus import usable_gpus

        gpus = usable_gpus(variables)
    return Here(variables, usable_cores(), gpus, _hostfile(asked.value("--hostfile")))


def _hostfile(path: str | None) -> str:
    if path is None:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the hostfile {path}: {getattr(error, 'strerror', 'it is not a text')}"
        ) from None


def _version() -> str:
    from ronde.cli import version

    return f"ronde {version()}\n"
