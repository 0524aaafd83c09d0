"""A program: trains on digits with `ronde.elastic`, suffers the faults of a schedule, and records what it does.

    chaos_training.py FOLDER            # under `ronde run`
    chaos_training.py FOLDER --alone    # without Ronde and faults: what the others must come to

FOLDER/job.json is the job (`Training` and a list of `Fault`), FOLDER/digits.npz has the images. Each process appends
facts to FOLDER/facts/PID, one per line, with the time of the clock that all processes share, each after its event, and
`samples` before it. A process claims a fault by making a file in FOLDER/faults, so that each fault strikes once and the
schedule depends on steps and ranks alone.

Sums are exact: each micro-batch has the same rows in every world, and its gradient is rounded to a multiple of 2^-40
before integers are summed. So the parameters do not depend on who computes which micro-batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

GLOBAL_BATCH, MICRO_BATCH = 128, 16
HIDDEN = 32
SHAPES = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
SCALE = 2.0**40
RATE, MOMENTUM = 0.2, 0.9
PATIENCE_S = 70.0  # for a process that replaces another one: more than an agent waits before it starts one


@dataclasses.dataclass(frozen=True)
class Training:
    """The training of a job. `feed`: `own` computes the batches here, `state` takes them from `state.batches`."""

    seed: int
    steps: int
    commit_every: int = 1
    step_s: float = 0.005
    feed: str = "own"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault strikes `ranks` in the first step from `step` on of a world that has more ranks than these.

    `kind`: "kill", "stop" (for `seconds`), "raise", "exit", "kill agent" or "end agent"; the driver does the last two,
    and lets a stopped process go on.
    `moment`: "before" or "after" the all-reduce of the step, "during" it (`seconds` after its start), "save" (in a
    commit, between its barrier and its copy), "restore" or "sync" (in a recovery).
    """

    step: int
    kind: str
    moment: str
    ranks: tuple[int, ...] = (0,)
    seconds: float = 0.0


def read_job(folder: Path) -> tuple[Training, list[Fault]]:
    """Return what FOLDER/job.json says."""
    job = json.loads((folder / "job.json").read_text())
    faults = [Fault(**{**fault, "ranks": tuple(fault["ranks"])}) for fault in job["faults"]]
    return Training(**job["training"]), faults


def write_job(folder: Path, training: Training, faults: Sequence[Fault]) -> None:
    """Write FOLDER/job.json."""
    job = {
        "training": dataclasses.asdict(training),
        "faults": [dataclasses.asdict(fault) for fault in faults],
    }
    (folder / "job.json").write_text(json.dumps(job))


def batch_of(training: Training, step: int, samples: int) -> Array:
    """Return the indices of a step, the same for every world: a part of the order of its epoch."""
    steps = samples // GLOBAL_BATCH
    if training.feed == "state":
        from ronde.elastic.batches import order_of_epoch

        steps += samples % GLOBAL_BATCH > 0
        order = order_of_epoch(samples, training.seed, step // steps)
    else:
        order = np.random.default_rng((training.seed, step // steps)).permutation(samples)
    start = step % steps * GLOBAL_BATCH
    return order[start : start + GLOBAL_BATCH]


def micro_batches_of(batch: Array) -> list[Array]:
    """Return the parts of a global batch that one rank computes as a whole."""
    return [batch[start : start + MICRO_BATCH] for start in range(0, len(batch), MICRO_BATCH)]


class Model:
    """A network with one hidden layer; `parameters` and `velocity` are flat vectors of float64."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        parts = [rng.normal(0, 0.1, shape) if len(shape) == 2 else np.zeros(shape) for shape in SHAPES]
        self.parameters = np.concatenate([part.ravel() for part in parts])
        self.velocity = np.zeros_like(self.parameters)

    def layers(self) -> list[Array]:
        """Return views of the parameters."""
        found, start = [], 0
        for shape in SHAPES:
            end = start + int(np.prod(shape))
            found.append(self.parameters[start:end].reshape(shape))
            start = end
        return found

    def gradient(self, images: Array, labels: Array) -> Array:
        """Return the gradient over these rows and behind it their loss, as int64, sums over rows."""
        weights1, bias1, weights2, bias2 = self.layers()
        hidden = np.maximum(images @ weights1 + bias1, 0)
        scores = hidden @ weights2 + bias2
        scores -= scores.max(axis=1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        rows = np.arange(len(labels))
        delta = np.exp(logs)
        delta[rows, labels] -= 1
        before = (delta @ weights2.T) * (hidden > 0)
        parts = [images.T @ before, before.sum(0), hidden.T @ delta, delta.sum(0), -logs[rows, labels].sum()]
        return np.rint(np.concatenate([np.ravel(part) for part in parts]) * SCALE).astype(np.int64)

    def update(self, total: Array) -> None:
        """Take the sum of the gradients over a global batch."""
        self.velocity *= MOMENTUM
        self.velocity += total[:-1] / SCALE / GLOBAL_BATCH
        self.parameters -= RATE * self.velocity

    def accuracy(self, images: Array, labels: Array) -> float:
        """Return the share of images that are read correctly."""
        weights1, bias1, weights2, bias2 = self.layers()
        scores = np.maximum(images @ weights1 + bias1, 0) @ weights2 + bias2
        return float((scores.argmax(axis=1) == labels).mean())

    def digest(self) -> str:
        """Return what tells whether parameters have the same bits."""
        return hashlib.sha256(self.parameters.tobytes() + self.velocity.tobytes()).hexdigest()


class Data:
    """The images of FOLDER/digits.npz, and how a global batch becomes sums."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "digits.npz") as found:
            self.images, self.labels, self.test_images, self.test_labels = (found[name] for name in found)

    def partial_sum(self, model: Model, micro_batches: Sequence[Array]) -> Array:
        """Return the sum of the gradients of some micro-batches, each the indices of its rows."""
        total = np.zeros(len(model.parameters) + 1, np.int64)
        for rows in micro_batches:
            total += model.gradient(self.images[rows], self.labels[rows])
        return total


class Facts:
    """What this process says about itself."""

    def __init__(self, folder: Path) -> None:
        (folder / "facts").mkdir(exist_ok=True)
        path = folder / "facts" / str(os.getpid())
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def add(self, what: str, **facts: Any) -> None:
        """Append one fact."""
        os.write(self._fd, (json.dumps({"what": what, "at": time.monotonic_ns(), **facts}) + "\n").encode())


class Struck:
    """The faults of the schedule, as they befall this process."""

    def __init__(self, folder: Path, faults: Sequence[Fault], facts: Facts) -> None:
        self._folder = folder / "faults"
        self._folder.mkdir(exist_ok=True)
        self._faults = faults
        self._facts = facts
        self._patience_s = PATIENCE_S

    def strike(self, moment: str, step: int, rank: int, size: int) -> None:
        """Suffer what is due."""
        for index, fault in enumerate(self._faults):
            due = fault.moment == moment and step >= fault.step and rank in fault.ranks
            if due and size > max(*fault.ranks, len(fault.ranks)) and self._claim(index, rank):
                self._facts.add("fault", index=index, kind=fault.kind, moment=moment, step=step, rank=rank)
                self._suffer(fault)

    def await_victims(self, step: int, size: int) -> None:
        """Wait until a change of the world is in sight, if faults that are due need more ranks than it has."""
        from ronde.process.membership_channel import membership

        deadline, mine = time.monotonic() + self._patience_s, membership()
        while self._has_to_wait(step, size) and mine is not None and not mine.change_wanted:
            if time.monotonic() > deadline:
                self._patience_s = 0.0
                break
            time.sleep(0.01)

    def _has_to_wait(self, step: int, size: int) -> bool:
        return any(
            fault.step <= step and max(*fault.ranks, len(fault.ranks)) >= size
            for index, fault in enumerate(self._faults)
            if not all((self._folder / f"{index}.{rank}").exists() for rank in fault.ranks)
        )

    def _claim(self, index: int, rank: int) -> bool:
        path = self._folder / f"{index}.{rank}"
        try:
            with path.open("x") as file:
                file.write(f"{os.getpid()} {os.environ.get('CHAOS_AGENT', '')}")
        except FileExistsError:
            return False
        return True

    def _suffer(self, fault: Fault) -> None:
        match fault.kind:
            case "kill" if fault.moment == "during":
                threading.Timer(fault.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "kill agent":
                time.sleep(60)  # the driver kills the agent, and this process dies with it
            case "end agent":
                pass  # the driver ends it
            case "raise":
                raise RuntimeError("as the schedule says")
            case "exit":
                os._exit(3)


def resources() -> dict[str, int]:
    """Return the number of open descriptors and threads, and the resident memory in KiB."""
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "memory_kib": int(status["VmRSS"].split()[0]),
    }


def train_alone(folder: Path) -> None:
    """Train without Ronde. The facts have the same form."""
    training, _ = read_job(folder)
    data, model, facts = Data(folder), Model(training.seed), Facts(folder)
    for step in range(training.steps):
        total = data.partial_sum(model, micro_batches_of(batch_of(training, step, len(data.labels))))
        model.update(total)
        facts.add("step", step=step, loss=int(total[-1]))
    accuracy = model.accuracy(data.test_images, data.test_labels)
    facts.add("ends", digest=model.digest(), accuracy=accuracy)


def train_elastic(folder: Path) -> None:
    """Train with ronde.elastic."""
    import ronde
    import ronde.elastic

    training, faults = read_job(folder)
    data, model, facts = Data(folder), Model(training.seed), Facts(folder)
    struck = Struck(folder, faults, facts)
    facts.add("begins", agent=os.environ.get("CHAOS_AGENT", ""))

    class State(ronde.elastic.ObjectState):
        """The state, where faults can strike in a commit and in a recovery."""

        def save(self) -> None:
            struck.strike("save", self.step, ronde.rank(), ronde.size())
            super().save()

        def restore(self) -> None:
            struck.strike("restore", self.step, ronde.rank(), ronde.size())
            super().restore()

        def sync(self) -> None:
            struck.strike("sync", self.step, ronde.rank(), ronde.size())
            super().sync()

    def batches(state: Any) -> Iterator[list[Array]]:
        """Yield the micro-batches of this rank for each step."""
        world, samples = ronde.world(), len(data.labels)
        if training.feed == "state":
            shape = {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH, "seed": training.seed}
            position = state.batches(samples, epochs=training.steps, **shape)
            while state.step < training.steps:
                yield list(next(position))
        else:
            while state.step < training.steps:
                micro_batches = micro_batches_of(batch_of(training, state.step, samples))
                yield micro_batches[world.rank :: world.size]

    def train(state: Any) -> None:
        world = ronde.world()
        rank, size = world.rank, world.size
        # Who is in which world; its store is no other world's.
        round_ = os.environ.get("RONDE_STORE", "")
        model.parameters, model.velocity = state.parameters, state.velocity
        facts.add("enters", round=round_, rank=rank, size=size, step=state.step, **resources())
        for micro_batches in batches(state):
            step = state.step
            samples = [int(row) for rows in micro_batches for row in rows]
            facts.add("samples", round=round_, step=step, samples=samples)
            total = data.partial_sum(model, micro_batches)
            struck.strike("before", step, rank, size)
            struck.strike("during", step, rank, size)
            total = world.allreduce(total)
            model.update(total)
            facts.add("step", round=round_, step=step, loss=int(total[-1]), rank=rank, size=size)
            state.step = step + 1
            struck.strike("after", step, rank, size)
            time.sleep(training.step_s)
            if rank == 0:
                struck.await_victims(step, size)
            if state.step % training.commit_every == 0:
                state.commit()
                facts.add("commits", round=round_, step=state.step)

    state = State(parameters=model.parameters, velocity=model.velocity, step=0)
    ronde.elastic.run(train)(state)
    model.parameters, model.velocity = state.parameters, state.velocity
    accuracy = model.accuracy(data.test_images, data.test_labels)
    facts.add("ends", digest=model.digest(), accuracy=accuracy, **resources())


def main() -> None:
    """Train."""
    folder = Path(sys.argv[1])
    if "--alone" in sys.argv:
        train_alone(folder)
    else:
        train_elastic(folder)


if __name__ == "__main__":
    main()
