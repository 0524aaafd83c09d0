"""The shell around `engine.tuning`: rank 0 measures, searches and logs; all ranks adopt its values.

A separate thread on rank 0 does the slow parts, so that no rank waits for the search:

    native meter:       has all samples, and requests a negotiation round
    negotiation round:  passes the samples to the thread
    thread:             scores, logs and searches; has new values, and requests a negotiation round
    negotiation round:  the Coordinator puts them into the stream, every rank adopts them, and the meter starts again

Between two switches, tuning costs only the meter on rank 0, some 50 ns per submission.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import logging
import math
import os
import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any, TextIO

from ronde import _native
from ronde.comm.byte_exchange import broadcast_bytes
from ronde.comm.communicator import Communicator
from ronde.engine.messages import Tune
from ronde.engine.negotiation import Coordinator
from ronde.engine.tuning import (
    Effect,
    Event,
    Finished,
    Measured,
    Proposed,
    ProposePoint,
    Sample,
    Space,
    Switch,
    Trial,
    Tuning,
    knobs_for,
)
from ronde.errors import UsageError
from ronde.settings import Settings, assignment
from ronde.trusted_files import open_for_writing

__all__ = ["BayesianSearch", "Tuner", "begin_tuning", "adopt_values"]

_log = logging.getLogger("ronde.tuning")


def begin_tuning(
    cycle: _native.Cycle, comm: Communicator, settings: Settings, is_tuned: bool
) -> Tuner | None:
    """Apply the settings to the cycle; return rank 0's tuner if `is_tuned`, otherwise None. All ranks call it.

    Raises UsageError on all ranks if rank 0 lacks the library for the search, or cannot write the log.
    """
    native = Tune(*cycle.tunables())
    usual = replace(native, fusion_bytes=Settings.fusion_bytes, linger_ns=Settings.linger_ns)
    wanted = {name: getattr(settings, name) for name in ("batch_bytes", "largest_fused_bytes")}
    start = replace(native, fusion_bytes=settings.fusion_bytes, **_given(wanted))
    cycle.tune(*astuple(start))
    if not is_tuned:
        return None
    hosts = len(set(comm.topology.host_of))
    space = Space(knobs_for(hosts, comm.size, settings.allreduce_algorithm, settings.given), start)
    log, problem = None, ""
    if not space.knobs:
        if comm.rank == 0:
            _log.warning("autotune has no effect: every setting that it could tune here has a fixed value")
        return None
    if comm.rank == 0:
        try:
            problem = "" if _is_installed() else _HINT
            log = None if problem else _Log(settings.autotune_log, space)
        except OSError as error:
            problem = f"autotune_log: {error}"
    problem = broadcast_bytes(comm, problem.encode()).decode()
    if problem:
        raise UsageError(problem)
    if log is None:
        return None
    tuning = Tuning(
        space,
        start,
        usual,
        settings.autotune_trials,
        settings.autotune_samples,
        settings.autotune_warmup_samples,
    )
    return Tuner(cycle, tuning, space, log, settings.autotune_steps_per_sample)


def adopt_values(cycle: _native.Cycle, values: Tune, tuner: Tuner | None) -> None:
    """Adopt the values from now on. Every rank calls it in the same negotiation round."""
    cycle.tune(*astuple(values))
    _log.info("from here on %s", values)
    if tuner is not None:
        tuner.begin_samples()


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class Tuner:
    """Rank 0's shell of `Tuning`: takes samples, and performs the effects."""

    def __init__(self, cycle: _native.Cycle, tuning: Tuning, space: Space, log: _Log, steps: int) -> None:
        """`steps`: the smallest number of steps in a sample."""
        self._cycle = cycle
        self._tuning = tuning
        self._space = space
        self._log = log
        self._steps = steps
        self._begun_ns = time.monotonic_ns()
        self._search: BayesianSearch | None = None
        self.found: Finished | None = None  # when it is over
        self._measured: queue.SimpleQueue[Measured | None] = queue.SimpleQueue()
        self._switches: queue.SimpleQueue[Switch] = queue.SimpleQueue()
        self._wanted = tuning.first_samples
        self._thread = threading.Thread(target=self._run_thread, name="ronde-tuner", daemon=True)
        self._thread.start()
        self.begin_samples()

    def exchange_with(self, coordinator: Coordinator) -> None:
        """In a negotiation round: take the samples, and pass the next values to the coordinator."""
        samples = self._cycle.take_samples()
        if samples:
            self._measured.put(Measured(tuple(Sample(*each) for each in samples)))
        with contextlib.suppress(queue.Empty):
            switch = self._switches.get_nowait()
            self._wanted = switch.samples
            coordinator.tune(switch.values)

    def begin_samples(self) -> None:
        """Start to measure, if samples are wanted."""
        self._cycle.start_meter(self._steps, self._wanted)

    def close(self) -> None:
        """End the thread. There are no more negotiation rounds."""
        self._measured.put(None)
        self._thread.join()
        if not self._tuning.is_over and self._tuning.best().score > 0:
            _log.warning("the job ends before tuning: %s", self._describe(self._tuning.best()))
        self._log.close()

    def _run_thread(self) -> None:
        while (event := self._measured.get()) is not None:
            try:
                self._handle_event(event)
            except Exception:
                _log.exception("autotune has failed; the job keeps the best values so far")
                self._tuning.is_over = True
                self._perform(Switch(self._tuning.best().values, 0))

    def _handle_event(self, event: Event) -> None:
        for effect in self._tuning.step(time.monotonic_ns() - self._begun_ns, event):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Trial():
                self._log.write_trial(effect)
            case ProposePoint(known):
                if self._search is None:
                    self._search = BayesianSearch(len(self._space.knobs))
                self._handle_event(Proposed(self._search.propose(known)))
            case Switch():
                self._switches.put(effect)
                self._cycle.want_negotiation()
            case Finished():
                _log.warning("tuning is over: %s", self._describe(effect))
                self.found = effect

    def _describe(self, found: Finished) -> str:
        values = self._space.describe(found.values).items()
        return (
            f"the best of {found.trials} trials reaches {found.score / 1e6:.1f} MB/s, the first "
            f"{found.first / 1e6:.1f} MB/s. To start with it: "
            + " ".join(assignment(name, value) for name, value in values)
        )


class _Log:
    """The CSV file of trials, or no file without a path."""

    def __init__(self, path: str | None, space: Space) -> None:
        self._space = space
        self._file: TextIO | None = None
        if path is not None:
            self._file = os.fdopen(open_for_writing(path, os.O_TRUNC), "w", encoding="utf-8", newline="")
            names = [knob.name for knob in space.knobs]
            self._write_row(["trial", "seconds", *names, "bytes_per_second", "again"])

    def write_trial(self, trial: Trial) -> None:
        """Write a row, and flush it."""
        values = [getattr(trial.values, knob.name) for knob in self._space.knobs]
        seconds = f"{trial.at_ns / 1e9:.3f}"
        self._write_row([trial.number, seconds, *values, round(trial.score), int(trial.is_again)])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write_row(self, cells: Sequence[object]) -> None:
        if self._file is not None:
            csv.writer(self._file).writerow(cells)
            self._file.flush()


# The search of `engine.tuning`, with the library bayesian-optimization (the extra `tuning`)

_HINT = "autotune needs the package bayesian-optimization on rank 0: pip install 'ronde[tuning]'"
_GIVEN = 2  # trials before the first proposal
_NOISE = 0.02  # the variance of a measured score, when scores are scaled to variance 1


def _is_installed() -> bool:
    """Return whether the library is installed."""
    return importlib.util.find_spec("bayes_opt") is not None


class BayesianSearch:
    """Proposes points of the unit cube. The same seed and scores lead to the same points."""

    def __init__(self, axes: int, seed: int = 0) -> None:
        from bayes_opt import BayesianOptimization  # takes seconds, and is needed on rank 0 only
        from bayes_opt.acquisition import ExpectedImprovement

        self._names = [f"axis{number}" for number in range(axes)]
        self._optimizer: Any = BayesianOptimization(
            f=None,
            pbounds=dict.fromkeys(self._names, (0.0, 1.0)),
            acquisition_function=ExpectedImprovement(xi=0.01),
            random_state=seed,
            verbose=0,
            allow_duplicate_points=True,
        )
        self._optimizer.set_gp_params(alpha=_NOISE, n_restarts_optimizer=2)
        self._registered = 0
        self._random = random.Random(seed)

    def propose(self, known: Sequence[tuple[Sequence[float], float]]) -> tuple[float, ...]:
        """Return the point to try next. `known`: all points so far with their scores, in bytes per second.

        The search compares logarithms, because one point may be a hundred times as fast as another. The first
        proposals, as many as there are axes, are random: from very few scores the search would conclude too much.
        """
        if len(known) < _GIVEN + len(self._names):
            return tuple(self._random.random() for _ in self._names)
        for point, score in known[self._registered :]:
            self._optimizer.register(dict(zip(self._names, point)), math.log2(max(score, 1.0)))
        self._registered = len(known)
        proposed = self._optimizer.suggest()
        return tuple(float(proposed[name]) for name in self._names)
