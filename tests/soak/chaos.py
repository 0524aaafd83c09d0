"""One training on digits under a schedule of faults, by seeds; it must come to the bits of an undisturbed one.

    python -m tests.soak.chaos --seed 7                       # a few faults; its folder stays if it fails
    python -m tests.soak.chaos --seed 1 --faults 100 --report chaos.json --plot chaos.png
    python -m tests.soak.chaos --seed 3 --seeds 20 --nodes 2

A seed determines training and schedule. A fault strikes ranks in a step, at a moment of it or in the recovery that
follows, so a seed replays its schedule. chaos_training.py is the worker, chaos_account.py has the checks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.soak import chaos_account as account
from tests.soak.chaos_training import Fault, Training, batch_of, read_job, write_job
from tests.soak.job import MARK, marked, send

WORKER = str(Path(__file__).with_name("chaos_training.py"))
ROOT = str(Path(__file__).parents[2])
HELD_OUT = 360
LOOK_S = 0.01
LOG_END = 6000  # characters of a log that matter
RESTART_AGENT_S = 0.5  # after which a killed agent is started again
MOMENTS = ("before", "during", "during", "after", "save", "restore", "sync")


@dataclass(frozen=True)
class Shape:
    """The job: its workers on each node, how few may go on, and its spares."""

    workers: int = 3
    least: int = 1
    spares: int = 0
    nodes: int = 1

    @staticmethod
    def draw(rng: random.Random, nodes: int) -> Shape:
        workers = rng.choice((2, 3, 3, 4))
        return Shape(workers, rng.choice((1, workers - 1)), rng.choice((0, 0, 1)), nodes)


def draw_faults(rng: random.Random, count: int, shape: Shape) -> tuple[list[Fault], int]:
    """Return a schedule, and the number of steps of the training."""
    faults: list[Fault] = []
    step = 3
    most = shape.workers * shape.nodes
    while len(faults) < count:
        step += rng.choice((1, 2, 5, 10, 20, 40))
        kinds = ("kill",) * 6 + ("stop",) * 2 + ("exit", "raise") + ("kill agent",) * 2 * (shape.nodes > 1)
        kind = rng.choice(kinds)
        ranks = tuple(sorted(rng.sample(range(most), 2 if most > 2 and rng.random() < 0.2 else 1)))
        moment = rng.choice(MOMENTS)
        if kind == "kill agent":
            ranks, moment = (most - 1,), "before"
        elif kind == "stop":
            ranks, moment = ranks[:1], "before"
        elif kind != "kill" and moment == "during":
            moment = "before"
        if moment in ("restore", "sync"):  # in the recovery from another one
            faults.append(Fault(step, "kill", "before", ((ranks[0] + 1) % most,)))
        faults.append(Fault(step, kind, moment, ranks, rng.choice((0.0, 0.0005, 0.002, 0.3))))
    if shape.nodes > 1:  # waits until a killed node is back: one that comes after the end begins the next job
        faults = [*faults[: count - 1], Fault(step + 15, "stop", "before", (most - 1,), 0.1)]
    return faults[:count], step + 30


@dataclass
class Agent:
    """A `ronde run` of the job."""

    name: str
    node: int
    process: subprocess.Popen[bytes]
    log: Path
    was_killed: float = 0.0
    was_ended: bool = False


@dataclass
class Chaos:
    """One run in a folder."""

    folder: Path
    shape: Shape
    limit_s: float
    agents: list[Agent] = field(default_factory=list)
    stopped: dict[int, float] = field(default_factory=dict)  # process -> when it goes on
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.mark = f"chaos.{os.getpid()}.{self.folder.name}"

    def start_agent(self, node: int) -> None:
        """Start the agent of a node."""
        shape, name = self.shape, f"agent{len(self.agents)}"
        words = ["--max-restarts", "10000", "-n", str(shape.workers)]
        if shape.nodes > 1:
            # In a file, which outlives each agent: one that comes back finds the job, also when that has ended.
            meeting = ["--rdzv-backend", "file", "--rdzv-endpoint", str(self.folder / "meeting")]
            meeting += ["--rdzv-conf", "keep_alive_interval=1,last_call_timeout=1"]
            words += ["--nnodes", f"1:{shape.nodes}", *meeting, "--rdzv-id", "chaos"]
        else:
            words += [
                "--min-np",
                str(shape.least),
                *(("--spares", str(shape.spares)) if shape.spares else ()),
            ]
        log = self.folder / f"{name}.log"
        own = {"CHAOS_AGENT": name, MARK: self.mark, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ROOT}
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "ronde", "run", *words, WORKER, str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own},
                start_new_session=True,
            )
        self.agents.append(Agent(name, node, process, log))

    def run(self) -> list[str]:
        """Run the job until it ends. Returns what was wrong with that."""
        _, faults = read_job(self.folder)
        for node in range(self.shape.nodes):
            self.start_agent(node)
        deadline = time.monotonic() + self.limit_s
        while any(agent.process.poll() is None for agent in self.agents):
            if time.monotonic() > deadline:
                return [f"the job has not ended after {self.limit_s:g} s"]
            self.perform(faults)
            self.restart_killed()
            time.sleep(LOOK_S)
        codes = {agent.name: agent.process.returncode for agent in self.agents if not agent.was_ended}
        return [
            f"{name} has ended with exit code {code}"
            for name, code in codes.items()
            if code not in (0, -signal.SIGKILL)
        ]

    def perform(self, faults: Sequence[Fault]) -> None:
        """Do the part of faults that a process cannot do: let it go on after a stop, kill its agent."""
        now = time.monotonic()
        for path in (self.folder / "faults").glob("*.*"):
            fault = faults[int(path.name.partition(".")[0])]
            if path.name in self.seen or not (words := path.read_text().split()):
                continue
            self.seen.add(path.name)
            if fault.kind == "stop":
                self.stopped[int(words[0])] = now + max(0.1, fault.seconds)
            if fault.kind in ("kill agent", "end agent"):
                agent = next(agent for agent in self.agents if agent.name == words[1])
                agent.process.send_signal(signal.SIGKILL if fault.kind == "kill agent" else signal.SIGTERM)
                agent.was_ended = fault.kind == "end agent"
        for pid, until in list(self.stopped.items()):
            if now > until:
                send(pid, signal.SIGCONT)
                if now > until + 1:  # it may have stopped after the first signal
                    del self.stopped[pid]

    def restart_killed(self) -> None:
        """Start an agent again that a fault has killed."""
        now = time.monotonic()
        for agent in list(self.agents):
            if agent.process.poll() == -signal.SIGKILL:
                if not agent.was_killed:
                    agent.was_killed = now
                elif 0 < agent.was_killed < now - RESTART_AGENT_S:
                    agent.was_killed = float("inf")
                    self.start_agent(agent.node)

    def close(self) -> None:
        """Leave nothing, whatever has gone wrong."""
        for agent in self.agents:
            agent.process.kill()
            agent.process.wait()
        for seen in marked(self.mark):
            send(seen.pid, signal.SIGKILL)

    def facts(self) -> dict[int, list[dict[str, Any]]]:
        """Return the facts of each process."""
        return {int(path.name): read_facts(path) for path in (self.folder / "facts").glob("*")}

    def story(self) -> str:
        """Return the logs of the agents."""
        logs = {agent.name: agent.log.read_text(errors="replace")[-LOG_END:] for agent in self.agents}
        return "\n".join(f"--- {name}\n{text}" for name, text in logs.items())


def read_facts(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of facts."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def prepare(folder: Path) -> None:
    """Write the digits, split into training and test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = digits.data[order] / 16.0 - 0.3, digits.target[order]
    np.savez(
        folder / "digits.npz",
        images=images[HELD_OUT:], labels=labels[HELD_OUT:],
        test_images=images[:HELD_OUT], test_labels=labels[:HELD_OUT],
    )  # fmt: skip


def undisturbed(folder: Path) -> list[dict[str, Any]]:
    """Return the facts of the same training without Ronde and without faults."""
    alone = folder / "alone"
    alone.mkdir()
    for name in ("job.json", "digits.npz"):
        shutil.copy(folder / name, alone / name)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    subprocess.run([sys.executable, WORKER, str(alone), "--alone"], check=True, env=environment)
    (path,) = (alone / "facts").glob("*")
    return read_facts(path)


def check(chaos: Chaos) -> Iterator[str]:
    """Compare what the processes say with the undisturbed training and with each other."""
    training, _ = read_job(chaos.folder)
    facts = chaos.facts()
    reference = undisturbed(chaos.folder)
    worlds = account.worlds_of(facts)
    with np.load(chaos.folder / "digits.npz") as found:
        samples = len(found["labels"])
    ends = {pid: each[-1] for pid, each in facts.items() if each and each[-1]["what"] == "ends"}
    struck = {"kill", "exit", "raise", "kill agent"}
    victims = {
        pid
        for pid, each in facts.items()
        for fact in each
        if fact["what"] == "fault" and fact["kind"] in struck
    }
    lost_agents = {agent.name for agent in chaos.agents if agent.was_killed or agent.was_ended}
    victims |= {pid for pid, each in facts.items() if each and each[0].get("agent") in lost_agents}
    if not ends:
        yield "no process has ended well"
    for pid, end in ends.items():
        if end["digest"] != reference[-1]["digest"]:
            yield f"process {pid}: its parameters are not those of the undisturbed run"
        if end["accuracy"] != reference[-1]["accuracy"]:
            yield f"process {pid}: accuracy {end['accuracy']}, undisturbed {reference[-1]['accuracy']}"
    yield from account.check_ranks(worlds)
    yield from account.check_samples(
        worlds, training.steps, lambda step: [int(row) for row in batch_of(training, step, samples)], victims
    )
    yield from account.check_rollbacks(worlds)
    yield from account.check_losses(facts, {fact["step"]: fact["loss"] for fact in reference[:-1]})
    yield from account.check_survivors(worlds, victims, set(ends))
    yield from account.check_resources(worlds)
    if left := list(marked(chaos.mark)):
        yield f"left behind: {left}"


@contextmanager
def shared_memory_stays() -> Iterator[list[str]]:
    """Give a list that afterwards says what is new in /dev/shm."""
    before, problems = set(os.listdir("/dev/shm")), list[str]()
    yield problems
    if left := set(os.listdir("/dev/shm")) - before:
        problems.append(f"left in /dev/shm: {left}")


@dataclass(frozen=True)
class Result:
    """What came of a run: what was wrong ("" if nothing), and numbers for the report."""

    wrong: str
    report: Mapping[str, Any]


def run_chaos(
    training: Training, faults: Sequence[Fault], shape: Shape, limit_s: float, plot: Path | None = None
) -> Result:
    """Run one training under faults. Its folder stays if something was wrong."""
    folder = Path(tempfile.mkdtemp(prefix="ronde-chaos-"))
    prepare(folder)
    write_job(folder, training, faults)
    chaos = Chaos(folder, shape, limit_s)
    with shared_memory_stays() as problems:
        try:
            problems += chaos.run()
            problems += check(chaos)
        finally:
            chaos.close()
    report = make_report(chaos, faults, problems)
    if plot:
        draw(plot, chaos.facts())
    if not problems:
        shutil.rmtree(folder)
        return Result("", report)
    words = [f"{training} {shape} in {folder}", *map(str, faults), chaos.story(), "--- wrong:", *problems]
    return Result("\n".join(words), report)


def make_report(chaos: Chaos, faults: Sequence[Fault], problems: Sequence[str]) -> dict[str, Any]:
    """Return what a run was, as JSON takes it."""
    facts = chaos.facts()
    worlds = account.worlds_of(facts)
    struck = [fact for each in facts.values() for fact in each if fact["what"] == "fault"]
    done = Counter(
        fact["step"]
        for each in facts.values()
        for fact in each
        if fact["what"] == "step" and fact["rank"] == 0
    )
    recoveries = sorted(recovery_ms(facts, worlds))
    return {
        "shape": str(chaos.shape),
        "scheduled": len(faults),
        "struck": Counter(f"{fact['kind']}, {fact['moment']}" for fact in struck),
        "worlds": len(worlds),
        "steps": len(done),
        "steps_repeated": sum(done.values()) - len(done),
        "processes": len(facts),
        "recovery_ms": {
            "median": recoveries[len(recoveries) // 2], "most": recoveries[-1], "count": len(recoveries)
        } if recoveries else {},
        "wrong": list(problems),
    }  # fmt: skip


def recovery_ms(
    facts: Mapping[int, Sequence[Mapping[str, Any]]], worlds: Sequence[account.World]
) -> Iterator[float]:
    """Yield for each fatal fault the time until all ranks of a later world had begun to train."""
    for each in facts.values():
        for fact in each:
            if fact["what"] == "fault" and fact["kind"] != "stop":
                later = [world for world in worlds if world.began > fact["at"]]
                if later:
                    yield (max(entry.at for entry in later[0].entries) - fact["at"]) / 1e6


def draw(path: Path, facts: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
    """Draw loss and size of the world over time, with a line for each fault."""
    from matplotlib import pyplot

    steps = sorted(
        (fact["at"], fact["loss"], fact["size"])
        for each in facts.values()
        for fact in each
        if fact["what"] == "step" and fact["rank"] == 0
    )
    begin = steps[0][0]
    times = [(at - begin) / 1e9 for at, _, _ in steps]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(10, 6), layout="constrained")
    above.semilogy(times, [loss / 2.0**40 / 128 for _, loss, _ in steps], linewidth=0.8)
    above.set_ylabel("loss")
    below.step(times, [size for _, _, size in steps], where="post")
    below.set(xlabel="seconds", ylabel="ranks", ylim=(0, None))
    for each in facts.values():
        for fact in each:
            if fact["what"] == "fault":
                below.axvline((fact["at"] - begin) / 1e9, color="lightgrey", linewidth=0.5, zorder=0)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--faults", type=int, default=8, help="in each run")
    parser.add_argument("--nodes", type=int, default=1, help="agents")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds, after which a run counts as hanging"
    )
    parser.add_argument(
        "--step",
        type=float,
        default=0.005,
        help="seconds; long ones when many processes are replaced, because the agent "
        "waits before it replaces workers that die young",
    )
    parser.add_argument("--feed", choices=("own", "state"), default="own")
    parser.add_argument("--report", type=Path, help="write numbers as JSON")
    parser.add_argument("--plot", type=Path, help="draw loss and size of the world (matplotlib)")
    asked = parser.parse_args(argv)
    os.environ.setdefault("RONDE_JOB_KEY", os.urandom(32).hex())
    reports, failed = [], []
    for seed in range(asked.seed, asked.seed + asked.seeds):
        result = run_seed(seed, asked)
        reports.append({"seed": seed, **result.report})
        print(json.dumps(reports[-1]), flush=True)
        if result.wrong:
            failed.append(seed)
            print(result.wrong, flush=True)
    if asked.report:
        asked.report.write_text(json.dumps(reports, indent=1))
    return 1 if failed else 0


def run_seed(seed: int, asked: argparse.Namespace) -> Result:
    """Run the schedule of a seed."""
    rng = random.Random(f"chaos {seed}")
    shape = Shape.draw(rng, asked.nodes)
    faults, steps = draw_faults(rng, asked.faults, shape)
    training = Training(seed, steps, rng.choice((1, 1, 3)), asked.step, asked.feed)
    return run_chaos(training, faults, shape, asked.limit, asked.plot)


if __name__ == "__main__":
    sys.exit(main())
