"""Decides which timeline file a rank writes, and when. The native side writes it (cpp/engine).

Rare events of Python code, such as the recoveries of an elastic training, are added to the file when it is complete.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ronde import _native
from ronde.errors import UsageError
from ronde.settings import Settings

__all__ = ["Timeline", "timeline_path"]

_log = logging.getLogger("ronde.timeline")


class Timeline:
    """The timeline of this rank, off until `start`. Several engines may record into `native`."""

    def __init__(self, rank: int, size: int, host: str, round: int = 0) -> None:
        """`round`: of the job, if this process has outlived an earlier one, whose file it keeps."""
        self._round = round
        self.native = _native.Timeline()
        self._rank, self._size, self._host = rank, size, host
        self._path = ""
        self._notes: list[_Note] = []

    def start_as_set(self, settings: Settings) -> None:
        """Start the timeline if the setting `timeline` names a path."""
        if settings.timeline and settings.timeline != "DYNAMIC":  # Horovod's word for "not yet"
            self.start(settings.timeline, settings.timeline_mark_cycles)

    def start(self, file_path: str | os.PathLike[str], mark_cycles: bool) -> None:
        """Create the file and start to record (see `ronde.start_timeline`)."""
        wanted = os.fspath(file_path)
        path = timeline_path(wanted, self._rank, self._size, os.path.isdir(wanted))
        if self._round:
            stem, suffix = os.path.splitext(path)
            path = f"{stem}.round-{self._round}{suffix}"
        if os.path.exists(path) and not os.path.isfile(path):
            raise UsageError(f"cannot write a timeline to {path}: it is not a file")
        os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
        self.native.start(path, self._rank, self._size, self._host, mark_cycles)
        self._path = path

    def note(self, track: str, text: str, facts: dict[str, object]) -> None:
        """Note an event at this moment, if the timeline is on; `stop` adds it to the file as a tick.

        `track`: a name that no tensor has. `facts`: the arguments of the tick, which JSON can hold.
        """
        if self.native.is_on():
            self._notes.append(_Note(time.monotonic_ns(), track, text, facts))

    def stop(self) -> None:
        """Complete the file, if there is one."""
        trouble = self.native.stop()
        notes, self._notes = self._notes, []
        if notes and not trouble:
            try:
                _add_notes(self._path, self._rank, notes)
            except (OSError, ValueError) as error:
                trouble = str(error)
        if trouble:
            _log.warning("rank %d: the timeline %s ends early: %s", self._rank, self._path, trouble)


class _Note(NamedTuple):
    at_ns: int
    track: str
    text: str
    facts: dict[str, object]


_FIRST_TRACK = 1 << 20  # tensors have smaller numbers (cpp/engine/timeline.h)


def _add_notes(path: str, rank: int, notes: Sequence[_Note]) -> None:
    """Add ticks to a complete timeline. Raises OSError, and ValueError for a file that is not one."""
    tracks = {each.track: _FIRST_TRACK + number for number, each in enumerate(notes)}
    records: list[dict[str, object]] = [
        {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": track}}
        for track, tid in tracks.items()
    ]
    with open(path, "r+b") as file:
        begin_ns = _begin_of(file.readline() for _ in range(8))
        for each in notes:
            at = {"pid": rank, "tid": tracks[each.track], "ts": (each.at_ns - begin_ns) / 1000}
            records.append({"ph": "i", **at, "name": each.text, "args": each.facts})
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 16, 0))
        tail = file.read().rstrip()
        if not tail.endswith(b"]"):
            raise ValueError("the file is not a complete timeline")
        file.seek(max(size - 16, 0) + len(tail) - 1)
        file.write("".join(f"\n,{json.dumps(record)}" for record in records).encode() + b"\n]")
        file.truncate()


def _begin_of(lines: Iterable[bytes]) -> int:
    """Return the time of the steady clock that is zero in a timeline, from its first records."""
    for line in lines:
        if b'"ronde_timeline"' in line:
            begin: int = json.loads(line.strip().strip(b"[,]"))["args"]["steady_ns"]
            return begin
    raise ValueError("the file is not a timeline")


def timeline_path(wanted: str, rank: int, size: int, is_directory: bool) -> str:
    """Return the path of one rank's file. `wanted`: the path that the user gave, perhaps different on each rank.

    `{rank}` in it stands for the rank. In a directory (or a path that ends in a slash), the file is `rank-N.json`.
    Otherwise, with more than one rank, the rank goes before the suffix: `run.json` becomes `run-0.json`.
    """
    if "{rank}" in wanted:
        return wanted.replace("{rank}", str(rank))
    if is_directory or wanted.endswith("/"):
        return f"{wanted.rstrip('/')}/rank-{rank}.json"
    if size == 1:
        return wanted
    folder, slash, name = wanted.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    numbered = f"{stem}-{rank}.{suffix}" if dot and stem else f"{name}-{rank}"
    return folder + slash + numbered
