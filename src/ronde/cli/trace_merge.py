"""Merges the timelines of several ranks into one trace, on rank 0's clock, with a tick for every rank. Pure.

A timeline is read twice. `survey_timeline` finds its rank, its clock measurements and the time of each submission;
`retime` then yields its records with times on the common clock. Both take the lines of the file, of which each holds a
record, so only the times of submissions are in memory at once.

A decision has the same number on all ranks: it identifies the records of a tensor in different files.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ronde.errors import UsageError

__all__ = ["Clock", "CommonClock", "Survey", "common_clock", "read_records", "retime", "survey_timeline"]

Record = dict[str, Any]
Occasion = tuple[str, int]  # a tensor's track, and the number of the decision


@dataclass(frozen=True)
class Clock:
    """A measurement: its time on this rank's clock, the offset to rank 0's clock, and the error of the offset."""

    steady_ns: int
    offset_ns: int
    error_ns: int


@dataclass
class Survey:
    """The facts about one rank's timeline."""

    rank: int = -1
    size: int = 0
    host: str = ""
    steady_ns: int = 0
    wall_ns: int = 0
    clocks: list[Clock] = field(default_factory=list)
    submitted_ns: dict[Occasion, int] = field(default_factory=dict)  # on this rank's clock
    torn: int = 0  # lines that are not records: the process was killed, or the file was edited


@dataclass(frozen=True)
class CommonClock:
    """The common clock: the offsets of each rank's clock to rank 0's, and the time on rank 0's clock that is zero."""

    clocks: Mapping[int, Sequence[Clock]]
    zero_ns: int
    by_wall_clock: tuple[int, ...]  # ranks without clock measurements

    def time_of(self, rank: int, steady_ns: int) -> int:
        """Return a time of a rank's clock on the common clock, in nanoseconds."""
        return steady_ns + offset_at(self.clocks[rank], steady_ns) - self.zero_ns


def read_records(lines: Iterable[str]) -> Iterator[Record | None]:
    """Yield the records of a timeline; None for a line that is not a record."""
    for line in lines:
        text = line.strip().removeprefix("[").removeprefix(",").strip()
        if text in ("", "]", "]]"):
            continue
        try:
            record = json.loads(text)
        except ValueError:
            record = None
        yield record if isinstance(record, dict) else None


def survey_timeline(lines: Iterable[str], name: str) -> Survey:
    """Return the facts about a timeline. `name`: of the file, for the UsageError if it is not a timeline."""
    found = Survey()
    tracks = _Tracks()
    for record in read_records(lines):
        if record is None:
            found.torn += 1
            continue
        arguments = record.get("args", {})
        if record.get("name") == "ronde_timeline":
            found.rank, found.size, found.host = arguments["rank"], arguments["size"], arguments["host"]
            found.steady_ns, found.wall_ns = arguments["steady_ns"], arguments["wall_ns"]
        elif record.get("name") == "ronde_clock":
            found.clocks.append(Clock(**arguments))
        occasion, submitted_us = tracks.follow(record)
        if occasion is not None:
            found.submitted_ns[occasion] = found.steady_ns + round(submitted_us * 1000)
    if found.rank < 0:
        raise UsageError(f"{name} is not a timeline of a rank")
    return found


def common_clock(surveys: Sequence[Survey]) -> CommonClock:
    """Return the clock of the merged trace, which begins with the earliest file."""
    clocks: dict[int, Sequence[Clock]] = {each.rank: _sorted_clocks(each) for each in surveys}
    # The wall clock minus rank 0's clock, from a rank that has measured its offset.
    walls = [
        each.wall_ns - each.steady_ns - clocks[each.rank][0].offset_ns for each in surveys if each.clocks
    ]
    wall_ns = walls[0] if walls else surveys[0].wall_ns - surveys[0].steady_ns
    without = [each for each in surveys if not each.clocks]
    for each in without:
        clocks[each.rank] = [Clock(each.steady_ns, each.wall_ns - each.steady_ns - wall_ns, 0)]
    begins = [each.steady_ns + offset_at(clocks[each.rank], each.steady_ns) for each in surveys]
    return CommonClock(clocks, min(begins), tuple(each.rank for each in without))


def _sorted_clocks(survey: Survey) -> list[Clock]:
    return sorted(survey.clocks, key=lambda clock: clock.steady_ns)


def offset_at(clocks: Sequence[Clock], steady_ns: int) -> int:
    """Return the offset of a rank's clock at a time, interpolated linearly between two measurements."""
    after = bisect.bisect(clocks, steady_ns, key=lambda clock: clock.steady_ns)
    if after in (0, len(clocks)):
        return clocks[min(after, len(clocks) - 1)].offset_ns
    left, right = clocks[after - 1], clocks[after]
    passed, span_ns = steady_ns - left.steady_ns, right.steady_ns - left.steady_ns
    return left.offset_ns + (right.offset_ns - left.offset_ns) * passed // span_ns


def retime(
    lines: Iterable[str], mine: Survey, surveys: Sequence[Survey], common: CommonClock
) -> Iterator[Record]:
    """Yield a file's records on the common clock; each `NEGOTIATE_...` gets a tick for each rank with a file."""
    tracks = _Tracks()
    for record in read_records(lines):
        if record is None:
            continue
        if record.get("ph") == "i" and tracks.keep_tick(record):
            continue
        occasion, _ = tracks.follow(record)
        moved = _moved(record, mine, common)
        if occasion is not None:
            ticks = tracks.take_ticks(record)
            for each in surveys:
                submitted_ns = each.submitted_ns.get(occasion)
                if submitted_ns is not None:
                    name = f"rank {each.rank}"
                    at_us = common.time_of(each.rank, submitted_ns) / 1000
                    ticks.pop(name, None)
                    yield {**_tick_like(record), "ts": at_us, "name": name}
            for tick in ticks.values():
                yield _moved(tick, mine, common)
        yield moved
    for tick in tracks.take_rest():
        yield _moved(tick, mine, common)


def _moved(record: Record, mine: Survey, common: CommonClock) -> Record:
    if "ts" not in record:
        return record
    steady_ns = mine.steady_ns + round(record["ts"] * 1000)
    return {**record, "ts": common.time_of(mine.rank, steady_ns) / 1000}


def _tick_like(record: Record) -> Record:
    return {"ph": "i", "pid": record["pid"], "tid": record["tid"]}


class _Tracks:
    """The state of each track while the records of a file pass."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._opened_us: dict[int, float] = {}  # negotiations that have begun
        self._ticks: dict[int, dict[str, Record]] = {}  # of a negotiation whose record is still to come

    def follow(self, record: Record) -> tuple[Occasion | None, float]:
        """Return the occasion and the time of submission, if this record contains them."""
        tid, kind = record.get("tid", 0), record.get("ph")
        if record.get("name") == "thread_name":
            self._names[tid] = record["args"]["name"]
        if not record.get("name", "").startswith("NEGOTIATE_"):
            return None, 0.0
        if kind == "B":
            self._opened_us[tid] = record["ts"]
        decision = record.get("args", {}).get("decision")
        if decision is None or (kind == "E" and tid not in self._opened_us):
            return None, 0.0
        begin_us = self._opened_us.pop(tid) if kind == "E" else record["ts"]
        return (self._names.get(tid, ""), decision), begin_us

    def keep_tick(self, record: Record) -> bool:
        """Keep the tick of a rank until the record of its negotiation. Return False for other ticks."""
        if not record["name"].startswith("rank "):
            return False
        self._ticks.setdefault(record["tid"], {})[record["name"]] = record
        return True

    def take_ticks(self, record: Record) -> dict[str, Record]:
        return self._ticks.pop(record["tid"], {})

    def take_rest(self) -> Iterator[Record]:
        for ticks in self._ticks.values():
            yield from ticks.values()
