"""Measures what agreeing on the next step costs rank 0, and how long it takes, up to 10,000 ranks: see README.md.

    python benchmarks/coordinator.py --csv coordinator.csv --plot docs/coordinator.png

It starts no processes. It runs the engine's code of a negotiation round (encode, decode, merge, decide) for every host
and measures its processor time; messages between hosts take the time of the `Network` below. In a step of hits only
notes travel, whose number follows from their size, and all time is that of the network.
"""

from __future__ import annotations

import argparse
import gc
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tables import write_csv

from ronde.engine.merging import (
    Batch,
    BatchReader,
    batch_of_outboxes,
    children_of,
    encode_batch,
    merge_batches,
    ranks_under,
)
from ronde.engine.messages import Request, decode_requests, encode_requests, encode_stream
from ronde.engine.negotiation import Coordinator
from ronde.types import DType, Kind

TENSORS = 160
RANKS_PER_HOST = 8
CAPACITY = 1024
NOTE_BYTES = 512  # of cpp/failures/watch.cc
SLOTS_PER_NOTE = 93  # of cpp/engine/leader.cc
SHAPES = ((64, 3, 7, 7), (64,), (256, 64, 1, 1), (512, 512, 3, 3), (2048,), (1000, 2048))
FLAT, LEADERS = "every rank to rank 0", "one leader per host to rank 0"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Network:
    """A message needs its sender and its receiver for `handling_us` each, is on its way for `latency_us`, and takes the
    receiver's connection for its bytes. 10 Gbit/s Ethernet within a rack."""

    latency_us: float = 25.0
    handling_us: float = 5.0
    bytes_per_us: float = 1250.0

    def receive_us(self, messages: int, nbytes: int) -> float:
        return messages * self.handling_us + nbytes / self.bytes_per_us


@dataclass(frozen=True)
class Row:
    """The cost of one step: messages and bytes of rank 0, its processor time, and the time until all ranks go on."""

    step: str
    design: str
    ranks: int
    messages: int
    bytes: int
    cpu_ms: float
    step_ms: float


def measured(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result, and the processor time in microseconds: the least of several times if it is short."""
    best = math.inf
    spent = 0.0
    while spent < 20_000 or best == math.inf:
        gc.collect()
        begin = time.process_time_ns()
        result = work()
        took = (time.process_time_ns() - begin) / 1000
        best, spent = min(best, took), spent + max(took, 5_000)
    return result, best


def requests() -> list[Request]:
    """What every rank requests in the first step: the gradients of a model."""
    return [
        Request(
            Kind.allreduce,
            f"DistributedOptimizer.layer{i // 20}.{i % 20}.weight",
            DType.float32,
            SHAPES[i % 6],
        )
        for i in range(TENSORS)
    ]


def share_us(network: Network, nbytes: int, hosts: int) -> float:
    """A broadcast from rank 0 to all hosts along a binomial tree, which every design uses."""
    each = network.receive_us(2, nbytes) + network.latency_us
    return math.ceil(math.log2(hosts)) * each if hosts > 1 else 0.0


def first_step_flat(network: Network, ranks: int) -> Row:
    """Rank 0 reads the requests of every rank."""
    hosts = max(ranks // RANKS_PER_HOST, 1)
    text = encode_requests(requests())

    def decide() -> bytes:
        coordinator = Coordinator(ranks, CAPACITY)
        return encode_stream(coordinator.step([decode_requests(text) for _ in range(ranks)]))

    stream, cpu_us = measured(decide)
    sends = math.ceil(math.log2(hosts)) if hosts > 1 else 0
    arriving = network.receive_us(ranks - 1, (ranks - 1) * len(text))
    step_us = network.latency_us + arriving + cpu_us + share_us(network, len(stream), hosts)
    nbytes = (ranks - 1) * len(text) + sends * len(stream)
    return Row("first", FLAT, ranks, ranks - 1 + sends, nbytes, cpu_us / 1000, step_us / 1000)


def first_step_tree(network: Network, ranks: int, arity: int, design: str) -> Row:
    """Every leader merges the requests of its ranks and children; the time includes all waiting."""
    hosts = max(ranks // RANKS_PER_HOST, 1)
    local = min(ranks, RANKS_PER_HOST)
    ranks_of_host = [list(range(host * local, (host + 1) * local)) for host in range(hosts)]
    text = encode_requests(requests())
    texts: list[bytes] = [b""] * hosts  # by host: the message to its parent, and its time of departure
    sent_us = [0.0] * hosts
    for host in reversed(range(hosts)):
        under = children_of(host, hosts, arity)
        arrives = max((sent_us[child] + network.latency_us for child in under), default=0.0)
        arrives += network.receive_us(len(under), sum(len(texts[child]) for child in under))
        arrives += network.receive_us(local - 1, (local - 1) * len(text))

        def read(host: int = host, under: range = under) -> list[Batch]:
            reader = BatchReader()
            own = batch_of_outboxes(dict.fromkeys(ranks_of_host[host], text))
            return [own] + [
                reader.read(texts[child], ranks_under(child, ranks_of_host, arity)) for child in under
            ]

        def pass_on(read: Callable[[], list[Batch]] = read) -> bytes:
            return encode_batch(merge_batches(read()))

        def decide(read: Callable[[], list[Batch]] = read) -> bytes:
            return encode_stream(Coordinator(hosts * local, CAPACITY).step_merged(read()))

        texts[host], cpu_us = measured(pass_on if host > 0 else decide)
        sent_us[host] = arrives + cpu_us + network.handling_us
    stream = texts[0]
    sends = math.ceil(math.log2(hosts)) if hosts > 1 else 0
    step_us = sent_us[0] + share_us(network, len(stream), hosts)
    nbytes = (local - 1) * len(text) + sum(len(texts[child]) for child in under) + sends * len(stream)
    messages = local - 1 + len(under) + sends
    return Row("first", design, hosts * local, messages, nbytes, cpu_us / 1000, step_us / 1000)


def steady_step(network: Network, ranks: int, senders: int, arity: int, design: str) -> Row:
    """Notes go up the tree of `senders` and entries down; ranks of one host use shared memory."""
    notes = -(-TENSORS // SLOTS_PER_NOTE)
    sent_us = [0.0] * senders
    for node in reversed(range(senders)):
        under = children_of(node, senders, arity)
        arrives = max((sent_us[child] + network.latency_us for child in under), default=0.0)
        sent_us[node] = arrives + network.receive_us(len(under) * notes, len(under) * notes * NOTE_BYTES)
        sent_us[node] += notes * network.handling_us if node > 0 else 0.0
    knows_us = [0.0] * senders
    knows_us[0] = sent_us[0]
    for node in range(senders):
        for place, child in enumerate(children_of(node, senders, arity)):
            passed_on = knows_us[node] + (place + 1) * notes * network.handling_us
            knows_us[child] = passed_on + network.latency_us + network.receive_us(notes, notes * NOTE_BYTES)
    messages = 2 * notes * len(children_of(0, senders, arity))
    cpu_ms = messages * network.handling_us / 1000
    return Row("steady", design, ranks, messages, messages * NOTE_BYTES, cpu_ms, max(knows_us) / 1000)


def measure(sizes: Sequence[int], arities: Sequence[int]) -> list[Row]:
    network = Network()
    rows = []
    for ranks in sizes:
        hosts = max(ranks // RANKS_PER_HOST, 1)
        designs = [(LEADERS, hosts), *((f"tree of leaders, {arity} under each", arity) for arity in arities)]
        rows.append(first_step_flat(network, ranks))
        rows += [first_step_tree(network, ranks, arity, design) for design, arity in designs]
        rows.append(steady_step(network, ranks, ranks, ranks, FLAT))
        rows += [steady_step(network, ranks, hosts, arity, design) for design, arity in designs]
        for row in rows[-2 * len(designs) - 2 :]:
            print(
                f"{row.step:6}  {row.ranks:6} ranks  {row.design:32} {row.messages:6} messages {row.bytes:10} bytes"
                f"  {row.cpu_ms:10.2f} ms of rank 0  {row.step_ms:10.2f} ms",
                flush=True,
            )
    return rows


def plot(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Write a picture: messages, bytes and time over ranks, of the first step and of a step of hits."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6.6), layout="constrained", sharex=True)
    titles = {
        "first": f"first step: {TENSORS} new tensors",
        "steady": f"every later step: {TENSORS} cached tensors",
    }
    panels: dict[str, Callable[[Row], float]] = {
        "messages at rank 0": lambda row: row.messages,
        "bytes at rank 0": lambda row: row.bytes,
        "milliseconds until all know what to run": lambda row: row.step_ms,
    }
    designs = list(dict.fromkeys(row.design for row in rows))
    styles = {
        design: ("#b03a2e", "#7f8c8d", "#1f5fa8", "#5fa8d3", "#9b59b6")[i % 5]
        for i, design in enumerate(designs)
    }
    for line, step in zip(axes, titles):
        for axis, (what, value) in zip(line, panels.items()):
            for design in designs:
                points = [(row.ranks, value(row)) for row in rows if (row.step, row.design) == (step, design)]
                points = [point for point in points if point[1] > 0]
                axis.loglog(*zip(*points), color=styles[design], marker="o", ms=4, lw=2, label=design)
            axis.set_title(f"{titles[step]}\n{what}", fontsize=10, loc="left")
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[1]:
        axis.set_xlabel(f"ranks, {RANKS_PER_HOST} on each host")
        axis.xaxis.set_major_formatter(lambda ranks, _: f"{ranks:,.0f}")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="What agreeing costs rank 0, by number of ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 512, 2000, 10_000])
    parser.add_argument("--arity", type=int, nargs="+", default=[8], help="of the trees to compare")
    parser.add_argument("--csv", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    arguments = parser.parse_args()
    rows = measure(arguments.ranks, arguments.arity)
    if arguments.csv:
        write_csv(arguments.csv, Row, rows)
    if arguments.plot:
        plot(arguments.plot, rows)


if __name__ == "__main__":
    main()
