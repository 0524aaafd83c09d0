"""Runs a function in n processes, the ranks of a job, and returns their results.

    from ronde.testing import ranks

    def program(scale):
        ronde.init()
        return ronde.world().allreduce(numpy.array([scale]))[0]

    assert ranks.run(program, 4, 10) == [40, 40, 40, 40]

The rules:
  1. No process is left behind: leaving the `with` block of a Job kills the remaining ranks, and a rank dies with the
     process that started it.
  2. The error of a wait that times out has the stacks of all threads of all busy ranks.
  3. Ranks are new interpreters, except within `copies_of(template)`, where they start with its imports. A copy runs its
     exit handlers, and ends without taking its modules apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Self, TypeVar

from ronde import settings
from ronde.errors import PeerError, RemoteError, TimeoutError, UsageError
from ronde.launch.templates.template import Template
from ronde.process.process_groups import GroupLeader
from ronde.stores.server import StoreServer
from ronde.testing.worker import FunctionRaised, Returned, ToldValue, refuse_while_importing, run_script, tell

__all__ = ["Job", "Outcome", "Place", "copies_of", "run", "run_script", "start", "tell", "template"]

IMPORTS_TIMEOUT_NS = 60 * 10**9  # how long ranks wait for the imports of their template
STACKS_TIMEOUT_S = 10.0  # how long a rank may take to write its stacks

Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """Where one rank runs.

        Place(("ip", "netns", "exec", "host-1"), {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"})

    Attributes:
        prefix: The first words of the rank's command line; the words that start Python follow (default: none).
        environ: Variables of this rank, such as LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK (default: none).
    """

    prefix: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a rank ended.

    Attributes:
        rank: The rank.
        value: The function's result; None if the rank failed.
        error: The function's exception, or a RemoteError if the process died or the exception cannot be pickled; None
            if the rank succeeded.
        traceback_text: The traceback of the exception, or how the process died; "" if the rank succeeded.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback_text: str = ""


def run(
    fn: Callable[..., Result],
    n: int,
    *args: Any,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> list[Result]:
    """Call `fn(*args)` on n ranks of this machine and return the results in the order of ranks.

        assert ranks.run(program, 4, 10) == [40, 40, 40, 40]

    No rank is left when it returns or raises.

    Args:
        fn: A function that other processes can import by its module and name, so no lambda or inner function. Its
            result is pickled.
        n: The number of ranks, at least 1.
        args: The arguments of the function, the same on all ranks; they are pickled.
        environ: Variables for all ranks, in addition to those of this process (default: none).
        timeout_s: How long the call waits for the results, in seconds (120).

    Raises:
        RemoteError: A rank failed (`.rank`, `.traceback_text`).
        TimeoutError: A rank was still busy after `timeout_s`. The error has the stacks of all threads of such ranks.
        UsageError: The function cannot be imported by other processes, `n` is below 1, or this process is a rank that
            imports the program.
    """
    with start(fn, n, *args, environ=environ) as job:
        return job.results(timeout_s)


def start(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    environ: Mapping[str, str] | None = None,
    places: Sequence[Place] | None = None,
    store_address: str | None = None,
) -> Job:
    """Start `fn(*args)` on n ranks and return the job, to be used in a `with` statement.

        with ranks.start(program, 2) as job:
            faults.kill(job.pids[1])
            outcomes = job.outcomes()

    Args:
        fn: As of `run`.
        n: As of `run`.
        args: As of `run`.
        environ: As of `run`. These variables override those of `places`.
        places: Where the ranks run, one place for each rank, such as those of `Hosts.places` (default: this machine).
        store_address: Where this process serves the store in which the ranks meet: `unix:...` or `tcp:host:port`, port
            0 for any free one (default: a Unix socket, which ranks in other networks do not reach).

    Raises:
        UsageError: As of `run`; or the number of places is not `n`, or nothing can listen at `store_address`.
        OSError: A process cannot be started.
    """
    refuse_while_importing()
    if n < 1:
        raise UsageError(f"the number of ranks must be at least 1, not {n}")
    if "<" in fn.__qualname__:
        raise UsageError(f"{fn.__qualname__} cannot be imported by other processes; define it in a module")
    places = places or [_local_place(rank, n) for rank in range(n)]
    if len(places) != n:
        raise UsageError(f"{len(places)} places do not fit {n} ranks")
    return Job(
        fn, args, places, dict(environ or {}), store_address or f"unix:@ronde-testing-{os.urandom(8).hex()}"
    )


def template(*modules: str) -> contextlib.closing[Template]:
    """Return a context of a process that imports modules, for `copies_of`. Leaving it ends the process.

        with ranks.template("torch") as process, ranks.copies_of(process):
            ranks.run(program, 4)  # PyTorch is imported once

    Args:
        modules: The names of the modules.

    Raises:
        OSError: The process cannot be started. If a module cannot be imported, the ranks are new interpreters.
    """
    command = [*_COMMAND, "ronde.testing"]
    return contextlib.closing(Template(command, _environment({}), ["ronde.testing.worker", *modules]))


@contextlib.contextmanager
def copies_of(template: Template) -> Iterator[None]:
    """Make ranks that are started within this context copies of the template, which takes milliseconds.

    Some ranks are new interpreters even so: those in other networks, those whose environment differs in variables that
    an interpreter or a library reads at its start, and all ranks if the imports do not allow copies (because they start
    threads, for example). Raises nothing.

    Args:
        template: What `template` returns, opened by `with`.
    """
    before, _This.template = _This.template, template
    try:
        yield
    finally:
        _This.template = before


class _This:
    """This process."""

    template: Template | None = None  # its copies are the ranks


_COMMAND = (sys.executable, "-P", "-m")


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's environment, without that of its place."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**settings.environment(), "OMP_NUM_THREADS": "1", **changes, "PYTHONPATH": paths}


def _local_place(rank: int, n: int) -> Place:
    return Place(environ={"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n), "GROUP_RANK": "0"})


class Job:
    """Running ranks, which `start` returns. Leaving its `with` block kills those that still live."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        places: Sequence[Place],
        environ: Mapping[str, str],
        store_address: str,
    ) -> None:
        self._ranks: list[_Rank] = []
        key = settings.JobKey.generate()
        with contextlib.ExitStack() as undo:
            store = undo.enter_context(contextlib.closing(StoreServer(store_address, key)))
            undo.callback(self._kill)
            for rank, place in enumerate(places):
                shared = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(places)),
                    "RONDE_STORE": store.address,
                    "RONDE_JOB_KEY": key.hex(),
                }
                everything = _environment({**shared, **place.environ, **environ})
                self._ranks.append(_Rank(rank, place.prefix, everything))
            for started in self._ranks:
                started.assign(fn, args)
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @property
    def pids(self) -> list[int]:
        """The process ids in the order of ranks."""
        return [rank.process.pid for rank in self._ranks]

    def told(self, rank: int, timeout_s: float = 120.0) -> Any:
        """Wait for the next value that the rank has sent by `tell` and return it.

        Args:
            rank: The rank.
            timeout_s: How long the call waits, in seconds (120).

        Raises:
            RemoteError: The rank ended before, by success or failure (`.rank`, `.traceback_text`).
            TimeoutError: No value came within `timeout_s`. The error has the stacks of the ranks that were busy, and
                they have ended.
        """
        it = self._ranks[rank]
        self._wait(lambda: bool(it.told) or it.outcome is not None, timeout_s)
        if not it.told:
            raise self._failure([it.outcome or Outcome(rank)])
        return it.told.popleft()

    def outcomes(self, timeout_s: float = 120.0) -> list[Outcome]:
        """Wait until every rank has ended, by success or failure, and return how, in the order of ranks.

        Args:
            timeout_s: How long the call waits, in seconds (120).

        Raises:
            TimeoutError: A rank was still busy after `timeout_s`. The error has the stacks of such ranks, and they have
                ended.
        """
        self._wait(lambda: all(rank.ended for rank in self._ranks), timeout_s)
        return [rank.outcome for rank in self._ranks if rank.outcome is not None]

    def results(self, timeout_s: float = 120.0) -> list[Any]:
        """Wait until every rank has returned and return the values, in the order of ranks.

        Args:
            timeout_s: How long the call waits, in seconds (120).

        Raises:
            RemoteError: A rank failed (`.rank`, `.traceback_text`). If others failed because of it, this is the cause.
                The remaining ranks run until the end of the `with` block.
            TimeoutError: A rank was still busy after `timeout_s`. The error has the stacks of such ranks, and they have
                ended.
        """
        self._wait(lambda: bool(self._failures()) or all(rank.ended for rank in self._ranks), timeout_s)
        if self._failures():
            self._listen(0.0)  # other ends until now
            raise self._failure(self._failures())
        return [rank.outcome.value for rank in self._ranks if rank.outcome is not None]

    def _failures(self) -> list[Outcome]:
        return [it.outcome for it in self._ranks if it.outcome is not None and it.outcome.error is not None]

    def _failure(self, outcomes: list[Outcome]) -> RemoteError:
        """Return the error of the cause: a rank that lost a peer is the cause only if no other rank failed."""
        cause = min(
            outcomes, key=lambda it: isinstance(it.error, PeerError) and not isinstance(it.error, RemoteError)
        )
        text = cause.traceback_text or str(cause.error or "it returned too early")
        message = f"rank {cause.rank} of {len(self._ranks)} failed:\n{text}"
        return RemoteError(message, cause.rank, cause.traceback_text)

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self._timeout(timeout_s)
            self._listen(left_s)

    def _listen(self, timeout_s: float) -> None:
        by_connection = {rank.connection: rank for rank in self._ranks if not rank.ended}
        for ready in wait(list(by_connection), timeout_s):
            by_connection[ready].read_message()  # type: ignore[index]

    def _timeout(self, timeout_s: float) -> TimeoutError:
        busy = [rank for rank in self._ranks if not rank.ended]
        for rank in busy:
            rank.ask_for_stacks()
        stacks = "\n".join(f"rank {rank.rank}:\n{rank.read_stacks(STACKS_TIMEOUT_S)}" for rank in busy)
        numbers = tuple(rank.rank for rank in busy)
        message = f"ranks {', '.join(map(str, numbers))} are still busy after {timeout_s:g} s; their stacks:\n{stacks}"
        return TimeoutError(message, "ronde.testing.ranks", round(timeout_s * 1e9), numbers)

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()


class _Copy:
    """A rank that is a copy of the template, with the methods of `subprocess.Popen` that this module uses."""

    def __init__(self, leader: GroupLeader) -> None:
        self.pid = leader.pid
        self._leader = leader
        self._code: int | None = None  # set once it has ended

    def wait(self) -> int:
        if self._code is None:
            select.select([self._leader.pidfd], [], [])
            self._code = self._leader.reap()
        return self._code

    def send_signal(self, number: int) -> None:
        if self._code is None:
            os.kill(self.pid, number)


def _start_rank(
    prefix: tuple[str, ...], environ: dict[str, str], keep: tuple[int, int]
) -> subprocess.Popen[bytes] | _Copy:
    """Start a rank, which inherits two descriptors and leads a session, so that kill() reaches its children."""
    command = [*_COMMAND, "ronde.testing", *map(str, keep)]
    if _This.template and not prefix and _This.template.is_ready(time.monotonic_ns() + IMPORTS_TIMEOUT_NS):
        copy = _This.template.start_worker([*command, "0"], environ, stdout=1, stderr=2, keep=keep)
        if copy is not None:
            return _Copy(copy)
    return subprocess.Popen(
        [*prefix, *command, str(os.getpid())],
        env=environ,
        stdin=subprocess.DEVNULL,
        pass_fds=keep,
        start_new_session=True,
    )


class _Rank:
    """One process, the connection to it, and the pipe for its stacks."""

    def __init__(self, rank: int, prefix: tuple[str, ...], environ: dict[str, str]) -> None:
        self.rank = rank
        self.told: deque[Any] = deque()
        self.outcome: Outcome | None = None  # set once the function has ended
        self.ended = False  # the process has ended, too
        self.connection: Connection[Any, Any]
        self.connection, theirs = multiprocessing.Pipe()
        self._stacks, stacks = os.pipe()
        # Room for the stacks of a crash, which are read later.
        fcntl.fcntl(stacks, fcntl.F_SETPIPE_SZ, 1 << 20)
        try:
            self.process = _start_rank(prefix, environ, (theirs.fileno(), stacks))
        except BaseException:
            self.connection.close()
            os.close(self._stacks)
            raise
        finally:
            theirs.close()
            os.close(stacks)

    def assign(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        file = getattr(sys.modules.get(fn.__module__), "__file__", None)
        with contextlib.suppress(BrokenPipeError):  # it is dead, and read_message() will notice
            self.connection.send((fn.__module__, file and os.path.abspath(file)))
            self.connection.send((fn.__qualname__, args))

    def read_message(self) -> None:
        """Read one message, or the end, from a connection that is ready."""
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._end()
            return
        match message:
            case ToldValue(value):
                self.told.append(value)
            case Returned(value):
                self.outcome = Outcome(self.rank, value)
            case FunctionRaised(error, text):
                error = error or RemoteError(f"rank {self.rank} failed", self.rank, text)
                self.outcome = Outcome(self.rank, None, error, text)

    def _end(self) -> None:
        self.ended = True
        code = self.process.wait()
        if self.outcome is None or (self.outcome.error is None and code != 0):
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            when = "while it ran" if self.outcome is None else "after the function had returned"
            text = f"the process {how} {when}\n{self.read_stacks(STACKS_TIMEOUT_S)}".rstrip()
            self.outcome = Outcome(
                self.rank, None, RemoteError(f"rank {self.rank}: {text}", self.rank, text), text
            )

    def ask_for_stacks(self) -> None:
        for what in (signal.SIGUSR1, signal.SIGCONT):  # a stopped process wakes up to the first one
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(what)

    def read_stacks(self, timeout_s: float) -> str:
        """Return the stacks that faulthandler wrote at the rank's end."""
        deadline = time.monotonic() + timeout_s
        parts = []
        while wait([self._stacks], max(0.0, deadline - time.monotonic())):
            part = os.read(self._stacks, 1 << 16)
            if not part:
                break
            parts.append(part)
        return b"".join(parts).decode(errors="replace")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        os.close(self._stacks)
