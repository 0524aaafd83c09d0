"""`horovod.runner.launch`: the program horovodrun, which is `ronde run --horovod`."""

from __future__ import annotations

import sys
from typing import NoReturn

from ronde.cli import main
from ronde.cli.check_build import check_build as describe_build

from .. import missing_from  # noqa: TID252 - type checkers do not know a package horovod

__all__ = ["check_build", "run_commandline"]


def run_commandline() -> int:
    """Run the command line of this process as `ronde run --horovod` does; return the exit code."""
    return main(["run", "--horovod", *sys.argv[1:]])


def check_build(verbose: bool = False) -> None:
    """Print which libraries are there, and end this program."""
    print(describe_build())
    sys.exit(0)


def __getattr__(name: str) -> NoReturn:
    raise missing_from("horovod.runner.launch", name)
