"""What `ronde bench` makes of measurements."""

from __future__ import annotations

import pytest

from ronde.bench.collective_traffic import JobShape
from ronde.bench.cost_model import Rates
from ronde.bench.report import (
    BenchResults,
    CallTime,
    SettingTrial,
    as_json,
    describe,
    trials_for,
)

MIB = 1 << 20
ONE_HOST = JobShape(1, 2)
RATES = Rates(memory_bytes_per_s=30e9, exchange_s=0.5e-6)


def results(
    *trials: SettingTrial, times: tuple[CallTime, ...] = (), skipped: tuple[str, ...] = ()
) -> BenchResults:
    return BenchResults(ONE_HOST, RATES, times, trials, skipped)


def trial(seconds: tuple[float, ...], usual: tuple[float, ...]) -> SettingTrial:
    return SettingTrial("RONDE_STAGING_BYTES", MIB, 16 * MIB, seconds, usual)


def test_a_call_stands_beside_its_expected_time_and_its_share_of_the_limit() -> None:
    measured = CallTime("allreduce", 60 * 10**6, 0.016, 30e9, is_symmetric=True)
    (row,) = as_json(results(times=(measured,)))["calls"]
    assert row["expected_seconds"] == pytest.approx(2 * 2 * 60e6 / 30e9 + 2 * 0.5e-6)
    assert row["share_of_limit"] == pytest.approx(0.5, rel=1e-3)
    line = next(line for line in describe(results(times=(measured,))).splitlines() if "allreduce" in line)
    assert line.split() == ["allreduce", "*", "57.2", "MiB", "16.00", "ms", "8.00", "ms", "3.75", "50%"]


def test_a_setting_is_recommended_only_if_it_was_faster_in_every_turn() -> None:
    found = describe(results(trial((0.010, 0.011), (0.013, 0.014))))
    assert "RONDE_STAGING_BYTES=1048576: an all-reduce of 16 MiB took 10.00 ms instead of 13.00 ms" in found
    for doubtful in (trial((0.010, 0.013), (0.013, 0.014)), trial((0.010, 0.010), (0.011, 0.011))):
        assert "No setting to recommend. Not faster: RONDE_STAGING_BYTES=1048576" in describe(
            results(doubtful)
        )


def test_symmetric_memory_is_recommended_by_the_largest_size_measured_both_ways() -> None:
    times = (
        CallTime("allreduce", MIB, 0.001, 30e9),
        CallTime("allreduce", 16 * MIB, 0.020, 30e9),
        CallTime("allreduce", 16 * MIB, 0.010, 30e9, is_symmetric=True),
    )
    assert "an allreduce of 16 MiB took 10.00 ms instead of 20.00 ms" in describe(results(times=times))


def test_what_was_skipped_is_named() -> None:
    assert "too long (--seconds): gather from 16 MiB on" in describe(
        results(skipped=("gather from 16 MiB on",))
    )


def test_trials_fit_the_job() -> None:
    assert {each.variable for each in trials_for(ONE_HOST, MIB)} == {"RONDE_STAGING_BYTES"}
    between = {each.variable for each in trials_for(JobShape(2, 1), MIB)}
    assert between == {"RONDE_TCP_STREAMS", "RONDE_DOUBLING_BYTES"}
    assert all(each.nbytes <= MIB for each in trials_for(JobShape(2, 1), MIB))
