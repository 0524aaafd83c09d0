"""How soon a job trains again after a loss: in place, and started again. See benchmarks/README.md.

python benchmarks/recovery.py --ranks 2 4 8 --csv recovery.csv
python benchmarks/recovery.py --cases goodput --duration 600
"""

from __future__ import annotations

import argparse
import pathlib
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from case_tables import print_load, write_cases
from recovery_jobs import (
    Command,
    NotRecovered,
    Recovery,
    lose_again_and_again,
    lose_host,
    lose_node,
    lose_worker,
)

from ronde.testing import hosts

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without which torchrun seldom recovers
PARAMETERS = 100_000_000
COLUMNS = "ranks,fault,contestant,median_ms"
SMALLER, SPARE, FRESH = "worker killed: smaller", "worker killed: spare", "worker killed: fresh process"
CASES = ("workers", "parameters", "nodes", "hosts", "goodput")
RIVAL = "torchrun"
CONTESTANTS = ("ronde-in-place", "ronde-restart", "gloo-reconfigure", RIVAL)


class Row(NamedTuple):
    """A line of the CSV file."""

    ranks: int
    fault: str
    contestant: str
    median_ms: float


class Contest(NamedTuple):
    """One contestant and one fault: how it is measured once, and how often."""

    fault: str
    contestant: str
    measure: Callable[[], Recovery]
    rounds: int


def run_contests(ranks: int, contests: Sequence[Contest]) -> list[Row]:
    """Measure all that have rounds, in turns, and print a line for each."""
    contests = [contest for contest in contests if contest.rounds]
    taken: dict[Contest, list[Recovery]] = {contest: [] for contest in contests}
    problems: dict[Contest, str] = {}
    for turn in range(max((contest.rounds for contest in contests), default=0)):
        for contest in contests:
            if turn < contest.rounds:
                try:
                    taken[contest].append(contest.measure())
                except NotRecovered as problem:
                    problems[contest] = str(problem)
    medians = {
        contest: statistics.median(each.total_ms for each in times)
        for contest, times in taken.items()
        if times
    }
    rival = next((value for contest, value in medians.items() if contest.contestant == RIVAL), float("nan"))
    print(
        f"{'fault':<30}{'contestant':<18}{'recovered':>12}{'median ms':>12}{'/' + RIVAL:>12}{'imports ms':>12}"
    )
    for contest in contests:
        times = taken[contest]
        median = medians.get(contest, float("nan"))
        imports = statistics.median(each.imports_ms for each in times) if times else float("nan")
        print(
            f"{contest.fault:<30}{contest.contestant:<18}{f'{len(times)} of {contest.rounds}':>12}"
            f"{median:12,.1f}{median / rival:12.4f}{imports:12,.1f}",
            flush=True,
        )
        if contest in problems:
            print(f"    not recovered: {problems[contest]}", flush=True)
    return [Row(ranks, contest.fault, contest.contestant, median) for contest, median in medians.items()]


def ronde(ranks: int, *options: str) -> tuple[str, ...]:
    """Return the words of our launcher."""
    return ("-m", "ronde", "run", "-n", str(ranks), "--max-restarts", "1000", *options)


def torchrun(ranks: int) -> tuple[str, ...]:
    """Return the words of PyTorch's launcher."""
    return ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3")


def reconfigure(ranks: int, arguments: argparse.Namespace, more: tuple[str, ...]) -> Command:
    """Return a program without a launcher, on a new port."""
    places = {"MASTER_PORT": str(_free_port())}
    return Command((), ("reconfigure", *more), places, arguments.gloo_python, ranks)


def measure_workers(ranks: int, arguments: argparse.Namespace, more: tuple[str, ...] = ()) -> list[Row]:
    """Kill a worker again and again, in turns under each contestant."""
    in_place = ("in-place", *more)
    smaller = Command(ronde(ranks, "--min-np", str(ranks - 1)), in_place)
    spare = Command(ronde(ranks, "--spares", "1"), in_place)
    fresh = Command(ronde(ranks), in_place)
    again = Command(ronde(ranks), ("restart", *more))
    theirs = Command(torchrun(ranks), ("gloo", *more), OWN_STORE)
    rounds, torchrun_rounds = arguments.rounds, arguments.torchrun_rounds
    contests = [
        Contest(SMALLER, "ronde-in-place", lambda: lose_worker(smaller, ranks, ranks - 1), rounds),
        Contest(
            SMALLER,
            "gloo-reconfigure",
            lambda: lose_worker(reconfigure(ranks, arguments, more), ranks, ranks - 1),
            rounds if reconfigures(arguments.gloo_python) else 0,
        ),
        Contest(SPARE, "ronde-in-place", lambda: lose_worker(spare, ranks, ranks), rounds),
        Contest(FRESH, "ronde-in-place", lambda: lose_worker(fresh, ranks, ranks), rounds),
        Contest(FRESH, "ronde-restart", lambda: lose_worker(again, ranks, ranks), rounds),
        Contest(FRESH, RIVAL, lambda: lose_worker(theirs, ranks, ranks), torchrun_rounds),
    ]
    chosen = [each for each in contests if each.contestant in arguments.contestants]
    return run_contests(ranks, chosen)


def measure_parameters(ranks: int, arguments: argparse.Namespace) -> list[Row]:
    """The same with parameters and a loader; the faults' names say so."""
    more = ("--elements", str(arguments.parameters), "--commit-every", "20")
    few = argparse.Namespace(**{**vars(arguments), "rounds": arguments.parameter_rounds})
    few.torchrun_rounds = min(arguments.torchrun_rounds, arguments.parameter_rounds)
    return [
        row._replace(fault=f"{row.fault}, {arguments.parameters} parameters")
        for row in measure_workers(ranks, few, more)
    ]


def nodes(launcher: Sequence[str], kind: str, address: str, per_node: int) -> list[Command]:
    """Return the commands of two agents, the first of which serves the rendezvous at an address."""
    commands = []
    for index in range(2):
        serves = f"--rdzv-conf=is_host={str(index == 0).lower()}"
        meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=recovery", serves)
        words = (*launcher, "--nnodes=1:2", f"--nproc-per-node={per_node}", "--max-restarts=3", *meeting)
        commands.append(Command(words, (kind,)))
    return commands


def measure_nodes(arguments: argparse.Namespace) -> list[Row]:
    """Kill one of two agents with its worker, and bring it back."""
    rows = []
    print(f"{'fault':<30}{'contestant':<18}{'recovered':>12}{'median ms':>12}")
    for name, launcher, kind, most in (
        ("ronde-in-place", ["-m", "ronde", "run"], "in-place", arguments.node_rounds),
        ("ronde-restart", ["-m", "ronde", "run"], "restart", arguments.node_rounds),
        ("torchrun", ["-m", "torch.distributed.run"], "gloo", arguments.torchrun_node_rounds),
    ):
        times = []
        for _ in range(most):
            try:
                times.append(lose_node(nodes(launcher, kind, f"127.0.0.1:{_free_port()}", 1)))
            except NotRecovered as problem:
                print(f"{name:<18} not recovered: {problem}", flush=True)
        for fault, column in zip(("node killed", "node back"), zip(*times)):
            median = statistics.median(each.total_ms for each in column)
            print(f"{fault:<30}{name:<18}{f'{len(times)} of {most}':>12}{median:12,.1f}", flush=True)
            rows.append(Row(2, fault, name, median))
    return rows


def measure_hosts(ranks: int, arguments: argparse.Namespace) -> list[Row]:
    """Cut the link of one of two hosts, for which this must be root. The fault's name has the time limit."""
    if reason := hosts.require():
        print(f"skipped hosts: {reason}")
        return []
    limit = f"{arguments.heartbeat_timeout:g}"
    launcher = ["-m", "ronde", "run", "--heartbeat-timeout", limit]
    fault = f"host cut off, time limit {limit} s"
    with hosts.Hosts(2) as two:
        contests = [
            Contest(
                fault,
                name,
                lambda kind=kind: lose_host(  # type: ignore[misc]
                    two,
                    nodes(launcher, kind, f"{two.ipv4(0)}:{_free_port()}", ranks // 2),
                    ranks,
                ),
                arguments.host_rounds,
            )
            for name, kind in (("ronde-in-place", "in-place"), ("ronde-restart", "restart"))
        ]
        return run_contests(ranks, contests)


def measure_goodput(ranks: int, arguments: argparse.Namespace) -> list[Row]:
    """Kill a worker every so many seconds, with steps of 100 ms."""
    for name, options in (("spare", ("--spares", "1")), ("smaller", ("--min-np", str(ranks - 1)))):
        command = Command(ronde(ranks, *options), ("in-place", "--step", "0.1"))
        try:
            goodput = lose_again_and_again(command, ranks, arguments.every, arguments.duration)
        except NotRecovered as problem:
            print(f"goodput, {name}: not recovered: {problem}", flush=True)
            continue
        print(
            f"goodput of {ranks} ranks ({name}): {goodput.share:.2%} of {goodput.elapsed_s:.0f} s"
            f" in {goodput.steps} steps of {goodput.step_s * 1e3:.1f} ms, {goodput.losses} losses",
            flush=True,
        )
    return []


def reconfigures(python: str) -> bool:
    """Return whether this interpreter's PyTorch has process groups that go on after a loss."""
    test = "import sys, torch.distributed as dist; sys.exit(not hasattr(dist, '_reconfigure'))"
    return subprocess.run([python, "-c", test], check=False).returncode == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--contestants", nargs="*", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--torchrun-rounds", type=int, default=4)
    parser.add_argument("--gloo-python", default=sys.executable, help="with PyTorch 2.14 or later")
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--parameter-rounds", type=int, default=3)
    parser.add_argument("--node-rounds", type=int, default=5)
    parser.add_argument("--torchrun-node-rounds", type=int, default=0, help="each takes a minute or two")
    parser.add_argument("--host-rounds", type=int, default=3)
    parser.add_argument("--heartbeat-timeout", type=float, default=1.0, help="of a silent host, in seconds")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between losses, for goodput")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds, for goodput")
    parser.add_argument("--csv", type=pathlib.Path)
    return parser.parse_args()


def main() -> None:
    """Measure what the command line asks for."""
    arguments = parse_arguments()
    print_load()
    rows: list[Row] = []
    for ranks in arguments.ranks:
        for case, measure in (
            ("workers", measure_workers),
            ("parameters", measure_parameters),
            ("hosts", measure_hosts),
            ("goodput", measure_goodput),
        ):
            if case in arguments.cases:
                print(f"\n{case}, {ranks} ranks")
                rows += measure(ranks, arguments)
    if "nodes" in arguments.cases:
        print("\nnodes")
        rows += measure_nodes(arguments)
    if arguments.csv:
        write_cases(arguments.csv, COLUMNS, rows)


if __name__ == "__main__":
    main()
