"""`run`: a training function that survives the loss of other ranks, and changes of the members of its job."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ronde.comm import world as comm
from ronde.comm.communicator import Communicator
from ronde.elastic.commit_protocol import NOTHING, Action, Decision
from ronde.elastic.state import HostsUpdatedInterrupt, State, TrainingOverError, ledger
from ronde.engine import process
from ronde.errors import PeerError
from ronde.process.membership_channel import membership

__all__ = ["Companion", "add_companion", "run"]

MOST_FRUITLESS = 3  # then the error that repeats at the same step, though no rank was lost, ends the training

_log = logging.getLogger("ronde.elastic")

P = ParamSpec("P")
R = TypeVar("R")
StateT = TypeVar("StateT", bound=State)


class Companion(Protocol):
    """Another library whose groups end and begin with Ronde's world, such as torch.distributed."""

    def means_loss(self, error: Exception) -> bool:
        """Return whether an exception of the library means that another rank was lost."""

    def training(self) -> AbstractContextManager[None]:
        """Return the context in which the training function runs."""

    def leave(self, is_loss: bool) -> None:
        """End the groups, before this process leaves its world. `is_loss`: abort what is under way."""

    def join(self) -> None:
        """Make the groups again, in the new world."""


_companions: list[Companion] = []


def add_companion(companion: Companion) -> None:
    """Let another library follow the worlds of this process. A second call with the same one does nothing."""
    if companion not in _companions:
        _companions.append(companion)


def run(train: Callable[Concatenate[StateT, P], R]) -> Callable[Concatenate[StateT, P], R]:
    """Return a function that goes on with `train` when other ranks are lost, and when the members of the job change.

        @ronde.elastic.run
        def train(state):
            for batch in state.batches(data, global_batch=256):
                step(batch)
                state.commit()

        train(ronde.elastic.ObjectState(weights=weights))

    All ranks call it. It calls `ronde.init()` if the program has not, makes the state equal on all ranks, and calls
    `train`. When a rank is lost, the others keep their processes: they leave the world, join that of the next round of
    the job, go back to the last commit of the state, and call `train` again. `ronde run` with `--min-np`, `--spares` or
    `--max-restarts` decides who takes part. Without such a launcher a loss raises PeerError, as always.

    Args:
        train: gets the state (a `State`) and further arguments; it must begin from the state alone.

    Returns:
        A function with the arguments and the result of `train`, which returns when all ranks have finished.
    """

    def survive(state: StateT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = _Run(state, lambda: train(state, *args, **kwargs)).run()
        return result

    functools.update_wrapper(survive, train)
    return survive


class _Interruption:
    """Why `train` does not go on. `is_loss`: a rank was lost; otherwise a change was wanted."""

    def __init__(self, reason: str, is_loss: bool, skips_sync: bool) -> None:
        self.reason, self.is_loss, self.skips_sync = reason, is_loss, skips_sync
        self.noticed_ns = time.monotonic_ns()
        self.has_forgotten = False


class _Run:
    def __init__(self, state: State, train: Callable[[], Any]) -> None:
        self._state, self._train = state, train
        self._membership = membership()
        self._interruption: _Interruption | None = None
        self._has_begun = False
        self._fruitless = 0  # recoveries in a row after which no rank was missing, from the same commit
        self._recovered_to = NOTHING
        self._finished_in: Communicator | None = None  # the world in which `train` has returned
        self._result: Any = None

    def run(self) -> Any:
        if self._membership is not None:
            self._membership.announce_continues()
        with self._state.safeguards.surviving():
            return self._train_until_done()

    def _train_until_done(self) -> Any:
        while True:
            try:
                self._join()
                with self._state.safeguards.changing():
                    self._begin()
                self._finished_in = None
                with ExitStack() as stack:
                    for each in _companions:
                        stack.enter_context(each.training())
                    stack.enter_context(self._state.safeguards.training())
                    self._result = self._train()
                self._finished_in = comm.world()
                self._state.finish()
            except TrainingOverError:
                if self._finished_in is None:
                    raise
                self._end_in_later_world()
                return self._result
            except HostsUpdatedInterrupt as interrupt:
                self._note(_Interruption(str(interrupt), False, interrupt.skip_sync))
            except Exception as error:
                if self._membership is None or not _means_loss(error) or self._fruitless >= MOST_FRUITLESS:
                    raise
                self._note(_Interruption(str(error), True, False))
            else:
                if self._membership is not None:
                    self._membership.announce_completed()
                return self._result
            # Here the exception and the frames of `train` are gone, with what these kept alive.
            if not self._leave():
                return self._result

    def _note(self, interruption: _Interruption) -> None:
        """Note why the training is interrupted; a loss during a recovery belongs to the first one."""
        if self._interruption is None:
            self._interruption = interruption
        elif interruption.is_loss:
            self._interruption.is_loss = True
            self._interruption.reason = interruption.reason

    def _leave(self) -> bool:
        """Leave the world, and wait for the place in the next one; return False if none is needed.

        A loss can end the last barrier of the training, so that some ranks have passed it, and end, and others have
        not. The launcher tells these.
        """
        assert self._interruption is not None
        for each in _companions:
            each.leave(self._interruption.is_loss)
        if self._membership is None:
            return True
        process.shutdown()
        with self._state.safeguards.awaiting():
            if self._finished_in is None:
                self._membership.await_place()
                return True
            if self._membership.await_place_or_end() is not None:
                return True
        comm.keep_left_world(self._finished_in)
        self._state.note_finished()
        self._membership.announce_completed()
        return False

    def _end_in_later_world(self) -> None:
        """End a training that all ranks have finished, in the world in which the others have begun the next one."""
        assert self._membership is not None
        self._state.note_finished()
        self._membership.announce_completed()

    def _join(self) -> None:
        """Join the world of the newest round, unless this process has."""
        process.init_again()
        for each in _companions:
            each.join()

    def _begin(self) -> None:
        """Make the state equal on all ranks, after a loss at a commit."""
        interruption, state = self._interruption, self._state
        decision, advances = state.agree()
        lost = (0, 0)
        if interruption is not None:
            if self._has_begun and not interruption.has_forgotten:
                lost = ledger.lose(interruption.noticed_ns, keeps_work=advances or not interruption.is_loss)
                interruption.has_forgotten = True
            state.on_reset()
        state.commit_reset()
        if interruption is None or not interruption.skips_sync:
            state.sync()
        now_ns = time.monotonic_ns()
        spent_ns = 0
        if not self._has_begun:  # also if a loss has interrupted the beginning: there was no step to lose
            ledger.begin(now_ns)
        elif interruption is not None:
            spent_ns = ledger.resume(now_ns, interruption.is_loss)
        if interruption is not None:
            self._count_fruitless(interruption, decision.number)
            self._report(interruption, decision, lost, spent_ns or now_ns - interruption.noticed_ns)
        self._interruption, self._has_begun = None, True

    def _count_fruitless(self, interruption: _Interruption, commit: int) -> None:
        place = self._membership.taken if self._membership is not None else None
        lost = place is None or bool(place.lost)
        again = interruption.is_loss and not lost and commit == self._recovered_to
        self._fruitless = self._fruitless + 1 if again else 0
        self._recovered_to = self._state.commit_number  # with that of the reset callbacks

    def _report(
        self, interruption: _Interruption, decision: Decision, lost: tuple[int, int], spent_ns: int
    ) -> None:
        """Tell in one line what has happened: in the log of a survivor, and in each timeline that is recorded."""
        place = self._membership.taken if self._membership is not None else None
        reason = "; ".join(place.lost) or place.reason if place is not None else interruption.reason
        new = sum(action is Action.RECEIVE for action in decision.actions)
        size = comm.size()
        ranks = f"{size} ranks go" if size > 1 else "1 rank goes"
        came = f", {new} of them new" if new else ""
        line = (
            f"{reason}: {ranks} on from commit {decision.number}{came}, after {spent_ns / 1e6:.1f} ms; "
            f"steps lost: {lost[0]} ({lost[1] / 1e9:.3f} s of work)"
        )
        process.note_in_timeline(
            "elastic",
            line,
            {
                "reason": reason,
                "is_loss": interruption.is_loss,
                "commit": decision.number,
                "ranks": size,
                "new_ranks": new,
                "milliseconds": round(spent_ns / 1e6, 3),
                "steps_lost": lost[0],
                "seconds_lost": round(lost[1] / 1e9, 6),
            },
        )
        if comm.rank() == decision.holders[0]:  # rank 0 may be a new process, which knows of no loss
            _log.log(logging.WARNING if interruption.is_loss else logging.INFO, "%s", line)


def _means_loss(error: Exception) -> bool:
    return isinstance(error, PeerError) or any(each.means_loss(error) for each in _companions)
