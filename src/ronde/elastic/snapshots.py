"""Snapshots: every few commits on disk, so that a job that ends can be started again, also with another world size.

The rules:
  1. A snapshot is a checkpoint (`ronde.checkpoints`, with its fences) of one or several files; its step is the number
     of the commit. Rank 0 writes the parts that are the same on all ranks, and each rank its sharded parts.
  2. A thread writes, so a commit does not wait for the disk. It copies the commit's memory piece by piece. If the next
     commit comes first, `before_save` copies the rest at once: at most one copy of the state beside the commit.
  3. A file is written under another name, and renamed once it is on the disk. So a full disk or a death leaves the
     snapshots before it.
  4. A snapshot that is due while one is being written is skipped, on all ranks alike.
  5. The newest complete snapshot whose checksums are right is restored.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ronde.checkpoints import Checkpoints, checkpoint_files
from ronde.comm.byte_exchange import allgather_bytes
from ronde.elastic.snapshot_files import SnapshotFile, read_snapshot_file
from ronde.elastic.snapshot_sets import SnapshotSet, shard_name, snapshot_sets, unwanted_files, whole_name
from ronde.elastic.state_parts import Part, ReshardablePart
from ronde.errors import ProtocolError, StaleRoundError, UsageError
from ronde.types import Min

if TYPE_CHECKING:
    from ronde.comm.communicator import Communicator

__all__ = ["Snapshots"]

_log = logging.getLogger("ronde.elastic")

_ABANDONED_S = 10.0  # from the creation of a draft to its lock
_SECURE_AFTER_S = 1.0  # a job that waits this long for workers may end
_TURN_S = 10.0
_SKIPPED_TOO_OFTEN = 3  # in a row

Load = Callable[[], None]
Shards = Callable[[], Mapping[int, Mapping[str, object]]]


class Snapshots:
    """The snapshots of a state in a folder. All ranks make one with the same arguments.

    Args:
        folder: on a file system that all hosts share; created if it does not exist.
        every: after how many commits a snapshot is written (1).
        keep: the number of complete snapshots to keep (2).

    Raises:
        UsageError: a number is less than 1.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 1, keep: int = 2) -> None:
        for name, number in (("every", every), ("keep", keep)):
            if number < 1:
                raise UsageError(f"{name}={number} is invalid: expected 1 or more")
        self.folder = Path(folder).absolute()
        self._every, self._keep = every, keep
        self._writer: _SnapshotThread | None = None
        self._beginning = threading.RLock()  # also for a signal handler of the thread that has it
        self._place = (0, 1)  # rank and size of the world that has made the commit
        # The newest commit of which this rank has written its files, or that it has restored.
        self._on_disk = -1
        self._skipped_in_row = 0
        self._has_warned = False

    # Commits

    def before_save(self) -> None:
        """Copy what is still to be written of an earlier commit: its memory is about to change. Raises no error."""
        if self._writer is not None:
            self._writer.detach()

    def after_save(self, commit: int, parts: Mapping[str, Part], world: Communicator) -> None:
        """Begin a snapshot if one is due. All ranks call it after each commit.

        Args:
            commit: the number of the commit, the same on all ranks.
            parts: by name, what the state consists of; the same names on all ranks.
            world: the ranks that have committed.

        Raises:
            PeerError: a rank was lost. The commit is not affected.
            UsageError: a part contains an object that cannot be pickled.
        """
        self._place = world.rank, world.size
        if commit % self._every:
            return
        is_there = commit == self._on_disk
        is_ready = self._writer is None or self._writer.is_done
        if _shards_in(parts):  # each rank knows only whether its own shards are there
            agreed = world.allreduce(np.array([is_ready, is_there], np.uint8), op=Min)
            is_ready, is_there = bool(agreed[0]), bool(agreed[1])
        if is_there:
            return
        if is_ready:
            self._skipped_in_row = 0
            self._begin(commit, parts)
            return
        self._skipped_in_row += 1
        if self._skipped_in_row == _SKIPPED_TOO_OFTEN and not self._has_warned and world.rank == 0:
            self._has_warned = True
            _log.warning(
                "the disk of %s is slower than the commits: the snapshot of commit %d is skipped like those "
                "before it, because an earlier one is still being written; write fewer (every=%d, for example)",
                *(self.folder, commit, 2 * self._every),
            )

    def finish(self, commit: int, parts: Mapping[str, Part]) -> None:
        """Return when the last commit is on the disk, or cannot be written, which is logged. Every rank calls it."""
        self.flush()
        if commit > self._on_disk:
            self._begin(commit, parts)
            self.flush()

    def flush(self) -> None:
        """Return when this process writes no snapshot."""
        if self._writer is not None:
            self._writer.join()

    def _begin(self, commit: int, parts: Mapping[str, Part]) -> None:
        rank, size = self._place
        files = []
        if shards := _shards_in(parts):
            files.append(SnapshotFile(shard_name(rank, size), commit, _payloads(shards)))
        if rank == 0:
            files.append(SnapshotFile(whole_name(size if shards else 0), commit, _payloads(_whole(parts))))
        self._write(commit, files)

    def _write(self, commit: int, files: Sequence[SnapshotFile]) -> None:
        if files:
            self._writer = _SnapshotThread(self.folder, self._keep, commit, files, self._note_written)

    def _note_written(self, commit: int) -> None:
        self._on_disk = commit

    # The end of a job

    @contextlib.contextmanager
    def securing(self, commit: int, parts: Mapping[str, Part], shards: Shards = dict) -> Iterator[None]:
        """Write the last commit if the block, in which the job waits for workers, takes longer than a second.

        The job may end then. Every survivor calls it; one of them writes the parts that are the same on all ranks. An
        exception of the block gets a note that says how to resume.

        Args:
            commit: the number of the last commit; -1 if there is none.
            parts: as for `after_save`.
            shards: returns the payloads of all shards of that commit that this process has, by rank and part.
        """
        is_over = threading.Event()

        def secure() -> None:
            if not is_over.wait(_SECURE_AFTER_S):
                self._write_last(commit, parts, shards, is_over)

        thread = threading.Thread(target=secure, name="ronde-last-commit", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            is_over.set()
            thread.join()
            self._write_last(commit, parts, shards)
            error.add_note(self.how_to_resume())
            raise
        finally:
            with (
                self._beginning
            ):  # now the thread has begun to write, so that `before_save` works, or never will
                is_over.set()

    def end(self, commit: int, parts: Mapping[str, Part], shards: Shards) -> None:
        """Write the last commit before this process ends, and print how to resume. Raises no error.

        Args:
            commit: the number of the last commit; -1 if there is none.
            parts: as for `after_save`.
            shards: as for `securing`.
        """
        if self._write_last(commit, parts, shards):
            sys.stderr.write(f"ronde: {self.how_to_resume()}\n")
            sys.stderr.flush()

    def how_to_resume(self) -> str:
        """Return a sentence for the error that ends the job. Raises no error."""
        try:
            found = [each for each in snapshot_sets(checkpoint_files(self.folder)) if each.is_complete]
        except OSError as error:
            return f"The folder of snapshots {self.folder} cannot be read: {error.strerror}."
        if not found:
            return f"{self.folder} has no complete snapshot: the job cannot be resumed."
        return (
            f"Commit {found[-1].commit} is in {self.folder}: start the job again with the same command to go on from "
            "there."
        )

    def _write_last(
        self, commit: int, parts: Mapping[str, Part], shards: Shards, is_over: threading.Event | None = None
    ) -> bool:
        """Write what is missing of a commit, unless `is_over` is set before that begins.

        Return whether the commit is complete on the disk now; of several processes that end together, to the last one.
        """
        self.flush()
        if commit < 0:
            return False
        try:
            with _turn(self.folder):
                with self._beginning:
                    if is_over is not None and is_over.is_set():
                        return False
                    files = self._missing_files(commit, parts, shards())
                    self._write(commit, files)
                self.flush()
                found = snapshot_sets(checkpoint_files(self.folder))
                return any(each.is_complete and each.commit == commit for each in found) and (
                    bool(files) or self._place[0] == 0
                )
        except Exception as error:
            _log.warning("the last commit, %d, cannot be written to %s: %s", commit, self.folder, error)
        return False

    def _missing_files(
        self, commit: int, parts: Mapping[str, Part], shards: Mapping[int, Mapping[str, object]]
    ) -> list[SnapshotFile]:
        """Return the files of a commit that nobody has written and this process can write."""
        _, size = self._place
        num_shards = size if _shards_in(parts) else 0
        there = next(
            (
                each
                for each in reversed(snapshot_sets(checkpoint_files(self.folder)))
                if (each.commit, each.num_shards) == (commit, num_shards)
            ),
            SnapshotSet(0, commit, num_shards),
        )
        files = [
            SnapshotFile(shard_name(shard, size), commit, payloads)
            for shard, payloads in shards.items()
            if shard not in there.shards
        ]
        if there.whole is None:
            files.append(SnapshotFile(whole_name(num_shards), commit, _payloads(_whole(parts))))
        return files

    # The beginning of a job

    def restore(self, parts: Mapping[str, Part], world: Communicator) -> int | None:
        """Load the newest snapshot, and return the number of its commit; None if there is none. All ranks call it.

        Args:
            parts: as for `after_save`. Rank 0 loads those that are the same on all ranks, and the caller sends them to
                the others; each rank loads its sharded parts. If the number of shards is not the number of ranks, a
                `ReshardablePart` loads all shards.
            world: the ranks that start.

        Raises:
            UsageError: the snapshot has another number of shards than the world; or the state has other parts; or the
                folder cannot be read; or a file contains a pickle, and another user can have written it.
        """
        for candidate in reversed(self._candidates(world)):
            problem, is_damaged, loads = "", True, []
            try:
                loads = self._read(candidate, parts, world)
            except (OSError, ProtocolError) as error:
                problem = str(error)
            except UsageError as error:
                problem, is_damaged = str(error), False
            if not (first := _first_problem(world, problem, is_damaged)):
                for load in loads:
                    load()
                self._on_disk, self._place = candidate.commit, (world.rank, world.size)
                return candidate.commit
            if world.rank == 0:
                _log.warning("the snapshot of commit %d is not used: %s", candidate.commit, first)
        return None

    def _candidates(self, world: Communicator) -> list[SnapshotSet]:
        """Return on all ranks the complete snapshots that rank 0 sees, the newest last."""
        names: list[str] = []
        problem = ""
        if world.rank == 0:
            try:
                self.folder.mkdir(0o755, parents=True, exist_ok=True)
                names = [each.path.name for each in checkpoint_files(self.folder)]
            except OSError as error:
                problem = f"the folder of snapshots {self.folder} cannot be read: {error.strerror}"
        _first_problem(world, problem, is_damaged=False)
        names = json.loads(allgather_bytes(world, json.dumps(names).encode())[0])
        return [each for each in snapshot_sets(checkpoint_files(self.folder, names)) if each.is_complete]

    def _read(self, candidate: SnapshotSet, parts: Mapping[str, Part], world: Communicator) -> list[Load]:
        """Return what loads this rank's parts, once all ranks have read theirs."""
        loads: list[Load] = []
        if world.rank == 0:
            assert candidate.whole is not None
            loads += _loads(_whole(parts), candidate.whole, candidate)
        shards = _shards_in(parts)
        if candidate.num_shards == world.size:
            return loads + _loads(shards, candidate.shards[world.rank], candidate)
        for name, part in shards.items():
            if not isinstance(part, ReshardablePart):
                raise UsageError(
                    f"the snapshot of commit {candidate.commit} in {self.folder} has {candidate.num_shards} shards, "
                    f"and the job has {world.size} ranks: start it with {candidate.num_shards}, or give the part "
                    f"{name!r} a method load_shards(payloads), which takes all shards"
                )
        if shards:
            paths = [candidate.shards[each] for each in range(candidate.num_shards)]
            found = [read_snapshot_file(path, candidate.commit) for path in paths]
            for name, part in shards.items():
                assert isinstance(part, ReshardablePart)
                payloads = [each[name] for each in found]
                loads.append(lambda part=part, payloads=payloads: part.load_shards(payloads))  # type: ignore[misc]
        return loads


def _loads(parts: Mapping[str, Part], path: Path, candidate: SnapshotSet) -> list[Load]:
    payloads = read_snapshot_file(path, candidate.commit)
    if payloads.keys() != parts.keys():
        raise UsageError(
            f"{path} has the parts {', '.join(sorted(payloads)) or 'none'}, and the state of this program has "
            f"{', '.join(sorted(parts)) or 'none'}: give another folder for snapshots, or start the program that has "
            "written them"
        )
    return [lambda part=part, name=name: part.load(payloads[name]) for name, part in parts.items()]  # type: ignore[misc]


def _first_problem(world: Communicator, problem: str, is_damaged: bool) -> str:
    """Return on all ranks the first rank's problem, "" if none has one. Raises it unless a file is damaged."""
    mine = json.dumps([problem, is_damaged]).encode()
    for rank, text in enumerate(allgather_bytes(world, mine)):
        found, was_damaged = json.loads(text)
        if found and not was_damaged:
            raise UsageError(found)
        if found:
            return f"rank {rank}: {found}"
    return ""


def _shards_in(parts: Mapping[str, Part]) -> dict[str, Part]:
    return {name: part for name, part in parts.items() if part.is_sharded}


def _whole(parts: Mapping[str, Part]) -> dict[str, Part]:
    return {name: part for name, part in parts.items() if not part.is_sharded}


def _payloads(parts: Mapping[str, Part]) -> dict[str, object]:
    return {name: part.payload() for name, part in parts.items()}


class _SnapshotThread:
    """The thread that writes the files of one commit, and removes old ones."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        commit: int,
        files: Sequence[SnapshotFile],
        note_written: Callable[[int], None],
    ) -> None:
        self._folder, self._keep, self._commit, self._files = folder, keep, commit, files
        self._note_written = note_written
        self._thread = threading.Thread(target=self._run, name="ronde-snapshot", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def detach(self) -> None:
        if not self.is_done:
            for file in self._files:
                file.detach()

    def _run(self) -> None:
        try:
            _remove_abandoned_drafts(self._folder)
            checkpoints = Checkpoints(self._folder)  # of the present round
            for file in self._files:
                with checkpoints.writing_part(self._commit, file.name) as path:
                    file.write(path)
            self._note_written(self._commit)
            self._remove_old_files()
        except (OSError, StaleRoundError) as error:
            text = " ".join([str(error), *getattr(error, "__notes__", [])])
            _log.warning("the snapshot of commit %d is not saved: %s", self._commit, text)
        except Exception:
            _log.exception("the snapshot of commit %d is not saved", self._commit)

    def _remove_old_files(self) -> None:
        for path in unwanted_files(snapshot_sets(checkpoint_files(self._folder)), self._keep):
            path.unlink(missing_ok=True)


def _remove_abandoned_drafts(folder: Path) -> None:
    """Remove what writers have left that were killed: a living one has locked its file."""
    for path in folder.glob("draft-*.part-*"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > _ABANDONED_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Let one process of this folder after the other write. A frozen one is waited for only briefly."""
    folder.mkdir(0o755, parents=True, exist_ok=True)
    until_s = time.monotonic() + _TURN_S
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while time.monotonic() < until_s:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)
