"""What the agent knows of one worker of a run, and how it is named in messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Worker", "name_ranks", "signal_name"]

SIGKILL = 9
UNCAUGHT = 1  # the exit code of a Python process after an exception

# These have the same numbers on every supported Linux; messages give the others by number.
_SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ", 30: "SIGPWR", 31: "SIGSYS",
}  # fmt: skip


@dataclass(slots=True)
class Worker:
    """The state of one worker."""

    rank: int
    pid: int
    started_ns: int
    ended_ns: int = 0
    returncode: int | None = None  # None while its process runs
    blames_peer: bool = False
    leftovers: bool = False
    raised_ns: int = 0
    raised: str = ""  # the exception that it announced
    has_left: bool = False  # the other ranks
    has_announced: bool = False  # that it continues, or has completed the training
    has_completed: bool = False  # the training, as all ranks have
    awaits: bool = False  # a later round, because it has left the world of this one
    epochs: int = 0  # how many there were, up to the last one to which it has come in `ronde.init`
    is_joining: bool = False  # it waits in `ronde.init` for the others
    missed_by: tuple[int, ...] = ()  # the ranks that wait for it, although it has ended with exit code 0
    program: str = ""  # by which it has replaced its own, without leaving the others
    signum: int = 0  # the last signal that it got from the agent while its process ran
    problem: str = ""  # why it could not start
    error: str = ""  # the exception in its error file
    killed_because: str = ""  # why the agent has killed it, if that counts as its own failure

    @property
    def gone(self) -> bool:
        """Whether no process of it is left."""
        return self.returncode is not None and not self.leftovers

    @property
    def has_succeeded(self) -> bool:
        """Whether it has ended with exit code 0, without a signal of the agent."""
        return self.gone and self.returncode == 0 and not self.raised and not self.signum

    @property
    def is_ending(self) -> bool:
        """Whether it has announced an exception and its process still runs."""
        return bool(self.raised) and self.returncode is None

    @property
    def continues(self) -> bool:
        """Whether it outlives the end of the round."""
        return (
            self.has_announced
            and self.returncode is None
            and not (self.raised or self.program or self.signum)
        )

    @property
    def may_be_cause(self) -> bool:
        """Whether it has left the other ranks, still runs, and may yet fail for a reason of its own."""
        leaves = (
            self.has_left and not self.has_announced
        )  # one that continues leaves a world, and comes to the next
        return leaves and self.returncode is None and not self.signum and not self.blames_peer

    @property
    def failed_by_itself(self) -> bool:
        """Whether it failed before the agent sent it a signal."""
        died = self.returncode not in (None, 0) and not (self.signum or self.was_killed_late)
        return bool(self.raised or self.missed_by or self.program) or died

    @property
    def was_killed_late(self) -> bool:
        """Whether a signal killed it when all ranks had finished the training: there is nothing to recover."""
        return self.has_completed and self.returncode is not None and self.returncode < 0 and not self.raised

    @property
    def exit_code(self) -> int:
        """Its exit code, or minus the signal that killed it.

        1 if it raised and then ended with 0 or by a signal, or if others wait for it after its end or have lost it.
        """
        if self.missed_by or ((self.raised or self.program) and (self.signum or not self.returncode)):
            return UNCAUGHT
        return self.returncode or 0

    def causes(self, other: Worker) -> bool:
        """Whether it is the cause of the failure rather than a worker that failed before."""
        if self.blames_peer != other.blames_peer:
            return other.blames_peer
        return 0 < self.raised_ns < other.raised_ns

    def describe(self) -> str:
        """Return the beginning of a sentence: the rank and how it ended."""
        if self.problem:
            return f"rank {self.rank} could not be started: {self.problem}"
        took = f"after {(self.ended_ns - self.started_ns) / 1e9:.1f} s"
        who = f"rank {self.rank} (pid {self.pid})"
        if self.raised and (self.signum or not self.returncode):
            return f"{who} raised {self.raised} {took}"
        if self.program:
            return (
                f"{who} left the other ranks without ronde.shutdown() {took}: it replaced its program by "
                f"`{self.program}` (os.exec*), or closed its connections"
            )
        if self.missed_by:
            calling = "calling ronde.init() again" if self.epochs else "calling ronde.init()"
            waiting = f"{name_ranks(self.missed_by)} wait{'s' if len(self.missed_by) == 1 else ''}"
            return f"{who}, for which {waiting}, ended with exit code 0 {took} without {calling}"
        if self.returncode is None:
            return f"{who} still runs"
        if self.returncode >= 0:
            error = f" ({self.error})" if self.error else ""
            return f"{who} failed with exit code {self.returncode} {took}{error}"
        if self.killed_because:
            return f"{who} was killed by the launcher {took}, because {self.killed_because}"
        hint = " (out of memory?)" if self.returncode == -SIGKILL and not self.signum else ""
        return f"{who} was killed by {signal_name(-self.returncode)} {took}{hint}"


def signal_name(signum: int) -> str:
    """Return the signal's name, such as SIGKILL."""
    return _SIGNAL_NAMES.get(signum, f"signal {signum}")


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 1" or "ranks 1, 3"."""
    listed = sorted(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))
