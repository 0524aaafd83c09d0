"""Tuning in real jobs: settings change while tensors are on their way, on all ranks at the same place."""

from __future__ import annotations

import csv
import logging
import re
from pathlib import Path

import numpy as np
import pytest

import ronde
from ronde import settings
from ronde.testing import ranks

TENSORS = 40
QUICK = {
    "RONDE_AUTOTUNE": "1",
    "RONDE_AUTOTUNE_TRIALS": "5",
    "RONDE_AUTOTUNE_SAMPLES": "1",
    "RONDE_AUTOTUNE_STEPS_PER_SAMPLE": "3",
    "RONDE_AUTOTUNE_WARMUP_SAMPLES": "1",
    "RONDE_LOG_LEVEL": "info",
}
ROWS = 5 + 4 * 5  # trials, and the best four of them in turns


class Told(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(most_steps: int) -> list[str]:
    """Train until tuning is over; return what it has said. Every result of every step must be right."""
    told = Told()
    logging.getLogger("ronde.tuning").addHandler(told)
    ronde.init()
    rank, size = ronde.rank(), ronde.size()
    shapes = [(number % 7 + 1, 1 + 97 * number) for number in range(TENSORS)]
    for step in range(most_steps):
        order = np.random.default_rng(step * size + rank).permutation(TENSORS)  # another one on every rank
        handles = {
            number: ronde.allreduce_async(
                np.full(shapes[number], float(number + step + rank)), f"gradient {number}", ronde.Sum
            )
            for number in order.tolist()
        }
        for number, handle in handles.items():
            assert (handle.wait() == size * (number + step) + sum(range(size))).all()
        is_over = any("over" in line for line in told.lines)
        if ronde.broadcast(np.array([is_over]), 0, "is over")[0]:
            break
    ronde.barrier()  # a negotiation round, so that everybody has heard of the last switch
    ronde.shutdown()
    return told.lines


@pytest.mark.parametrize(
    ("hosts", "tuned"),
    [
        ("a", {"batch_bytes", "linger_ns"}),
        ("aa", {"batch_bytes", "linger_ns"}),
        ("abc", {"doubling_bytes", "ring_bytes"}),
        ("aabb", {"doubling_bytes", "hierarchical_bytes"}),
    ],
)
def test_values_are_right_while_settings_change(hosts: str, tuned: set[str], tmp_path: Path) -> None:
    pytest.importorskip("bayes_opt")
    log = tmp_path / "log.csv"
    size = len(hosts)
    environ = {**QUICK, "RONDE_AUTOTUNE_LOG": str(log)}
    places = [ranks.Place(environ={"RONDE_HOST_ID": host}) for host in hosts]
    with ranks.start(train, size, 100_000, environ=environ, places=places) as job:
        told = job.results(200)
    switches = [[line for line in lines if line.startswith("from here on")] for lines in told]
    assert switches == [switches[0]] * size  # the same values in the same order
    assert len(switches[0]) == ROWS  # each but the first trial, and the end
    assert len(set(switches[0])) >= 4

    [end] = [line for line in told[0] if line.startswith("tuning is over")]
    assert not any("over" in line for lines in told[1:] for line in lines)
    assert re.search(r"the best of 5 trials reaches [\d.]+ MB/s, the first [\d.]+ MB/s", end)
    pasted = dict(word.split("=") for word in end.split("To start with it: ")[1].split())
    found = settings.resolve(pasted)
    assert f"fusion_bytes={found.fusion_bytes}, linger_ns={found.linger_ns}" in switches[0][-1]

    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert [int(row["trial"]) for row in rows] == list(range(ROWS))
    assert [row["again"] for row in rows] == ["0"] * 5 + ["1"] * 20
    others = {"trial", "seconds", "fusion_bytes", "largest_fused_bytes", "bytes_per_second", "again"}
    assert set(rows[0]) - others == tuned
    assert rows[0]["fusion_bytes"] == str(settings.Settings.fusion_bytes)
    assert len({row["fusion_bytes"] for row in rows}) >= 4
    assert all(float(row["bytes_per_second"]) > 0 for row in rows)


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    pytest.importorskip("bayes_opt")
    log = tmp_path / "log.csv"
    chosen = {"RONDE_FUSION_BYTES": "1", "HOROVOD_CYCLE_TIME": "2"}
    told = ranks.run(train, 2, 100_000, environ={**QUICK, **chosen, "RONDE_AUTOTUNE_LOG": str(log)})
    switches = [line for line in told[0] if line.startswith("from here on")]
    assert len(switches) == ROWS
    assert all("fusion_bytes=1, linger_ns=2000000" in line for line in switches)
    assert len(set(switches)) >= 4  # the others are tuned
    assert not {"fusion_bytes", "linger_ns"} & set(next(csv.DictReader(log.read_text().splitlines())))


def test_a_job_that_ends_early_says_what_was_best_so_far() -> None:
    pytest.importorskip("bayes_opt")
    [told] = ranks.run(train, 1, 300, environ={**QUICK, "RONDE_AUTOTUNE_TRIALS": "1000"})
    assert told[-1].startswith("the job ends before tuning: the best of")


def begin() -> str:
    try:
        ronde.init()
    except ronde.RondeError as error:
        return f"{type(error).__name__}: {error}"
    ronde.shutdown()
    return "began"


def test_a_log_that_cannot_be_written_is_refused_on_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("bayes_opt")
    environ = {"RONDE_AUTOTUNE": "1", "RONDE_AUTOTUNE_LOG": str(tmp_path / "no" / "log.csv")}
    for answer in ranks.run(begin, 2, environ=environ):
        assert answer.startswith("UsageError: autotune_log: [Errno 2]")


def without_the_library() -> str:
    import sys

    sys.modules["bayes_opt"] = None  # type: ignore[assignment]
    return begin()


def test_without_the_library_all_ranks_say_what_to_install() -> None:
    for answer in ranks.run(without_the_library, 2, environ={"RONDE_AUTOTUNE": "1"}):
        assert answer.startswith("UsageError: autotune needs the package bayesian-optimization")
        assert "pip install 'ronde[tuning]'" in answer


def differ() -> str:
    variables = settings.environment()
    ronde_rank = int(variables["RANK"])
    try:
        ronde.init(batch_bytes=4096 * (1 + ronde_rank))
    except ronde.MismatchError as error:
        return str(error)
    return ""


def test_ranks_that_differ_in_what_must_be_alike_hear_of_it() -> None:
    for answer in ranks.run(differ, 2):
        assert answer == (
            "batch_bytes is 4096 on rank 0 and 8192 on rank 1: it must be the same on all ranks"
        )
