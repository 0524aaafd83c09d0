"""`ronde doctor`: what holds this machine back, and what helps."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ronde.cli import show
from ronde.cli.machine_check import MachineFinding, check_machine
from ronde.cli.machine_facts import read_facts
from ronde.cli.options import Option, describe_options, parse_options
from ronde.environment import environment
from ronde.errors import UsageError
from ronde.settings import resolve

__all__ = ["HELP", "run"]

OPTIONS = (
    Option("output", ("--json",), "print the findings as a JSON list of objects: subject, text, remedy"),
    Option("information", ("-h", "--help"), "print this help"),
)

HELP = f"""\
usage: ronde doctor [--json]

Checks this machine for what slows ranks down or limits a job, and prints the remedy. It changes
nothing. For every host of a job:

    ronde run -H a,b --no-python ronde doctor

Whether hosts reach each other is checked at the start of every job, which names what fails.
{describe_options(OPTIONS)}"""


def run(argv: Sequence[str]) -> int:
    """Run the words after `ronde doctor` and return the exit code. Raises UsageError."""
    values, rest = parse_options(list(argv), OPTIONS)
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}: usage: ronde doctor [--json]")
    if "--help" in values:
        show(HELP)
        return 0
    findings = check_machine(read_facts(), resolve(environment()).tcp_streams)
    if "--json" in values:
        rows = [
            {"subject": each.subject, "text": each.text, "remedy": each.remedy or None} for each in findings
        ]
        show(json.dumps(rows, indent=2) + "\n")
    else:
        show("".join(_lines(each) for each in findings))
    return 0


def _lines(finding: MachineFinding) -> str:
    mark = "!" if finding.remedy else " "
    lines = f"{mark} {finding.subject + ':':<18}{finding.text}\n"
    return lines + (f"{'':20}-> {finding.remedy}\n" if finding.remedy else "")
