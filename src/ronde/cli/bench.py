"""`ronde bench`: measures collectives on one machine or several, and compares them with what the machines allow."""

from __future__ import annotations

from collections.abc import Sequence

from ronde.cli import run as run_verb
from ronde.cli import show
from ronde.cli.options import Option, describe_options, parse_options
from ronde.cli.run_arguments import OPTIONS as RUN_OPTIONS
from ronde.errors import UsageError
from ronde.values import ValueKind, between, seconds_from, size

__all__ = ["HELP", "run"]

SECOND = 10**9

OPTIONS = (
    Option("measurement", ("--json",), "print the results as JSON"),
    Option(
        "measurement",
        ("--seconds",),
        "approximate duration of the measurement (default: 10)",
        metavar="SECONDS",
        kind=seconds_from("a number of seconds from 0.1 to 600", SECOND // 10, 600 * SECOND),
    ),
    Option(
        "measurement",
        ("--largest",),
        "largest array of a rank (default: 64MiB)",
        metavar="SIZE",
        kind=ValueKind("a size from 64KiB to 1GiB, such as 4MiB", size, between(64 << 10, 1 << 30), "bytes"),
    ),
    Option("information", ("-h", "--help"), "print this help"),
)
# An option of these says how many ranks there are.
PLACES = ("--num-proc", "--nproc-per-node", "--nnodes", "--hosts", "--hostfile", "--host-discovery-script")

HELP = f"""\
usage: ronde bench [options] [options of ronde run]

Measures collectives between ranks for about ten seconds. Prints each time next to what memory and
links allow, as copies and messages of the same run show, and recommends settings that were faster.
Options of ronde run select the hosts and ranks (default: two ranks on this machine).

    ronde bench -n 4
    ronde bench -H node1:2,node2:2 --json
{describe_options(OPTIONS)}"""


def run(argv: Sequence[str]) -> int:
    """Run the words after `ronde bench` and return the exit code. Raises UsageError."""
    own = {name: option for option in OPTIONS for name in option.names}
    mine: list[str] = []
    others: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        option = own.get(word.partition("=")[0])
        (others if option is None else mine).append(word)
        if option is not None and option.metavar and "=" not in word and words:
            mine.append(words.pop(0))
    values, _ = parse_options(mine, OPTIONS)
    if "--help" in values:
        show(HELP)
        return 0
    given, rest = parse_options(others, RUN_OPTIONS)
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}: ronde bench takes options only, not a program")
    if not any(place in given for place in PLACES):
        others += ["--num-proc", "2"]
    program = ["--prefix", "", "--module", "ronde.bench"]
    program += ["--seconds", str(values.get("--seconds", 10 * SECOND) / SECOND)]
    program += ["--largest", str(values.get("--largest", 64 << 20))]
    return run_verb.run([*others, *program, *(["--json"] if "--json" in values else [])])
