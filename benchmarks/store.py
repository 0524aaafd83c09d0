"""The TCP store against torch.distributed.TCPStore: operations per second and p99, and many idle connections.

    python benchmarks/store.py --csv store.csv

See README.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import resource
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from ronde.settings import JobKey
from ronde.stores import server as store_server
from ronde.stores.server import StoreServer
from ronde.stores.tcp import StoreClient

CASES = ("set", "set-seen", "get", "add", "compare_set", "wait")
CONTESTANTS = ("ronde", "ronde-tcp", "torch")
HOLDERS = 4  # processes for the idle connections
VALUE = b"v" * 16
MINUTE_NS = 60 * 10**9
Operation = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One result: the columns of the CSV file."""

    case: str
    clients: int
    contestant: str
    ops_per_s: float
    p99_us: float


# Servers and clients, each in a process that does what comes through its pipe


def serve(contestant: str, key: str, pipe: Connection) -> None:
    """Serve a store until the pipe ends; first send its address."""
    if contestant == "torch":
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
        pipe.send(str(store.port))
        wait_for_end(pipe)
        return
    server = StoreServer("tcp:127.0.0.1:0", JobKey.from_hex(key))
    pipe.send(server.address)
    wait_for_end(pipe)
    server.close()


def wait_for_end(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        pass


def work(contestant: str, address: str, key: str, name: str, pipe: Connection) -> None:
    """Be one client: for each (case, begin, end) that comes, on the monotonic clock, send its latencies (ns)."""
    if contestant == "ronde-tcp":
        take_the_long_way()
    client = connect_torch(address) if contestant == "torch" else connect_ronde(address, key)
    pipe.send(None)
    while True:
        try:
            case, begin, end = pipe.recv()
        except EOFError:
            return
        pipe.send(measure(operation(case, contestant, client, name), begin, end))


def connect_ronde(address: str, key: str) -> StoreClient:
    return StoreClient(address, JobKey.from_hex(key), MINUTE_NS)


def take_the_long_way() -> None:
    """Let clients take TCP even to a store on their own host, as those on others must."""
    store_server.WILDCARDS.clear()


def connect_torch(address: str) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(
        "127.0.0.1", int(address), is_master=False, wait_for_workers=False, timeout=timedelta(minutes=1)
    )


def operation(case: str, contestant: str, client: Any, name: str) -> Operation:
    """Return one call of the case, each client on keys of its own but for those that are only read."""
    client.set("there", VALUE)
    own = f"{case}/{name}"
    torch = contestant == "torch"

    def set_and_look() -> None:
        client.set(own, VALUE)
        client.check([own])

    calls: dict[str, Operation] = {
        "set": lambda: client.set(own, VALUE),
        "set-seen": set_and_look if torch else lambda: client.set(own, VALUE),
        "get": (lambda: client.get("there")) if torch else lambda: client.get("there", MINUTE_NS),
        "add": lambda: client.add(own, 1),
        "compare_set": (lambda: client.compare_set(own, "a", "b"))
        if torch
        else lambda: client.compare_set(own, b"a", b"b"),
        "wait": (lambda: client.wait(["there"])) if torch else lambda: client.wait(["there"], MINUTE_NS),
    }
    return calls[case]


def measure(call: Operation, begin: float, end: float) -> array[int]:
    """Call one after the other from begin to end; return the latencies (ns)."""
    latencies = array("q")
    clock = time.perf_counter_ns  # the monotonic clock of Linux, too
    time.sleep(max(0.0, begin - time.monotonic()))
    now, over = clock(), round(end * 1e9)
    while now < over:
        call()
        latencies.append(-now + (now := clock()))
    return latencies


def idle(address: str, key: str, count: int, pipe: Connection) -> None:
    """Hold connections that say nothing, until the pipe ends."""
    take_the_long_way()
    clients = [connect_ronde(address, key) for _ in range(count)]
    pipe.send(None)
    wait_for_end(pipe)
    for client in clients:
        client.close()


# The measurement


class Child:
    """A process and the pipe to it; it ends when that is closed. All are forked from one that has loaded everything."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def end(self) -> None:
        self.pipe.close()
        self._process.join()


class Crew:
    """All clients of one contestant, each a process."""

    def __init__(self, contestant: str, address: str, key: str, clients: int) -> None:
        self._children = [Child(work, contestant, address, key, str(number)) for number in range(clients)]
        for child in self._children:
            child.pipe.recv()

    def turn(self, case: str, seconds: float) -> tuple[float, float]:
        """Return operations per second and the p99 of their latencies (us)."""
        begin = time.monotonic() + 0.02 + 0.0005 * len(self._children)  # when all have heard of it
        for child in self._children:
            child.pipe.send((case, begin, begin + seconds))
        latencies = sorted(latency for child in self._children for latency in child.pipe.recv())
        return len(latencies) / seconds, latencies[int(0.99 * len(latencies))] / 1e3

    def end(self) -> None:
        for child in self._children:
            child.end()


def compare(addresses: dict[str, str], key: str, clients: int, arguments: argparse.Namespace) -> list[Row]:
    """Let the contestants take turns; return the medians over the rounds."""
    crews = {name: Crew(name, address, key, clients) for name, address in addresses.items()}
    rows = []
    for case in arguments.cases:
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in crews}
        for crew in crews.values():
            crew.turn(case, 0.1)  # to warm up
        for number in range(arguments.rounds):
            for name, crew in list(crews.items())[:: 1 if number % 2 else -1]:
                turns[name].append(crew.turn(case, arguments.seconds))
        for name, results in turns.items():
            speed, p99 = (statistics.median(each) for each in zip(*results))
            rows.append(Row(case, clients, name, round(speed), round(p99, 1)))
        print_case(rows[-len(crews) :])
    for crew in crews.values():
        crew.end()
    return rows


def print_case(rows: Sequence[Row]) -> None:
    rival = rows[-1] if rows[-1].contestant == "torch" else None
    print(f"{rows[0].case:<20} {rows[0].clients:>4} clients", end="")
    for row in rows:
        print(f"   {row.contestant:>9} {row.ops_per_s:>8,.0f}/s p99 {row.p99_us:>7,.0f} us", end="")
        if rival and row is not rival:
            print(f"  {row.ops_per_s / rival.ops_per_s:5.2f} {row.p99_us / rival.p99_us:5.2f}", end="")
    print(flush=True)


def with_idle(address: str, key: str, count: int, arguments: argparse.Namespace) -> list[Row]:
    """Measure one client's `get` alone, and beside idle connections; return both."""
    rows = []
    crew = Crew("ronde-tcp", address, key, 1)
    for others in (0, count):
        holders = [Child(idle, address, key, others // HOLDERS) for _ in range(HOLDERS if others else 0)]
        for holder in holders:
            holder.pipe.recv()
        speed, p99 = (
            statistics.median(each)
            for each in zip(*(crew.turn("get", arguments.seconds) for _ in range(arguments.rounds)))
        )
        rows.append(Row(f"get beside {others} idle", 1, "ronde-tcp", round(speed), round(p99, 1)))
        print_case(rows[-1:])
        for holder in holders:
            holder.end()
    crew.end()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 200])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one turn")
    parser.add_argument("--idle", type=int, default=5000, help="idle connections; 0 leaves that out")
    parser.add_argument("--csv", help="write the results here")
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    multiprocessing.set_forkserver_preload(
        ["__main__", *(["torch.distributed"] if "torch" in arguments.contestants else [])]
    )

    key = JobKey.generate().hex()
    servers = {name: Child(serve, name, key) for name in arguments.contestants}
    addresses = {name: server.pipe.recv() for name, server in servers.items()}
    rows: list[Row] = []
    for clients in arguments.clients:
        rows += compare(addresses, key, clients, arguments)
    if arguments.idle and "ronde-tcp" in addresses:
        rows += with_idle(addresses["ronde-tcp"], key, arguments.idle, arguments)
    for server in servers.values():
        server.end()
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(field.name for field in fields(Row))
            writer.writerows(astuple(row) for row in rows)


if __name__ == "__main__":
    main()
