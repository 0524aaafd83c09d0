"""Merging timelines: clocks, ticks, and files that were cut off."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ronde.cli.trace_merge import Clock, common_clock, offset_at, read_records, retime, survey_timeline
from ronde.errors import UsageError

Record = dict[str, Any]


def timeline(rank: int, steady_ns: int, clocks: list[Clock], *more: Record, wall_ns: int = 0) -> list[str]:
    """The lines of a file of one of three ranks, with a track `grad`."""
    about = {"rank": rank, "size": 3, "host": f"host-{rank}", "steady_ns": steady_ns, "wall_ns": wall_ns}
    head: list[Record] = [{"ph": "M", "pid": rank, "name": "ronde_timeline", "args": about}]
    head += [{"ph": "M", "pid": rank, "name": "ronde_clock", "args": vars(clock)} for clock in clocks]
    head += [{"ph": "M", "pid": rank, "tid": 7 + rank, "name": "thread_name", "args": {"name": "grad"}}]
    lines = [("[ " if i == 0 else ",") + json.dumps(each) for i, each in enumerate([*head, *more])]
    return [*lines, "   ", "]"]


def negotiate(rank: int, ts: float, dur: float, decision: int) -> Record:
    place = {"pid": rank, "tid": 7 + rank}
    return {
        "ph": "X",
        **place,
        "ts": ts,
        "dur": dur,
        "name": "NEGOTIATE_ALLREDUCE",
        "args": {"decision": decision},
    }


def merged(*files: list[str]) -> list[Record]:
    surveys = [survey_timeline(lines, "file") for lines in files]
    common = common_clock(surveys)
    return [each for lines, mine in zip(files, surveys) for each in retime(lines, mine, surveys, common)]


def ticks(all_records: list[Record], pid: int) -> dict[str, float]:
    return {each["name"]: each["ts"] for each in all_records if each["ph"] == "i" and each["pid"] == pid}


def test_times_are_those_of_rank_0() -> None:
    # Rank 1's clock is 5 ms behind and its file began 1 ms after rank 0's.
    zero = timeline(0, 100_000_000, [Clock(100_000_000, 0, 0)], negotiate(0, 10.0, 2000.0, 3))
    one = timeline(1, 96_000_000, [Clock(96_000_000, 5_000_000, 900)], negotiate(1, 500.0, 510.0, 3))
    spans = {each["pid"]: each for each in merged(zero, one) if each["name"] == "NEGOTIATE_ALLREDUCE"}
    assert (spans[0]["ts"], spans[1]["ts"], spans[1]["dur"]) == (10.0, 1500.0, 510.0)


def test_every_negotiation_has_a_tick_for_every_rank() -> None:
    tick = {"ph": "i", "pid": 0, "tid": 7, "ts": 12.0}
    zero = timeline(
        0,
        0,
        [Clock(0, 0, 0)],
        {**tick, "name": "rank 0"},
        {**tick, "name": "rank 2"},  # of the same host; its file is not there
        negotiate(0, 10.0, 90.0, 3),
        negotiate(0, 200.0, 50.0, 4),  # rank 1 has no record of that
        {**tick, "name": "CYCLE_START"},
    )
    one = timeline(1, 0, [Clock(0, 30_000, 0)], negotiate(1, 20.0, 51.0, 3))
    records = merged(zero, one)
    assert ticks([each for each in records if each.get("ts", 0) < 200], 0) == {
        "rank 0": 10.0,
        "rank 1": 50.0,
        "rank 2": 12.0,
        "CYCLE_START": 12.0,
    }
    assert ticks(records, 1) == {"rank 0": 10.0, "rank 1": 50.0}
    assert [each["ts"] for each in records if each["name"] == "rank 0" and each["pid"] == 0] == [10.0, 200.0]


def test_negotiations_that_were_opened_before_they_were_over() -> None:
    place = {"pid": 0, "tid": 7, "name": "NEGOTIATE_ALLREDUCE"}
    opened, closed = {"ph": "B", **place, "ts": 10.0}, {"ph": "E", **place, "ts": 900.0}
    zero = timeline(
        0, 0, [Clock(0, 0, 0)], opened, {**closed, "args": {"decision": 5}}, {**opened, "ts": 950.0}
    )
    one = timeline(1, 0, [Clock(0, 0, 0)], negotiate(1, 800.0, 100.0, 5))
    assert ticks(merged(zero, one), 1) == {"rank 0": 10.0, "rank 1": 800.0}
    assert ticks(merged(zero, one), 0) == {"rank 0": 10.0, "rank 1": 800.0}


def test_clocks_that_drift() -> None:
    clocks = [Clock(1000, 50, 1), Clock(2000, 150, 1), Clock(3000, 150, 1)]
    assert [offset_at(clocks, at) for at in (0, 1000, 1500, 2000, 2500, 9000)] == [50, 50, 100, 150, 150, 150]


def test_a_rank_that_was_killed_before_its_clock_was_measured() -> None:
    zero = timeline(0, 1_000_000, [Clock(1_000_000, 0, 0)], wall_ns=50_000_000)
    one = timeline(1, 7_000_000, [], negotiate(1, 1.0, 2.0, 3), wall_ns=52_000_000)
    common = common_clock([survey_timeline(zero, "zero"), survey_timeline(one, "one")])
    assert common.by_wall_clock == (1,)
    assert common.time_of(1, 7_000_000) == 2_000_000


def test_files_that_end_anywhere() -> None:
    whole = "\n".join(timeline(0, 0, [Clock(0, 0, 0)], negotiate(0, 1.0, 2.0, 3), negotiate(0, 4.0, 2.0, 5)))
    for end in range(1, len(whole)):
        lines = whole[:end].split("\n")
        found = list(read_records(lines))
        assert None not in found[:-1]
        assert len(found) <= 5
        if len(lines) > 1:
            assert survey_timeline(lines, "file").torn == found.count(None)


def test_what_is_no_timeline() -> None:
    with pytest.raises(UsageError, match=r"notes\.txt is not a timeline of a rank"):
        survey_timeline(["Dear diary,", "[1, 2]"], "notes.txt")
