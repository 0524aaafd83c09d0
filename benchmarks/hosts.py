"""Measures collectives between two hosts beside iperf3 on the same link: Ronde, and Gloo.

    python benchmarks/hosts.py                     # as root: the hosts are network namespaces
    python benchmarks/hosts.py --rate 1gbit        # on a link of that rate
    python benchmarks/hosts.py --rate 1gbit --ranks-per-host 2 --ops allreduce allgather

benchmarks/README.md tells how to read the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator

from collectives import enough_calls
from groups import Group
from tables import format_bytes, parse_bytes

from ronde.bench.collective_traffic import OPERATIONS, JobShape, least_traffic
from ronde.testing import hosts

HOSTS = 2
ITEM_BYTES = 4  # float32
IPERF_S = 2
ONE_WAY = {"broadcast", "reduce", "gather", "scatter"}  # the other direction of a link is idle
CONTESTANTS = ["ronde-private", "gloo"]
# The same with tags on tensors, or encrypted.
PROTECTIONS = {"ronde-payload": "payload", "ronde-secret": "secret"}
SIZES = [1 << 20, 16 << 20, 64 << 20, 256 << 20]

# In bits per second, one for each case; "one" and "both" are iperf3.
MediansByContestant = dict[str, list[float]]


@contextlib.contextmanager
def iperf_server(two: hosts.Hosts) -> Iterator[None]:
    """Keep an iperf3 server on host 1."""
    command = [*two.command(1), "iperf3", "--server", "--forceflush"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if "listening" in line:
                break
        try:
            yield
        finally:
            server.terminate()


def iperf(two: hosts.Hosts, streams: int, both_ways: bool) -> float:
    """Return the bits per second of one direction: the slower one if both are busy at once."""
    client = ["iperf3", "--client", two.ipv4(1), "--time", str(IPERF_S), "--parallel", str(streams), "--json"]
    command = [*two.command(0), *client, *(["--bidir"] if both_ways else [])]
    end = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["end"]
    sums = ["sum_received", "sum_received_bidir_reverse"] if both_ways else ["sum_received"]
    return float(min(end[name]["bits_per_second"] for name in sums))


def link_rate(group: Group, operation: str, nbytes: int) -> float:
    """Bits per second in one direction, by the least that an algorithm must send over the busiest link."""
    group.ask("prepare", operation, nbytes // ITEM_BYTES)
    seconds = group.seconds_per_call(enough_calls(group))
    least = least_traffic(operation, JobShape(HOSTS, group.size // HOSTS), nbytes)
    return 8 * least.busiest_bytes / seconds


def measure(two: hosts.Hosts, options: argparse.Namespace, groups: dict[str, Group]) -> MediansByContestant:
    """Return the medians over all rounds. iperf3 and each contestant have one turn per round."""
    rates: dict[str, list[list[float]]] = {name: [] for name in ("one", "both", *groups)}
    for number in range(1, options.rounds + 1):
        print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
        rates["one"].append([iperf(two, options.streams, both_ways=False)])
        rates["both"].append([iperf(two, options.streams, both_ways=True)])
        for name, group in groups.items():
            rates[name].append([link_rate(group, *case) for case in cases(options)])
    return {name: [statistics.median(column) for column in zip(*rounds)] for name, rounds in rates.items()}


def cases(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the operations and sizes in the order in which they are measured."""
    return [(operation, nbytes) for operation in options.ops for nbytes in options.sizes]


def start(two: hosts.Hosts, contestant: str) -> Group:
    """Start the ranks of a contestant, those of each host in its namespace."""
    # Gloo needs a port, which is free because the hosts are new.
    environ = {"MASTER_ADDR": two.ipv4(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    if contestant in PROTECTIONS:
        environ["RONDE_PROTECTION"] = PROTECTIONS[contestant]
        contestant = "ronde-private"
    return Group(contestant, len(two.places()), two.places(), two.store_address(), environ)


def print_table(options: argparse.Namespace, medians: MediansByContestant) -> None:
    """Print the rates and their ratios to iperf3, which keeps as many directions busy as the operation does."""
    one, both = medians["one"][0], medians["both"][0]
    print(f"\niperf3, {options.streams} stream(s): one direction {one / 1e9:.2f} Gbit/s,", end=" ")
    print(f"both at once {both / 1e9:.2f} Gbit/s each")
    contestants = [name for name in medians if name not in ("one", "both")]
    print(
        f"\n{HOSTS} hosts with {options.ranks_per_host} ranks each, median of {options.rounds} rounds:",
        end=" ",
    )
    print("the least that must cross the busiest link, per second")
    heads = "".join(f"{name + ' Gbit/s':>24}{'/iperf3':>9}" for name in contestants)
    print(f"{'operation':>14}{'bytes':>9}{heads}")
    for index, (operation, nbytes) in enumerate(cases(options)):
        limit = one if operation in ONE_WAY else both
        rates = [medians[name][index] for name in contestants]
        cells = "".join(f"{rate / 1e9:24.2f}{rate / limit:9.2f}" for rate in rates)
        print(f"{operation:>14}{format_bytes(nbytes):>9}{cells}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", help="limit what each host sends, as tc reads it: 1gbit")
    parser.add_argument("--streams", type=int, default=1, help="connections of iperf3 (default: 1)")
    parser.add_argument(
        "--sizes", type=parse_bytes, nargs="+", default=SIZES, metavar="BYTES", help="such as 1MiB 64MiB"
    )
    parser.add_argument(
        "--ops", nargs="+", choices=OPERATIONS, default=["allreduce"], help="(default: allreduce)"
    )
    parser.add_argument("--ranks-per-host", type=int, default=1, help="(default: 1)")
    parser.add_argument("--contestants", nargs="+", choices=[*CONTESTANTS, *PROTECTIONS], default=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    options = parser.parse_args()
    if options.ranks_per_host < 1:
        parser.error(f"--ranks-per-host is at least 1, not {options.ranks_per_host}")
    if reason := hosts.require():
        parser.error(reason)
    if shutil.which("iperf3") is None:
        parser.error("there is no iperf3; its package is called so, too")
    return options


def main() -> None:
    options = parse_arguments()
    with contextlib.ExitStack() as stack:
        two = stack.enter_context(hosts.Hosts(HOSTS, options.ranks_per_host, options.rate))
        stack.enter_context(iperf_server(two))
        groups = {name: stack.enter_context(start(two, name)) for name in options.contestants}
        print_table(options, measure(two, options, groups))


if __name__ == "__main__":
    main()
