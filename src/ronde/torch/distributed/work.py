"""Operations in flight, as torch.distributed sees them: `Work`, and the futures that DDP waits for.

PyTorch's C++ code waits for futures, which native code that does not link to PyTorch cannot complete. So each group has
a thread of Python, from the first future on, that waits for the operations and completes their futures. An operation
whose future nobody asks for needs no such thread.

Callbacks of a future run in the thread that completes it, and may wait for the futures of operations that they begin:
see `Completer`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch._C import _autograd
from torch._C import _distributed_c10d as c10d
from torch.distributed import Work as TorchWork
from torch.futures import Future

from ronde.errors import TimeoutError, UsageError
from ronde.stall.stacks import places_of_waits

__all__ = [
    "DONE",
    "NO_LIMIT",
    "CombinedWork",
    "Completer",
    "Done",
    "InFlight",
    "InFlightMemory",
    "Operation",
    "Recorded",
    "is_profiling",
    "nanoseconds",
    "of_several_tensors",
]

_log = logging.getLogger(__name__)

NO_LIMIT = timedelta(0)
_MICROSECOND = timedelta(microseconds=1)
_NO_LOCK = nullcontext()

# Before PyTorch 2.8, C++ code that has a work does not keep its Python object alive. Without that object it finds none
# of the methods here, and waits forever. So works stay in `_unwaited` until somebody waits for them. A work of several
# tensors, for each of which C++ code may wait, becomes one of C++ itself (`of_several_tensors`).
_FORGETS_WORKS = torch.__version__ < (2, 8)
_MOST_UNWAITED = 10_000  # a program that never waits drops the oldest ones
_unwaited: dict[int, TorchWork] = {}


def _keep(work: TorchWork) -> None:
    _unwaited[id(work)] = work
    if len(_unwaited) > _MOST_UNWAITED:
        _unwaited.pop(next(iter(_unwaited)), None)


def of_several_tensors(work: Any) -> Any:
    """Return the work in a form whose end C++ code can await once for each of its tensors."""
    if not _FORGETS_WORKS:
        return work
    return c10d._create_work_from_future(work.get_future())  # type: ignore[attr-defined]


def nanoseconds(time: timedelta) -> int:
    """Return the time in nanoseconds."""
    return time // _MICROSECOND * 1000


class InFlight(Protocol):
    """A call of a native queue or a message of a mailbox."""

    def is_done(self) -> bool: ...
    def has_failed(self) -> bool: ...
    def wait(self, timeout_ns: int, /) -> bool: ...


is_profiling = torch.autograd._profiler_enabled  # in this thread; takes some 30 ns


class Recorded:
    """An operation in flight that is an event of PyTorch's profiler: `ronde:all_reduce`, with the shapes of the inputs.

    The event lasts as long as the operation, so a thread waits for that and ends it. PyTorch takes an event that
    another thread ends for an asynchronous one, as those of Gloo are. This is done once the event has ended.
    """

    def __init__(self, pending: InFlight, name: str, inputs: Sequence[torch.Tensor]) -> None:
        self.operation = pending
        self._has_ended = threading.Event()
        # Only the callback of a future ends an event in another thread: it takes the state of the profiler along.
        event = _autograd._record_function_with_args_enter(f"ronde:{name}", *inputs)
        self._end_of_event: Future[None] = Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut(event, self._end_of_event)
        threading.Thread(target=self._end, name="ronde-event", daemon=True).start()

    def _end(self) -> None:
        try:
            self.operation.wait(-1)
        except Exception:
            pass  # the thread that waits for the operation raises it
        finally:
            self._end_of_event.set_result(None)
            self._has_ended.set()

    def is_done(self) -> bool:
        return self._has_ended.is_set()

    def has_failed(self) -> bool:
        return self.operation.has_failed()

    def wait(self, timeout_ns: int, /) -> bool:
        if not self._has_ended.wait(timeout_ns / 1e9 if timeout_ns >= 0 else None):
            return False
        return self.operation.wait(-1)


class InFlightMemory:
    """The memory of a group's operations in flight, for native code that reads and writes it.

    Any thread may call it. Memory that is still in use when the group ends lives in `_leftovers`.
    """

    _leftovers: ClassVar[InFlightMemory]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[InFlight, object]] = deque()
        self._most = 64

    def keep(self, pending: InFlight, memory: object) -> None:
        """Keep the memory until the operation is done."""
        kept = self._kept
        with self._lock:
            while kept and kept[0][0].is_done():
                kept.popleft()
            if len(kept) >= self._most:  # others may wait behind a message that does not come
                kept = self._kept = deque(each for each in kept if not each[0].is_done())
                self._most = 2 * len(kept) + 64
            kept.append((pending, memory))

    def outlive_group(self) -> None:
        """Keep it also when the group is gone: a cancelled message may be moving still."""
        for pending, memory in self._kept:
            if not pending.is_done():
                InFlightMemory._leftovers.keep(pending, memory)
        self._kept = deque()

    @staticmethod
    def keep_leftover(pending: InFlight, memory: object) -> None:
        """Keep the memory of an operation that nobody waits for any more."""
        InFlightMemory._leftovers.keep(pending, memory)


InFlightMemory._leftovers = InFlightMemory()


class Operation(TorchWork):  # type: ignore[misc]
    """An operation in flight. Its tensors must not change until it is done.

    `result`: the output tensors. `memory`: everything that has to stay alive until the operation is done, emptied then.
    `finish`: the last step with the output, such as a copy to the device; the first thread that finds the operation
    done takes it. `limit_ns`: how long `wait` waits without an argument (0: for as long as the operation takes).
    `source`: of a message, its sender. `what`: describes a message, which no stall report has; `wait` logs a warning
    after `warning_ns` (0: none).
    """

    def __init__(
        self,
        pending: InFlight,
        completer: Completer,
        result: Sequence[torch.Tensor],
        memory: list[Any],
        finish: Callable[[], None] | None = None,
        limit_ns: int = 0,
        source: Callable[[], int] | None = None,
        what: Callable[[], str] | None = None,
        warning_ns: int = 0,
    ) -> None:
        super().__init__()
        self._pending, self._completer = pending, completer
        self._result, self._memory = result, memory
        self._what, self._warning_ns = what, warning_ns
        self._finish, self._source = finish, source
        self._finishing = _NO_LOCK if finish is None else threading.Lock()
        self._limit_ns = limit_ns
        self.is_message = what is not None
        if _FORGETS_WORKS:
            _keep(self)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the operation is done. Raises its error, TimeoutError if `timeout` is over before."""
        limit_ns = nanoseconds(timeout) if timeout else self._limit_ns
        if not self._is_done_within(limit_ns if limit_ns > 0 else -1):
            what = "the operation" if self._what is None else self._what()
            raise TimeoutError(
                f"timed out: {what} was not done after {limit_ns / 1e9:g} s; its timeout is over; it goes on",
                waited_ns=limit_ns,
            )
        self._finish_once()
        self._memory.clear()
        if _FORGETS_WORKS:
            _unwaited.pop(id(self), None)
        return True

    def _finish_once(self) -> None:
        with self._finishing:
            if self._finish is not None:
                self._finish()
                self._finish = None

    def _is_done_within(self, limit_ns: int) -> bool:
        """Wait, and log a warning if that takes long. Return False if the time is over; -1: no limit."""
        first_ns = self._warning_ns
        if self._what is None or first_ns == 0 or 0 <= limit_ns <= first_ns:
            return self._pending.wait(limit_ns)
        if self._pending.wait(first_ns):
            return True
        places = "; ".join(places_of_waits())
        _log.warning("%s waits for more than %g s, in %s", self._what(), first_ns / 1e9, places)
        return self._pending.wait(limit_ns if limit_ns < 0 else limit_ns - first_ns)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation is done, so that its results are in the output tensors."""
        if not self._pending.is_done():
            return False
        if not self._pending.has_failed():
            self._finish_once()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and not self._pending.has_failed()

    def exception(self) -> BaseException | None:
        """Return the error of an operation that has failed, None otherwise."""
        if self._pending.is_done() and self._pending.has_failed():
            try:
                self._pending.wait(-1)
            except Exception as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        return list(self._result)

    def source_rank(self) -> int:
        """Return the rank of the group that has sent the message."""
        if self._source is None:
            raise UsageError("only a receive has a source rank")
        return self._source()

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future whose value is the list of output tensors. It is done only once their data are there."""
        return self._completer.future_of(self, is_message=self.is_message)


class Done(TorchWork):  # type: ignore[misc]
    """An operation that was done when the call returned."""

    is_message = False

    def __init__(self, result: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._result = list(result)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future(devices=_devices_of(self._result))
        future.set_result(self._result)
        return future


DONE = Done()  # without a result, for all operations whose callers only wait


class CombinedWork(TorchWork):  # type: ignore[misc]
    """Several operations as one."""

    def __init__(self, works: Sequence[Any], completer: Completer) -> None:
        super().__init__()
        self._works, self._completer = list(works), completer
        self.is_message = any(work.is_message for work in self._works)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait for all of them, also if one fails. Raises the first error."""
        failure = None
        ends_s = time.monotonic() + timeout.total_seconds()
        for work in self._works:
            left = timedelta(seconds=max(ends_s - time.monotonic(), 1e-6)) if timeout else NO_LIMIT
            try:
                work.wait(left)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next(filter(None, (work.exception() for work in self._works)), None)

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[Any]:
        return self._completer.future_of(self, is_message=self.is_message)


_this_thread = threading.local()  # `completer`: the one whose thread it is


class Completer:
    """Completes the futures of one group's operations, in threads that start when they are needed.

    One thread serves the collectives, which end in their order whatever this process does. A further completer serves
    the operations that a callback begins in that thread. So a callback may wait for those, but not for a future that
    the program has asked for before and that comes later. A message may depend on the end of another future, so each
    future of a message has its own thread.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._of_callbacks: Completer | None = None
        self._of_messages: set[threading.Thread] = set()

    def future_of(self, work: Any, *, is_message: bool = False) -> Future[Any]:
        """Return a future of the operation; an error of it is the error of the future."""
        busy: Completer | None = getattr(_this_thread, "completer", None)
        if busy is not None:
            busy._of_callbacks = busy._of_callbacks or Completer()
            return busy._of_callbacks._begin_future(work, is_message)
        return self._begin_future(work, is_message)

    def _begin_future(self, work: Any, is_message: bool) -> Future[Any]:
        base: Future[Any] = Future(devices=_devices_of(work.result()))
        # An exception that Python sets as such would end the process in DDP's C++ code; one that a callback raises
        # arrives there as a RuntimeError.
        future = base.then(_value_or_error)
        if work.is_completed():
            _complete(work, base)
        elif is_message:
            self._start_thread_for(work, base)
        else:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="ronde-futures", daemon=True)
                    self._thread.start()
            self._waiting.put((work, base))
        return future

    def close(self, patience_s: float = 5) -> None:
        """End the threads once they have completed all futures, which the end of their operations must allow."""
        with self._starting:
            threads = [*self._of_messages, *([self._thread] if self._thread else ())]
        self._waiting.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(patience_s)
        if self._of_callbacks is not None:
            self._of_callbacks.close(patience_s)

    def _start_thread_for(self, work: Any, future: Future[Any]) -> None:
        def run() -> None:
            _complete(work, future)
            with self._starting:
                self._of_messages.discard(thread)

        thread = threading.Thread(target=run, name="ronde-future", daemon=True)
        with self._starting:
            self._of_messages.add(thread)
            thread.start()

    def _run(self) -> None:
        _this_thread.completer = self
        while (item := self._waiting.get()) is not None:
            _complete(*item)
            del item  # else it keeps the tensors of the last operation


def _devices_of(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    """Return the devices that a future must know to have these tensors as its value; none for main memory."""
    return list({each.device: None for each in tensors if each.is_cuda})


def _complete(work: Any, future: Future[Any]) -> None:
    try:
        work.wait()
        future.set_result(work.result())
    except BaseException as error:
        future.set_result(_Failure(error))


class _Failure:
    """The error of an operation, as the value of a future."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def throw(self) -> NoReturn:
        raise self._error


def _value_or_error(future: Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, _Failure):
        value.throw()
    return value
