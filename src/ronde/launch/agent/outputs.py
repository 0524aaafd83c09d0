"""Sends each worker's output to the screen, to files of a log directory, or both, and chooses its error file.

The directory has torchrun's layout:

    LOG_DIR/RUN_random/attempt_N/LOCAL_RANK/stdout.log, stderr.log, error.json
    LOG_DIR/RUN_random/attempt_N/filtered_stdout.log, filtered_stderr.log

or horovodrun's, with a directory `rank.R.attempt_N` for each further attempt:

    LOG_DIR/rank.R/stdout, stderr
    LOG_DIR/rank.R/filtered_stdout.log, filtered_stderr.log     where R is the first rank of an agent

1. A worker writes redirected streams into their files. The launcher reads the others and copies those with --tee.
2. The launcher reads standard error even if the user filters it out, unless a file takes it: the report shows its end.
3. Without a log directory, error files are in a temporary directory that the launcher removes at its end.
4. The launcher creates the log directory before it starts a worker. Later problems (a disk that is full, or that does
   not answer) cost output, with a message, but do not end the job.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from ronde.environment import environment
from ronde.errors import UsageError
from ronde.hidden_modules import describe_hiding
from ronde.launch.config import Outputs, Std
from ronde.launch.launch_plan import WorkerPlan
from ronde.launch.screen import Digest, OutputStream, Sink, Source, Tail, tail_of_file
from ronde.process.disk import Disk, LogFile, LogWriter
from ronde.process.exceptions import ERROR_FILE, ErrorReport, read_error_file
from ronde.process.process_groups import GroupLeader
from ronde.process.uncaught import LEAVES_TRACEBACK, POINTER
from ronde.trusted_files import open_for_writing

__all__ = ["Complain", "RunOutputs", "WorkerOutput", "fill_prefix"]

ERROR_NAME = "error.json"
ALL_OTHERS = -1  # the key of a mapping by local rank
_FIELD = r"\$?\{(\w+)\}"
_FIELDS = ("rank", "local_rank", "host", "role", "stream")
_STREAMS = {Std.OUT: "stdout", Std.ERR: "stderr"}
_COLLECTED = {std: f"filtered_{name}.log" for std, name in _STREAMS.items()}

Complain = Callable[[str], None]


def fill_prefix(
    template: str, rank: int | str, local_rank: int, host: str, role: str, stream: str = "stdout"
) -> str:
    """Return the prefix of lines: the template with {rank}, {local_rank}, {host}, {role} and {stream} replaced.

    torchrun's ${rank} and ${role_name} work, too. Raises UsageError for any other name.
    """
    values = dict(zip(_FIELDS, (str(rank), str(local_rank), host, role, stream))) | {"role_name": role}

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            known = ", ".join(f"{{{name}}}" for name in _FIELDS)
            raise UsageError(
                f"the line prefix {template!r} contains {match[0]}, but only {known} have a meaning"
            )
        return values[match[1]]

    return re.sub(_FIELD, value, template)


class RunOutputs:
    """The output of all workers that one launcher starts, in all attempts.

    `host`: this machine's name. `several`: the job may have other machines. `reports`: the launcher shows the
    tracebacks of failed workers. Raises UsageError if the log directory cannot be created. Close it when all workers
    are gone.
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
        reports: bool = False,
    ) -> None:
        self._outputs = outputs
        self._reports = reports
        self._complain = complain
        self._role = role
        self._host = host
        default = "[{host}:{rank}] " if several else "[{rank}] "
        self._template = default if outputs.prefix is None else outputs.prefix
        fill_prefix(self._template, 0, 0, host, role)  # raises for an invalid template
        self._disk = Disk()
        wants_files = any(
            std is not Std.NONE for each in (outputs.redirects, outputs.tee) for std in each.values()
        )
        wants_files = wants_files or bool(outputs.duplicates)
        self._is_temporary = outputs.log_dir is None and not wants_files
        self.directory = "" if outputs.log_dir == os.devnull else self._make_directory(run_id)
        if outputs.log_dir is None and wants_files:
            complain(f"the logs are in {self.directory}")
        self.logs = LogWriter()  # for --tee

    def _make_directory(self, run_id: str) -> str:
        log_dir = self._outputs.log_dir

        def make() -> str:
            if log_dir is None:
                return tempfile.mkdtemp(prefix="ronde_", dir=_temporary_place())
            os.makedirs(log_dir, exist_ok=True)
            if self._outputs.by_rank:
                return os.path.abspath(log_dir)
            return tempfile.mkdtemp(prefix=run_id.replace(os.sep, "_") + "_", dir=os.path.abspath(log_dir))

        try:
            return self._disk.ask(make, os.rmdir if log_dir is None else None)
        except OSError as error:
            if self._is_temporary:
                return ""  # the user did not ask for files
            where = log_dir or f"{_temporary_place()}, where they would be without --log-dir"
            option = "--output-filename" if self._outputs.by_rank else "--log-dir"
            raise UsageError(
                f"cannot write logs to {where}: {error.strerror or error}; {option} must name a directory "
                "that is writable or can be created"
            ) from None

    def worker(self, attempt: int, worker: WorkerPlan, size: int = 1) -> WorkerOutput:
        """Return the output of one worker of `size` in one attempt; earlier attempts keep theirs."""
        rank, local_rank, first = worker.rank, worker.local_rank, worker.rank - worker.index
        if self._outputs.by_rank:
            ending = f".attempt_{attempt}" if attempt else ""
            names = [f"rank.{number:0{len(str(size - 1))}}{ending}" for number in (rank, first)]
        else:
            names = [os.path.join(f"attempt_{attempt}", str(local_rank)), f"attempt_{attempt}"]
        folder, collection = (os.path.join(self.directory, name) if self.directory else "" for name in names)
        if folder:
            try:
                self._disk.ask(lambda: self._make_folder(folder))
            except OSError as error:
                self._complain(
                    f"rank {rank} has no log files: cannot make {folder}: {error.strerror or error}"
                )
                folder = ""
        return WorkerOutput(
            self._outputs,
            folder,
            collection,
            rank,
            local_rank,
            self._prefixes,
            self._complain,
            self.logs,
            self._disk,
            reports=self._reports,
        )

    def _prefixes(self, rank: int, local_rank: int) -> Mapping[Std, bytes]:
        """Return the prefixes of the lines of a worker; `rank` is negative if it has no place yet."""
        shown = "spare" if rank < 0 else rank
        place = (self._template, shown, local_rank, self._host, self._role)
        return {std: os.fsencode(fill_prefix(*place, name)) for std, name in _STREAMS.items()}

    def _make_folder(self, folder: str) -> None:
        """Make an empty folder. With horovodrun's layout, other files of the user's stay in it."""
        if self._outputs.by_rank:
            os.makedirs(folder, exist_ok=True)
            for name in (ERROR_NAME, *_COLLECTED.values()):  # of an earlier run
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
            return
        shutil.rmtree(folder, ignore_errors=True)  # an earlier one of this attempt, as torchrun does
        os.makedirs(folder)

    @property
    def temporary(self) -> str:
        """The directory that exists only while workers run; empty if there is none."""
        return self.directory if self._is_temporary else ""

    def close(self) -> None:
        """Close the logs, and remove the temporary directory."""
        self.logs.close()
        if self.temporary:
            shutil.rmtree(self.temporary, ignore_errors=True)


def _temporary_place() -> str:
    named = environment().get("TMPDIR", "")
    return os.path.abspath(named) if os.path.isdir(named) else "/tmp"


class WorkerOutput:
    """The output of one worker: `environment` and `files` for its start, then `streams`, at the end `last_output`."""

    def __init__(
        self,
        outputs: Outputs,
        folder: str,
        collection: str,
        rank: int,
        local_rank: int,
        prefixes: Callable[[int, int], Mapping[Std, bytes]],
        complain: Complain,
        logs: LogWriter,
        disk: Disk,
        *,
        reports: bool = False,
    ) -> None:
        self._rank = rank
        self._prefixes_of = prefixes  # by rank and local rank
        self._prefixes = prefixes(rank, local_rank)
        self._timestamps = outputs.timestamps
        self._folder = folder
        self._collection = collection  # the directory of the collecting files
        self._ending = "" if outputs.by_rank else ".log"
        self._complain = complain
        self._duplicates = outputs.duplicates if folder else {}
        self._logs = logs
        self._disk = disk
        self._tee = _of(outputs.tee, local_rank) if folder else 0
        redirected = _of(outputs.redirects, local_rank) & ~self._tee if folder else 0
        shown = outputs.filter is None or local_rank in outputs.filter
        self._shown = Std.ALL.value & ~redirected if shown else 0
        collected = sum(std.value for std in self._duplicates)
        self._tee |= redirected & collected  # the launcher reads the streams whose lines it collects
        self._redirected = redirected & ~collected
        self._tail = Tail()
        self.error_file = os.path.join(folder, ERROR_NAME) if folder else ""
        is_in_file = (self._tee | self._redirected | collected) & Std.ERR.value
        self._leaves_traceback = reports and not is_in_file

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables for the worker."""
        return {ERROR_FILE: self.error_file, LEAVES_TRACEBACK: "1" if self._leaves_traceback else ""}

    @property
    def is_silent(self) -> bool:
        """Whether the disk of its files does not answer."""
        return self._disk.is_silent

    def _path(self, std: Std) -> str:
        return os.path.join(self._folder, _STREAMS[std] + self._ending)

    @contextmanager
    def files(self) -> Iterator[tuple[int | None, int | None]]:
        """The descriptors to which the worker writes; None: a pipe to the launcher. Start the worker within."""
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
            flags = os.O_TRUNC | os.O_APPEND
            try:
                return self._disk.ask(lambda: open_for_writing(self._path(std), flags), os.close)
            except OSError as error:
                self._say_unwritable(self._path(std), error)
                self._redirected &= ~std.value
                self._shown |= std.value
        if std is Std.OUT and std not in self._duplicates and not (self._shown | self._tee) & std.value:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        return None

    def _say_unwritable(self, path: str, error: OSError) -> None:
        self._complain(
            f"cannot write {path} any further: {error.strerror or error}; rank {self._rank} goes on"
        )

    def streams(self, process: GroupLeader, out: Sink, err: Sink) -> set[OutputStream]:
        """Return the streams to read of a process that was started with `files`; `out` and `err` show them."""
        return {
            OutputStream(
                pipe,
                Source(self._rank, _STREAMS[std], self._prefixes[std]),
                sink if self._shown & std.value else None,
                self._tail if std is Std.ERR else None,
                self._copy(std),
                timestamps=self._timestamps,
                digest=self._digest(std),
            )
            for std, pipe, sink in ((Std.OUT, process.stdout, out), (Std.ERR, process.stderr, err))
            if pipe is not None
        }

    def change_place(self, rank: int, local_rank: int, streams: Iterable[OutputStream]) -> None:
        """Show the output as that of another rank from now on; the files stay where they are."""
        self._rank, self._prefixes = rank, self._prefixes_of(rank, local_rank)
        for stream in streams:
            name = stream.name
            stream.rename(rank, next(self._prefixes[std] for std in _STREAMS if _STREAMS[std] == name))

    def _copy(self, std: Std) -> LogFile | None:
        if not self._tee & std.value:
            return None
        path = self._path(std)
        return self._logs.open(path, lambda error: self._say_unwritable(path, error))

    def _digest(self, std: Std) -> Digest | None:
        if std not in self._duplicates:
            return None
        path = os.path.join(self._collection, _COLLECTED[std])
        file = self._logs.open(path, lambda error: self._say_unwritable(path, error), shared=True)
        return Digest(file, tuple(os.fsencode(needle) for needle in self._duplicates[std]))

    def error(self) -> ErrorReport | None:
        """Return the worker's error file; None if it wrote none."""
        if not self.error_file:
            return None
        try:
            return self._disk.ask(lambda: read_error_file(self.error_file))
        except OSError:
            return None

    def last_lines(self) -> list[bytes]:
        """Return the last lines of its standard error, from the pipe or the file."""
        if not self._redirected & Std.ERR.value:
            return self._tail.lines()
        try:
            return self._disk.ask(lambda: tail_of_file(self._path(Std.ERR)))
        except OSError:
            return []

    def last_output(self) -> list[bytes]:
        """Return the last output of a failed worker for the report, the traceback at the end."""
        lines = self.last_lines()
        error = self.error()
        is_left = self._leaves_traceback and error is not None and error.is_left
        if is_left:
            lines = [line for line in lines if not line.endswith(POINTER.encode())]
        if self._folder and (trouble := self._trouble()):
            lines.insert(0, os.fsencode(f"(the disk of {self._folder} {trouble}: output may be missing)"))
        if error is not None and (is_left or not _shows(lines, error.message)):
            lines += (error.traceback or error.message).encode(errors="backslashreplace").splitlines()
        return lines + _hint(lines)

    def left_traceback(self) -> str:
        """Return the traceback of which the worker has printed only one line; empty if there is none."""
        error = self.error() if self._leaves_traceback else None
        return error.traceback if error and error.is_left else ""

    def _trouble(self) -> str:
        """Return the problem of the disk that may have cost output; empty if there is none."""
        is_full = False
        if self._redirected:
            with suppress(OSError):
                is_full = self._disk.ask(lambda: os.statvfs(self._folder).f_bavail == 0)
        return "does not answer" if self.is_silent else "is full" if is_full else ""


def _shows(lines: list[bytes], message: str) -> bool:
    """Return whether the first line of an exception is in the output."""
    # Python, too, escapes characters that stderr cannot encode.
    return message.partition("\n")[0].encode(errors="backslashreplace") in b"\n".join(lines)


def _hint(lines: list[bytes]) -> list[bytes]:
    """Return a line about a file that hides a module, if that can have caused the error in the last lines."""
    text = b"\n".join(lines).decode(errors="replace")
    if "Error: " not in text:
        return []
    hint = describe_hiding(text)
    return [hint.encode(errors="backslashreplace")] if hint and hint not in text else []


def _of(streams: Mapping[int, Std], local_rank: int) -> int:
    """Return the streams of a local rank as bits."""
    return streams.get(local_rank, streams.get(ALL_OTHERS, Std.NONE)).value
