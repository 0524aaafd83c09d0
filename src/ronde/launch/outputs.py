"""Where each worker's output goes: onto the screen, into files of a log directory, or both; and its error file.

The directory is laid out as torchrun does it:

    LOG_DIR/RUN_random/attempt_N/LOCAL_RANK/stdout.log, stderr.log, error.json

1. What is redirected is written by the worker itself, without a way through us. What is tee'd comes to us, who copy it.
2. Standard error comes to us even if it is not to be shown, unless a file takes it: the report needs its last words.
3. Error files are needed even without a log directory: then they are in a temporary one, which goes with the launcher.
4. Whether there can be a log directory is found out before anything starts. What goes wrong with it later (a full disk)
   is told, and costs output but no job.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from ronde.environment import environment
from ronde.errors import UsageError
from ronde.launch.config import Outputs, Std
from ronde.net.output import LogFile, Sink, Source, Stream, Tail, tail_of_file
from ronde.net.processes import GroupLeader

if TYPE_CHECKING:
    from ronde.launch.record import ErrorReport

__all__ = ["Complain", "RunOutputs", "WorkerOutput", "fill_prefix"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
ALL_OTHERS = -1  # the key of a mapping by local rank
_FIELD = re.compile(r"\$?\{(\w+)\}")
_FIELDS = ("rank", "local_rank", "host", "role")
_STREAMS = {Std.OUT: "stdout", Std.ERR: "stderr"}

Complain = Callable[[str], None]


def fill_prefix(template: str, rank: int, local_rank: int, host: str, role: str) -> str:
    """Return what stands before each line: the template with {rank}, {local_rank}, {host} and {role} replaced.

    torchrun's way of writing them, ${rank} and ${role_name}, is right too. Raises UsageError for any other name.
    """
    values = dict(zip(_FIELDS, (str(rank), str(local_rank), host, role))) | {"role_name": role}

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            known = ", ".join(f"{{{name}}}" for name in _FIELDS)
            raise UsageError(
                f"the line prefix {template!r} contains {match[0]}, but only {known} have a meaning"
            )
        return values[match[1]]

    return _FIELD.sub(value, template)


class RunOutputs:
    """The output of everything that one launcher starts, in all attempts.

    `host` is this machine's name, and `several` says that the job may have others. Raises UsageError if there can be no
    log directory. Close it when all workers are gone.
    """

    def __init__(
        self,
        outputs: Outputs,
        run_id: str,
        complain: Complain,
        *,
        host: str,
        role: str = "default",
        several: bool = False,
    ) -> None:
        self._outputs = outputs
        self._complain = complain
        self._role = role
        self._host = host
        default = "[{host}:{rank}] " if several else "[{rank}] "
        self._template = default if outputs.prefix is None else outputs.prefix
        fill_prefix(self._template, 0, 0, host, role)  # so that it is refused here
        wants_files = any(
            std is not Std.NONE for each in (outputs.redirects, outputs.tee) for std in each.values()
        )
        self._is_temporary = outputs.log_dir is None and not wants_files
        self.directory = "" if outputs.log_dir == os.devnull else self._make_directory(run_id)
        if outputs.log_dir is None and wants_files:
            complain(f"the logs are in {self.directory}")

    def _make_directory(self, run_id: str) -> str:
        log_dir = self._outputs.log_dir
        try:
            if log_dir is None:
                return _new_directory(_temporary_place(), "ronde_")
            os.makedirs(log_dir, exist_ok=True)
            return _new_directory(os.path.abspath(log_dir), run_id.replace(os.sep, "_") + "_")
        except OSError as error:
            if self._is_temporary:
                return ""  # nobody has asked for files
            where = log_dir or f"{_temporary_place()}, where they would be without --log-dir"
            raise UsageError(
                f"there can be no logs in {where}: {error.strerror or error}; --log-dir should name a directory that "
                "can be written or made"
            ) from None

    def worker(self, attempt: int, rank: int, local_rank: int) -> WorkerOutput:
        """Return the output of one worker in one attempt; earlier attempts keep theirs."""
        prefix = fill_prefix(self._template, rank, local_rank, self._host, self._role)
        folder = os.path.join(self.directory, f"attempt_{attempt}", str(local_rank)) if self.directory else ""
        if folder:
            try:
                _remove(folder)  # of the same attempt, as torchrun does
                os.makedirs(folder)
            except OSError as error:
                self._complain(
                    f"rank {rank} has no log files: cannot make {folder}: {error.strerror or error}"
                )
                folder = ""
        return WorkerOutput(self._outputs, folder, rank, local_rank, prefix.encode(), self._complain)

    @property
    def temporary(self) -> str:
        """The directory that is only needed while workers run; empty if there is none."""
        return self.directory if self._is_temporary else ""

    def close(self) -> None:
        """Remove what was only needed while workers ran."""
        if self.temporary:
            _remove(self.temporary)


# The modules tempfile and shutil do this too, but take longer to load than a worker takes to start.


def _temporary_place() -> str:
    named = environment().get("TMPDIR", "")
    return os.path.abspath(named) if os.path.isdir(named) else "/tmp"


def _new_directory(place: str, prefix: str) -> str:
    """Make a directory that is ours alone. Raises OSError."""
    path = os.path.join(place, prefix + os.urandom(6).hex())
    os.mkdir(path, 0o700)
    return path


def _remove(folder: str) -> None:
    """Remove a directory with everything in it, as far as that is possible."""
    for path, folders, files in os.walk(folder, topdown=False):
        for name in files + folders:
            inner = os.path.join(path, name)
            with suppress(OSError):
                (os.unlink if name in files or os.path.islink(inner) else os.rmdir)(inner)
    with suppress(OSError):
        os.rmdir(folder)


class WorkerOutput:
    """The output of one worker: `environment` and `files` to start it with, then its `streams`, at last its words."""

    def __init__(
        self, outputs: Outputs, folder: str, rank: int, local_rank: int, prefix: bytes, complain: Complain
    ) -> None:
        self._rank = rank
        self._prefix = prefix
        self._timestamps = outputs.timestamps
        self._folder = folder
        self._complain = complain
        self._tee = _of(outputs.tee, local_rank) if folder else 0
        self._redirected = _of(outputs.redirects, local_rank) & ~self._tee if folder else 0
        shown = outputs.filter is None or local_rank in outputs.filter
        self._shown = Std.ALL.value & ~self._redirected if shown else 0
        self._tail = Tail()
        self.error_file = os.path.join(folder, "error.json") if folder else ""

    @property
    def environment(self) -> Mapping[str, str]:
        """What the worker finds in its environment."""
        return {ERROR_FILE: self.error_file}

    def _path(self, std: Std) -> str:
        return os.path.join(self._folder, f"{_STREAMS[std]}.log")

    @contextmanager
    def files(self) -> Iterator[tuple[int | None, int | None]]:
        """The descriptors to which the worker writes; None: a pipe to us. Start it within; then ours are closed."""
        with ExitStack() as stack:
            fds = []
            for std in _STREAMS:
                fd = self._open(std)
                if fd is not None:
                    stack.callback(os.close, fd)
                fds.append(fd)
            yield fds[0], fds[1]

    def _open(self, std: Std) -> int | None:
        if self._redirected & std.value:
            try:
                return os.open(
                    self._path(std), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666
                )
            except OSError as error:
                self._say_unwritable(std, error)
                self._redirected &= ~std.value
                self._shown |= std.value
        if std is Std.OUT and not (self._shown | self._tee) & std.value:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        return None

    def _say_unwritable(self, std: Std, error: OSError) -> None:
        self._complain(
            f"cannot write {self._path(std)} any further: {error.strerror or error}; rank {self._rank} goes on"
        )

    def streams(self, process: GroupLeader, out: Sink, err: Sink) -> set[Stream]:
        """Return what is to be read of the process that was started with `files`; `out` and `err` show it."""
        return {
            Stream(
                pipe,
                Source(self._rank, _STREAMS[std], self._prefix),
                sink if self._shown & std.value else None,
                self._tail if std is Std.ERR else None,
                self._copy(std),
                timestamps=self._timestamps,
            )
            for std, pipe, sink in ((Std.OUT, process.stdout, out), (Std.ERR, process.stderr, err))
            if pipe is not None
        }

    def _copy(self, std: Std) -> LogFile | None:
        if not self._tee & std.value:
            return None
        try:
            return LogFile(self._path(std), lambda error: self._say_unwritable(std, error))
        except OSError as error:
            self._say_unwritable(std, error)
            return None

    def error(self) -> ErrorReport | None:
        """Return what the worker has written about its exception; None if it has not."""
        from ronde.launch.record import read_error_file  # only after a failure

        return read_error_file(self.error_file) if self.error_file else None

    def last_lines(self) -> list[bytes]:
        """Return the last lines of its standard error, wherever that goes."""
        return tail_of_file(self._path(Std.ERR)) if self._redirected & Std.ERR.value else self._tail.lines()

    def last_words(self) -> list[bytes]:
        """Return what to show of a worker that has failed; its traceback comes last."""
        lines = self.last_lines()
        if self._redirected and self._disk_is_full():
            lines.insert(0, f"(the disk of {self._folder} is full: output may be missing)".encode())
        error = self.error()
        if error is not None and error.message.partition("\n")[0].encode() not in b"\n".join(lines):
            lines += error.traceback.encode(errors="surrogateescape").splitlines()
        return lines

    def _disk_is_full(self) -> bool:
        try:
            return os.statvfs(self._folder).f_bavail == 0
        except OSError:
            return False


def _of(streams: Mapping[int, Std], local_rank: int) -> int:
    """Return the streams of a local rank as bits."""
    return streams.get(local_rank, streams.get(ALL_OTHERS, Std.NONE)).value
