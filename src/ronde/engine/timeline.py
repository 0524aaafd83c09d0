"""Decides which timeline file a rank writes, and when. The native side writes it (cpp/engine)."""

from __future__ import annotations

import logging
import os

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

    def stop(self) -> None:
        """Complete the file, if there is one."""
        trouble = self.native.stop()
        if trouble:
            _log.warning("rank %d: the timeline %s ends early: %s", self._rank, self._path, trouble)


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
