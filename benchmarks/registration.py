"""What the start of a job on a cluster costs its driver and each task, up to 10,000 tasks: see README.md.

    python benchmarks/registration.py --csv registration.csv --plot docs/registration.png

No process is started. The machines of the driver and of all tasks run here, with the messages that they encode: until
all tasks have registered, in random order, and every host knows the address by which others reach it. The driver's
processor time is measured.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tables import write_csv

from ronde.launch.config import LaunchConfig, WorkerSpec
from ronde.launch.driver.driver_messages import REGISTRATION, Assignment, Registration, hello
from ronde.launch.driver.ring import HostOffer, OfferedAddress, ProbeEdge, RingPlan, likely_first, plan_ring
from ronde.launch.driver.task_registry import (
    Accept,
    Begin,
    Refuse,
    Registry,
    Task,
    TaskRegistered,
    gpus_by_host,
)
from ronde.typed_json import TypedJson

FRAME_BYTES = 20  # of net/message_channel: length and tag
TASKS_PER_HOST = 4
REPEATED = 10  # one task in so many comes twice, as Spark starts slow ones once more
OFFER: TypedJson[HostOffer] = TypedJson(HostOffer, "offer")
VERDICT_BYTES = 64
ANSWER_BYTES = 32  # of the store, without a value
DRIVER = "the driver"


@dataclass(frozen=True)
class Row:
    """The costs of one start.

    Attributes:
        task_messages: Messages of the connection between driver and task, and of the task's agent to the store; most of
            any task.
        task_bytes: Their bytes, most of any task.
        probes: Addresses that an agent tries to connect to, most of any.
        driver_messages: All messages that the driver sends and receives, also as the store.
        driver_bytes: Their bytes.
        driver_ms: The processor time of its decisions and encodings.
    """

    tasks: int
    hosts: int
    task_messages: int
    task_bytes: int
    probes: int
    driver_messages: int
    driver_bytes: int
    driver_ms: float


class Start:
    """One start of a job with a driver and tasks, which counts what passes between them."""

    def __init__(self, tasks: int, per_host: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._registry = Registry(tasks)
        self._per_host = per_host
        self._messages: Counter[str | int] = Counter()  # by the id of a task's connection, and the driver's
        self._bytes: Counter[str | int] = Counter()
        self._probes: Counter[int] = Counter()
        self._driver_ns = 0
        self.begun: tuple[Task, ...] = ()

    def run(self) -> Row:
        """Run the start to its end."""
        slots = list(range(self._registry.slots))
        arriving = slots + [slot for slot in slots if slot % REPEATED == 0]
        self._chance.shuffle(arriving)
        for id, slot in enumerate(arriving):
            self._register(id, slot)
        self._assign()
        ids = [task.id for task in self.begun]
        return Row(
            tasks=len(slots),
            hosts=len({task.host_id for task in self.begun}),
            task_messages=max(self._messages[id] for id in ids),
            task_bytes=max(self._bytes[id] for id in ids),
            probes=max(self._probes[id] for id in ids),
            driver_messages=self._messages[DRIVER],
            driver_bytes=self._bytes[DRIVER],
            driver_ms=self._driver_ns / 1e6,
        )

    def _pass(self, id: int, *sizes: int) -> None:
        """Count messages between the driver and a task, or an agent that has come with it."""
        for end in (id, DRIVER):
            self._messages[end] += len(sizes)
            self._bytes[end] += sum(sizes) + len(sizes) * FRAME_BYTES

    def _register(self, id: int, slot: int) -> None:
        host = slot // self._per_host
        gpus = (str(slot % self._per_host),)
        told = REGISTRATION.encode(Registration(slot, 0, f"host-{host}", f"{host:032x}", gpus))
        self._pass(id, 1 + len(told))
        began_ns = time.process_time_ns()
        read = REGISTRATION.decode(told)
        task = Task(id, read.slot, read.attempt, read.host, read.host_id, read.gpus)
        effects = self._registry.step(TaskRegistered(task))
        self._driver_ns += time.process_time_ns() - began_ns
        for effect in effects:
            match effect:
                case Accept(accepted):
                    self._pass(accepted.id, 1, 1 + len(hello()))  # and the agent's greeting
                case Refuse(refused, reason):
                    self._pass(refused, 1 + len(reason.encode()))
                case Begin(tasks):
                    self.begun = tasks

    def _assign(self) -> None:
        """Let the driver decide on the ring and assign all agents, which then probe."""
        began_ns = time.process_time_ns()
        gpus = gpus_by_host(self.begun)
        plans = plan_ring([task.host_id for task in self.begun])
        lines = [
            assignment(plan, {"CUDA_VISIBLE_DEVICES": ",".join(gpus[task.host_id])})
            for task, plan in zip(self.begun, plans)
        ]
        self._driver_ns += time.process_time_ns() - began_ns
        for task, line, plan in zip(self.begun, lines, plans):
            self._pass(task.id, 1 + len(line))
            if plan is not None:
                self._probe_next(task, plan)

    def _probe_next(self, task: Task, plan: RingPlan) -> None:
        """Count what one agent tells the store and asks it, and the addresses of the next host that it tries."""
        if plan.probes:
            offered = offer(plan.next_host)
            edge = ProbeEdge(task.host, offered, 0)
            for index, each in enumerate(offered.addresses):
                self._probes[task.id] += 1
                edge.note_result(index, "" if each.interface == "eth0" else "connection refused", 1)
            assert edge.address.startswith("10.")
            text = len(OFFER.encode(offered))
            self._pass(task.id, text, ANSWER_BYTES, ANSWER_BYTES, text)  # its offer, and that of the next
            self._pass(task.id, VERDICT_BYTES, ANSWER_BYTES)  # its verdict
        self._pass(task.id, ANSWER_BYTES, VERDICT_BYTES)  # that of the host before it


def offer(host: int) -> HostOffer:
    """Return the offer of a host with a network and a bridge for containers."""
    mine = f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}"
    found = likely_first([("docker0", "172.17.0.1"), ("eth0", mine)], mine)
    return HostOffer(f"host-{host}", tuple(OfferedAddress(name, at, 40_000) for name, at in found))


def assignment(ring: RingPlan | None, environment: dict[str, str]) -> bytes:
    """Return the line that assigns an agent."""
    config = LaunchConfig(WorkerSpec(argv=(), environment=environment))
    stores = ("tcp:10.0.0.1:40000", "tcp:172.17.0.1:40000")
    return Assignment("task 0", "", stores, "", {}, True, ring, config).encode()


def plot(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Write a picture: messages, bytes and processor time over tasks."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    tasks = [row.tasks for row in rows]
    lines: dict[str, dict[str, list[float]]] = {
        "messages": {
            "the driver": [row.driver_messages for row in rows],
            "each task": [row.task_messages for row in rows],
        },
        "bytes": {
            "the driver": [row.driver_bytes for row in rows],
            "each task": [row.task_bytes for row in rows],
        },
        "milliseconds of processor time": {"the driver": [row.driver_ms for row in rows]},
    }
    for axis, (title, curves) in zip(axes, lines.items()):
        for label, values in curves.items():
            axis.loglog(tasks, values, marker="o", ms=4, lw=2, label=label)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("tasks")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the start of a job on a cluster costs.")
    parser.add_argument("--tasks", type=int, nargs="+", default=[2, 20, 200, 1000, 5000, 10_000])
    parser.add_argument("--per-host", type=int, default=TASKS_PER_HOST, help="tasks on each host")
    parser.add_argument("--csv", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    arguments = parser.parse_args()
    rows = []
    for tasks in arguments.tasks:
        row = Start(tasks, arguments.per_host, seed=tasks).run()
        rows.append(row)
        print(
            f"{row.tasks:6} tasks on {row.hosts:5} hosts  each: {row.task_messages:3} messages {row.task_bytes:6} bytes"
            f" {row.probes:2} probes  driver: {row.driver_messages:7} messages {row.driver_bytes:10} bytes"
            f" {row.driver_ms:9.1f} ms",
            flush=True,
        )
    if arguments.csv:
        write_csv(arguments.csv, Row, rows)
    if arguments.plot:
        plot(arguments.plot, rows)


if __name__ == "__main__":
    main()
