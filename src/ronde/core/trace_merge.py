"""Makes one trace of the timelines of several ranks: all on rank 0's clock, with a tick for every rank.

A timeline is read twice: `survey_timeline` finds out whose it is, what its clock says and when each tensor was
submitted; `retime` then passes its records on with times on the common clock. Both take the file's lines, of which each
holds a record, so that nothing has to be in memory at once but the times of submissions.

Records that one decision has brought are told by the decision's number, which is the same on all ranks.
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
Occasion = tuple[str, int]  # a tensor's track, and the decision


@dataclass(frozen=True)
class Clock:
    """A measurement: when (this rank's clock), what to add to get rank 0's clock, and how wrong that may be."""

    steady_ns: int
    offset_ns: int
    error_ns: int


@dataclass
class Survey:
    """What one rank's file tells about itself."""

    rank: int = -1
    size: int = 0
    host: str = ""
    steady_ns: int = 0
    wall_ns: int = 0
    clocks: list[Clock] = field(default_factory=list)
    submitted_ns: dict[Occasion, int] = field(default_factory=dict)  # on this rank's clock
    torn: int = 0  # lines that are no records: the process was killed, or somebody has edited the file


@dataclass(frozen=True)
class CommonClock:
    """The common clock: what is to be added to each rank's, and its zero (both on rank 0's clock)."""

    clocks: Mapping[int, Sequence[Clock]]
    zero_ns: int
    by_wall_clock: tuple[int, ...]  # ranks of which nothing better is known

    def time_of(self, rank: int, steady_ns: int) -> int:
        """Return a moment on the common clock, in nanoseconds."""
        return steady_ns + offset_at(self.clocks[rank], steady_ns) - self.zero_ns


def read_records(lines: Iterable[str]) -> Iterator[Record | None]:
    """Yield the records of a timeline; None for a line that is none."""
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
    """Return what a file (`name`: for the error) tells about itself. Raises UsageError if it is no timeline."""
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
        raise UsageError(f"{name} is no timeline of a rank")
    return found


def common_clock(surveys: Sequence[Survey]) -> CommonClock:
    """Return the clock on which the files can be merged; it begins with the first of them."""
    clocks: dict[int, Sequence[Clock]] = {each.rank: _sorted_clocks(each) for each in surveys}
    # How much later it is by the wall clock than by rank 0's: told by rank 0 or whoever has measured.
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
    """Return what to add to a rank's clock at that moment: between two measurements on the line through them."""
    after = bisect.bisect(clocks, steady_ns, key=lambda clock: clock.steady_ns)
    if after in (0, len(clocks)):
        return clocks[min(after, len(clocks) - 1)].offset_ns
    left, right = clocks[after - 1], clocks[after]
    passed, span_ns = steady_ns - left.steady_ns, right.steady_ns - left.steady_ns
    return left.offset_ns + (right.offset_ns - left.offset_ns) * passed // span_ns


def retime(
    lines: Iterable[str], mine: Survey, surveys: Sequence[Survey], common: CommonClock
) -> Iterator[Record]:
    """Yield a file's records on the common clock; every `NEGOTIATE_...` gets a tick for each rank that is known."""
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
    """What has to be remembered of each track while the records of a file pass."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._opened_us: dict[int, float] = {}  # negotiations that have begun
        self._ticks: dict[int, dict[str, Record]] = {}  # of a negotiation whose record is still to come

    def follow(self, record: Record) -> tuple[Occasion | None, float]:
        """Return which tensor was decided when, and when it was submitted, if this record tells that."""
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
        """Keep the tick of a rank until its negotiation comes; False if it is another one."""
        if not record["name"].startswith("rank "):
            return False
        self._ticks.setdefault(record["tid"], {})[record["name"]] = record
        return True

    def take_ticks(self, record: Record) -> dict[str, Record]:
        return self._ticks.pop(record["tid"], {})

    def take_rest(self) -> Iterator[Record]:
        for ticks in self._ticks.values():
            yield from ticks.values()
