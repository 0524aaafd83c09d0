"""Operations as events of PyTorch's profiler: `ronde:all_reduce` and so on, with the shapes of the inputs.

An event lasts as long as its operation, so a thread waits for that and ends it. There are such threads only while a
profiler runs. PyTorch takes an event that another thread ends for an asynchronous one, as those of Gloo are.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch._C import _autograd
from torch.futures import Future

if TYPE_CHECKING:
    from ronde.torch.distributed.work import InFlight

__all__ = ["Recorded", "is_profiling"]

is_profiling = torch.autograd._profiler_enabled  # of this thread; takes some 30 ns


class Recorded:
    """An operation in flight that is an event. It is done once the event has ended, so that the profiler sees that."""

    def __init__(self, pending: InFlight, name: str, inputs: Sequence[torch.Tensor]) -> None:
        self._pending = pending
        self._has_ended = threading.Event()
        # Only the callback of a future ends an event in another thread: it takes the state of the profiler along.
        event = _autograd._record_function_with_args_enter(f"ronde:{name}", *inputs)
        self._end_of_event: Future[None] = Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut(event, self._end_of_event)
        threading.Thread(target=self._end, name="ronde-event", daemon=True).start()

    def _end(self) -> None:
        try:
            self._pending.wait(-1)
        except Exception:
            pass  # the thread that waits for the operation raises it
        finally:
            self._end_of_event.set_result(None)
            self._has_ended.set()

    def is_done(self) -> bool:
        return self._has_ended.is_set()

    def has_failed(self) -> bool:
        return self._pending.has_failed()

    def wait(self, timeout_ns: int, /) -> bool:
        if not self._has_ended.wait(timeout_ns / 1e9 if timeout_ns >= 0 else None):
            return False
        return self._pending.wait(-1)
