"""`ronde run`: start a program in several processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ronde.cli.options import Option, describe, parse
from ronde.errors import UsageError

__all__ = ["HELP", "RunArguments", "parse_arguments", "run"]

AUTO = "auto"


def _count(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError(text)
    return int(text)


def _launcher(text: str) -> str:
    if text not in ("local", "mpi"):
        raise ValueError(text)
    return text


OPTIONS = (
    Option(
        "workers",
        ("-n", "-np", "--num-proc", "--nproc-per-node"),
        "how many workers to start; auto: one for every usable core (default: 1)",
        metavar="N",
        parse=_count,
        right="a whole number above 0, or auto",
    ),
    Option(
        "workers",
        ("--launcher",),
        "who starts them: local, or mpi for the mpirun beside this Python or in PATH (default: local)",
        metavar="WHO",
        parse=_launcher,
        right="local or mpi",
    ),
    Option("what to run", ("-m", "--module"), "the name is that of a Python module, as in python -m"),
    Option("what to run", ("--no-python",), "run the file itself, even if it ends in .py"),
    Option(
        "what to run",
        ("--horovod",),
        "import horovod.torch is answered by Ronde, so that scripts for Horovod run unchanged",
    ),
    Option(
        "tuning",
        ("--autotune",),
        "find out during the run which settings of the engine are best, and print them (docs/tuning.md)",
    ),
    Option(
        "tuning",
        ("--autotune-log",),
        "write what was tried, and how fast it was, into this CSV file; implies --autotune",
        metavar="FILE",
        right="the path of a file",
    ),
    Option("information", ("--dry-run",), "print what would be started, and start nothing"),
    Option("information", ("-h", "--help"), "print this help"),
)

HELP = f"""\
usage: ronde run [options] [--] script.py [arguments]
       ronde run [options] -m module [arguments]
       ronde run [options] program [arguments]

Starts a program in several processes on this machine and tells each its rank. Lines of output are
preceded by [rank]. If one process fails the others are ended, and its last words are shown last;
Ctrl-C ends all of them. The exit code is that of the first process that failed.

    ronde run -n 4 train.py --epochs 3
{describe(OPTIONS)}
Options end at the script: what follows it is passed on as it is. Names may be written with
underscores (--nproc_per_node). Workers find torchrun's variables in their environment: RANK,
LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and so on.
"""


@dataclass(frozen=True)
class RunArguments:
    """What the user asked for; `workers` is None for one on every usable core."""

    name: str
    arguments: tuple[str, ...] = ()
    workers: int | None = 1
    module: bool = False
    no_python: bool = False
    horovod: bool = False
    autotune: bool = False
    autotune_log: str | None = None
    dry_run: bool = False
    launcher: str = "local"


def parse_arguments(argv: Sequence[str]) -> RunArguments | None:
    """Return what is asked for by the words after `ronde run`; None if that is help. Raises UsageError."""
    values, rest = parse(argv, OPTIONS)
    if "--help" in values:
        return None
    module, no_python = "--module" in values, "--no-python" in values
    if module and no_python:
        raise UsageError("--module and --no-python contradict each other: a module can only be run by Python")
    if not rest:
        wanted = "module" if module else "script"
        raise UsageError(f"no {wanted} to run was given, as in: ronde run -n 4 train.py")
    count = values.get("--nproc-per-node", 1)
    log = values.get("--autotune-log")
    return RunArguments(
        name=rest[0],
        arguments=tuple(rest[1:]),
        workers=count if isinstance(count, int) else None,
        module=module,
        no_python=no_python,
        horovod="--horovod" in values,
        autotune="--autotune" in values or log is not None,
        autotune_log=None if log is None else str(log),
        dry_run="--dry-run" in values,
        launcher=str(values.get("--launcher", "local")),
    )


def run(argv: Sequence[str]) -> int:
    """Do what the words after `ronde run` ask for and return the exit code. Raises UsageError."""
    arguments = parse_arguments(argv)
    if arguments is None:
        print(HELP, end="")
        return 0
    # Only now: help and mistakes are answered before the launcher is loaded.
    from ronde.launch.command import find_command
    from ronde.net.processes import usable_cores
    from ronde.settings import environment

    variables = environment()
    command = find_command(
        arguments.name,
        arguments.arguments,
        module=arguments.module,
        no_python=arguments.no_python,
        search_path=variables.get("PATH"),
    )
    workers = arguments.workers or usable_cores()
    more = _tuning(arguments) | (_horovod(variables) if arguments.horovod else {})
    if arguments.launcher == "mpi":
        from ronde.launch import mpirun

        variables = {**variables, **more}
        if arguments.dry_run:
            print(mpirun.plan_here(command, workers, variables).describe(), end="")
            return 0
        return mpirun.run_here(command, workers, variables)
    from ronde.launch.agent import plan_here, run_agent
    from ronde.launch.config import LaunchConfig, WorkerSpec

    config = LaunchConfig(WorkerSpec(tuple(command), workers, environment=more))
    if arguments.dry_run:
        print(plan_here(config, variables).describe(), end="")
        return 0
    return run_agent(config, variables).exit_code


def _tuning(arguments: RunArguments) -> dict[str, str]:
    """Return the settings of workers that tune themselves; a relative path is one from here."""
    more = {"RONDE_AUTOTUNE": "1"} if arguments.autotune else {}
    if arguments.autotune_log is not None:
        more["RONDE_AUTOTUNE_LOG"] = os.path.abspath(arguments.autotune_log)
    return more


def _horovod(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what lets Ronde answer for Horovod in a worker, and in whatever a worker starts."""
    from ronde.compat import PACKAGES

    folders = [PACKAGES, *filter(None, [variables.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(folders)}
