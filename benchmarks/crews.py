"""Groups (groups.py) for the benchmarks with their own contestants: engine.py and training.py."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from collectives import Field, enough_calls
from contestants import CONTESTANTS
from groups import Broken, Group, _free_port
from horovod_meeting import horovod_places
from serving import serve

from ronde.testing import ranks

LEAST_STEPS = 3  # of a model, in one turn


class Home(NamedTuple):
    """Where a contestant's class is: a module in the folder `contestants`, and its name there."""

    module: str
    name: str


class Crew(Group):
    """The ranks of a contestant that is not in the table of contestants/__init__.py. Raises Broken."""

    def __init__(self, contestant: str, home: Home, size: int) -> None:
        self.contestant = contestant
        self.size = size
        self._connections = []
        with contextlib.ExitStack() as undo:
            folder = pathlib.Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="ronde-benchmark-")))
            listener = undo.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
            listener.bind(str(folder / "driver"))
            listener.listen(size)
            places = undo.enter_context(horovod_places(size)) if contestant == "horovod" else None
            environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            arguments = (contestant, home, str(folder / "driver"))
            job = ranks.start(serve_crew, size, *arguments, environ=environ, places=places)
            pids = undo.enter_context(job).pids
            undo.callback(self._hang_up)
            self._accept(listener, pids)
            self._undo = undo.pop_all()


def serve_crew(contestant: str, home: Home, path: str) -> None:
    """Serve as one rank, like serving.serve, for a contestant whose class the arguments name."""
    CONTESTANTS[contestant] = home
    serve(contestant, path)


class Crews(Field):
    """The contestants that take part with a number of ranks. One that does not start is skipped, with the reason.

    `homes`: None for a contestant of the table of contestants/__init__.py.
    """

    def __init__(self, homes: Mapping[str, Home | None], names: Iterable[str], size: int) -> None:
        super().__init__([], size)
        for name in names:
            home = homes[name]
            try:
                group = Group(name, size) if home is None else Crew(name, home, size)
                self.groups.append(self._open.enter_context(group))
            except Broken as reason:
                print(f"skipped {name}: {reason}", file=sys.stderr, flush=True)


class CallTimes(NamedTuple):
    """Seconds per call: the median over rounds, and the best round."""

    median: float
    best: float


def measure_calls(field: Field, case: str, operation: str, count: int, rounds: int) -> dict[str, CallTimes]:
    """Time the calls of every contestant; in every round each has one turn."""
    calls: dict[Group, int] = {}
    for group in list(field.groups):
        with field.turn_of(group, case):
            group.ask("prepare", operation, count)
            calls[group] = enough_calls(group)
    blocks: dict[Group, list[float]] = {group: [] for group in calls}
    for _ in range(rounds):
        for group in [group for group in field.groups if group in calls]:
            with field.turn_of(group, case):
                blocks[group].append(group.seconds_per_call(calls[group]))
    finished = [group for group in field.groups if blocks.get(group)]
    return {
        group.contestant: CallTimes(statistics.median(blocks[group]), min(blocks[group]))
        for group in finished
    }


class StepTimes(NamedTuple):
    """Seconds per step: medians with communication, without it, and of the difference of the two in one round.

    `best_added` is the difference of the best round of each.
    """

    together: float
    alone: float
    added: float
    best_added: float


def measure_steps(field: Field, operation: str, rounds: int) -> dict[str, StepTimes]:
    """Time the steps of a model for every contestant that has them.

    In every round each contestant has one turn: a block of steps with communication and one without, on the same ranks
    right after each other, in an order that changes with the rounds.
    """
    doing = f"steps of {operation}"
    steps: dict[Group, int] = {}
    for group in list(field.groups):
        with field.turn_of(group, doing):
            group.ask("prepare", operation, True)
            steps[group] = max(LEAST_STEPS, enough_calls(group))
    blocks: dict[Group, list[tuple[float, float]]] = {group: [] for group in steps}
    for round_ in range(rounds):
        for group in [group for group in field.groups if group in steps]:
            with field.turn_of(group, doing):
                seconds = {}
                for communicates in (True, False) if round_ % 2 else (False, True):
                    group.ask("prepare", operation, communicates)
                    seconds[communicates] = group.seconds_per_call(steps[group])
                blocks[group].append((seconds[True], seconds[False]))
    finished = [group for group in field.groups if blocks.get(group)]
    return {group.contestant: step_times(blocks[group]) for group in finished}


def step_times(blocks: list[tuple[float, float]]) -> StepTimes:
    """Sum up the rounds: (with, without communication)."""
    together, alone = zip(*blocks)
    added = statistics.median(mine - base for mine, base in blocks)
    return StepTimes(statistics.median(together), statistics.median(alone), added, min(together) - min(alone))
