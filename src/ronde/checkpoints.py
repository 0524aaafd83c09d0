"""Checkpoints in a folder that all rounds of a job share, protected from workers of earlier rounds.

A worker whose node was taken for dead may be frozen, and resume long after the job has continued without it. No lock
keeps it from writing then, but file names make its checkpoints harmless:

1. A checkpoint is a file, `fence-000004.step-000000120`, written under another name and renamed when it is complete.
   Ronde never overwrites a file.
2. A *fence* is a number that grows with every round that opens the folder. The first rank of a round to open it links a
   file `fence-000004` into it, which contains the job and the round; the other ranks of the round find that file.
3. A round that finds a fence above its own is over: opening and saving raise StaleRoundError.
4. The latest checkpoint is the one with the highest fence and, among these, the highest step. So a worker of an earlier
   round replaces nothing, even if it writes between its last check and the renaming.
5. Several ranks can write one checkpoint, a *part* each: `fence-000004.step-000000120.part-whole`. They alone know when
   such a checkpoint is complete, so they also remove the old ones.

Source: the fencing tokens of Kleppmann, Designing Data-Intensive Applications, chapter 8, "The leader and the lock".
"""

from __future__ import annotations

import errno
import operator
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, SupportsIndex

from ronde.environment import environment
from ronde.errors import StaleRoundError, UsageError
from ronde.trusted_files import describe_foreign_owner, describe_other_writers, owner_of_new_files

__all__ = ["CheckpointFile", "Checkpoints", "checkpoint_files", "require_own"]

_MAY_BE_PROGRAM = "and a checkpoint there can contain a program, which would run as this user"

_FENCE = re.compile(r"fence-(\d{6,})")
_CHECKPOINT = re.compile(r"fence-(\d{6,})\.step-(\d{9,})(?:\.(part-[a-z0-9-]+))?")
_FULL_BYTES = 64 * 1024  # with less free space a disk counts as full, because file systems need some


class _Round(NamedTuple):
    """A round of a job, with the launcher's number; `job` is unique for each start of a job."""

    job: str
    number: int


class CheckpointFile(NamedTuple):
    """A complete file of a checkpoint; `part`: "" if it is the whole checkpoint."""

    fence: int
    step: int
    part: str
    path: Path


def checkpoint_files(folder: Path, names: Iterable[str] | None = None) -> list[CheckpointFile]:
    """Return the complete files of checkpoints in a folder, the newest last. Raises OSError.

    `names`: those in the folder, as another process sees them (None: look).
    """
    if names is None:
        names = [path.name for path in folder.iterdir()]
    return sorted(
        CheckpointFile(int(match[1]), int(match[2]), match[3] or "", folder / name)
        for name in names
        if (match := _CHECKPOINT.fullmatch(name))
    )


class Checkpoints:
    """The checkpoints in a folder, for the round in which this process runs.

        checkpoints = ronde.Checkpoints("checkpoints/")
        if latest := checkpoints.latest():
            model.load_state_dict(torch.load(latest))
        ...
        if ronde.rank() == 0:
            with checkpoints.writing(step) as path:
                torch.save(model.state_dict(), path)

    Ranks may open the folder at any time and in any order; usually all read and rank 0 writes. The folder must be on a
    file system that all nodes share and that has hard links (NFS, Lustre and local ones do). Launchers other than
    `ronde run` have no rounds, so there no process is refused.

    Args:
        folder: created if it does not exist.
        keep: the number of complete checkpoints to keep (default: 2); older ones are deleted after each save.

    Raises:
        StaleRoundError: a later round of the job, or another job, now uses the folder.
        UsageError: `keep` is less than 1.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep} is invalid: expected 1 or more")
        self.folder = Path(folder)
        self._keep = keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self._round = _this_round()
        self._fence = self._open()

    def latest(self) -> Path | None:
        """Return the path of the newest complete checkpoint, or None. Raises OSError if the folder cannot be read."""
        found = self._checkpoints()
        return found[-1] if found else None

    def step_of(self, checkpoint: Path) -> int:
        """Return the step at which a checkpoint was saved.

        Args:
            checkpoint: a path that `latest` returned.

        Raises:
            UsageError: the path does not have the name of a checkpoint.
        """
        match = _CHECKPOINT.fullmatch(checkpoint.name)
        if match and not match[3]:
            return int(match[2])
        raise UsageError(f"{checkpoint} is not named like a checkpoint (fence-000000.step-000000000)")

    def at(self, step: int) -> Path:
        """Return the path of the complete checkpoint of a step.

        Args:
            step: the step at which it was saved.

        Raises:
            UsageError: there is none; the error lists those that there are.
        """
        for _, saved_at, path in reversed(self._found()):
            if saved_at == step:
                return path
        steps = ", ".join(str(saved_at) for _, saved_at, _ in self._found()) or "none"
        raise UsageError(f"{self.folder} has no checkpoint of step {step}; it has {steps}")

    @contextmanager
    def writing(self, step: SupportsIndex) -> Iterator[Path]:
        """Yield a path for a new checkpoint, which counts once the block has ended without an exception.

        One rank calls it, usually rank 0.

        Args:
            step: the step of the program, a number from 0.

        Raises:
            StaleRoundError: this round is over; raised before or after the block. No checkpoint has changed.
            UsageError: the step is not a whole number from 0; raised before the block.
            OSError: the file cannot be written. If the disk is full, this exception, or any other one of the block,
                gets a note that says so.
        """
        with self.writing_part(step, "") as path:
            yield path
        for old in self._checkpoints()[: -self._keep]:
            old.unlink(missing_ok=True)

    @contextmanager
    def writing_part(self, step: SupportsIndex, part: str) -> Iterator[Path]:
        """Yield a path for a part of a new checkpoint, as `writing` does, but delete no earlier checkpoint.

        Args:
            step: the step of the program, a number from 0.
            part: its name, `part-` and lowercase letters, digits and dashes; "" if it is the whole checkpoint.

        Raises:
            As `writing`.
        """
        ending = f".{part}" if part else ""
        name = f"fence-{self._fence:06}.step-{_checked(step):09}{ending}"
        self._refuse_if_stale()
        draft = self.folder / f"draft-{secrets.token_hex(8)}{ending}"
        try:
            yield draft
            _flush(draft)
            self._refuse_if_stale()
            draft.rename(self.folder / name)
        except Exception as error:
            if _is_full(self.folder, error):
                error.add_note(self._describe_full_disk(step))
            raise
        finally:
            draft.unlink(missing_ok=True)
        _flush(self.folder)
        for number in self._fences():
            if number < self._fence:
                (self.folder / f"fence-{number:06}").unlink(missing_ok=True)

    def _describe_full_disk(self, step: SupportsIndex) -> str:
        kept = " Earlier checkpoints are still valid." if checkpoint_files(self.folder) else ""
        fewer = ", or keep fewer checkpoints (keep=1)" if self._keep > 1 else ""
        return (
            f"The disk of {self.folder.absolute()} is full: the checkpoint of step {step} is not saved.{kept} Free "
            f"space{fewer}."
        )

    # Fences

    def _open(self) -> int:
        """Return the number of this round's fence; the first rank of a round makes it."""
        while True:
            fences = self._fences()
            if self._round is None:
                return max(fences, default=0)
            for number, owner in fences.items():
                if owner == self._round:
                    self._refuse_if_above(number, fences)
                    return number
            later = [owner for owner in fences.values() if owner.job == self._round.job]
            if any(owner.number > self._round.number for owner in later):
                raise self._stale(max(later))
            self._link(max(fences, default=0) + 1, self._round)

    def _link(self, number: int, owner: _Round) -> None:
        """Make the fence in one step with its content, unless another rank was faster."""
        draft = self.folder / f"draft-{secrets.token_hex(8)}"
        try:
            with open(
                os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8"
            ) as file:
                file.write(f"{owner.job} {owner.number}\n")
            _flush(draft)
            with suppress(FileExistsError):
                os.link(draft, self.folder / f"fence-{number:06}")
        finally:
            draft.unlink(missing_ok=True)

    def _fences(self) -> dict[int, _Round]:
        found = {}
        for path in self.folder.iterdir():
            if match := _FENCE.fullmatch(path.name):
                with suppress(
                    FileNotFoundError
                ):  # another rank has removed it, because a later round has begun
                    job, _, number = path.read_text(encoding="utf-8").rpartition(" ")
                    found[int(match[1])] = _Round(job, int(number))
        return found

    def _refuse_if_stale(self) -> None:
        if self._round is not None:
            self._refuse_if_above(self._fence, self._fences())

    def _refuse_if_above(self, number: int, fences: dict[int, _Round]) -> None:
        if (highest := max(fences, default=number)) > number:
            raise self._stale(fences[highest])

    def _stale(self, owner: _Round) -> StaleRoundError:
        assert self._round
        if owner.job == self._round.job:
            who = f"round {owner.number} of this job now uses {self.folder}"
        else:
            who = f"another job, started later, now uses {self.folder}"
        return StaleRoundError(
            f"{who}, but this process belongs to round {self._round.number}: "
            "it may write no more checkpoints and should end"
        )

    def _checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, the newest last."""
        return [path for _, _, path in self._found()]

    def _found(self) -> list[tuple[int, int, Path]]:
        """Return fence, step and path of the complete checkpoints that are one file, the newest last."""
        return [(each.fence, each.step, each.path) for each in checkpoint_files(self.folder) if not each.part]


def require_own(status: os.stat_result, path: Path, place: Path, instead: str) -> None:
    """Raise UsageError if another user can have decided on the content of a file or folder, in which a program may be.

    `place`: what the user should change if the checkpoints are to be trusted; `instead`: what else the user can give.
    """
    foreign = describe_foreign_owner(status, str(path))
    if foreign and status.st_uid != owner_of_new_files(path if path.is_dir() else path.parent):
        raise UsageError(
            f"{foreign}, {_MAY_BE_PROGRAM}: chown -R {os.geteuid()} {place} if you trust the checkpoints there, else "
            f"give another {instead}"
        )
    if writers := describe_other_writers(status, str(path)):
        raise UsageError(
            f"{writers}, {_MAY_BE_PROGRAM}: chmod -R go-w {place}, and remove the checkpoints there if you do not "
            f"trust them; if the mode stays, give a {instead} on a file system with Unix modes"
        )


def _this_round() -> _Round | None:
    """Return the round of this process, None under a launcher that has no rounds."""
    found = environment()
    job = found.get("RONDE_JOB_ID")
    return _Round(job, int(found["RONDE_ROUND"])) if job else None


def _flush(path: Path) -> None:
    """Write the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked(step: SupportsIndex) -> int:
    """Return the step as an int. Raises UsageError: under another name, `latest` would not find the checkpoint."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"step={step!r} is invalid: expected a whole number from 0")
    return number


def _is_full(folder: Path, error: Exception) -> bool:
    """Return whether the disk is full. The errors of NumPy and PyTorch do not say so: this looks at the free space."""
    if isinstance(error, OSError):
        if error.filename and not Path(str(error.filename)).absolute().is_relative_to(folder.absolute()):
            return False  # it is about another file, which the block has opened
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
    with suppress(OSError):
        disk = os.statvfs(folder)
        return disk.f_bavail * disk.f_frsize < _FULL_BYTES
    return False
