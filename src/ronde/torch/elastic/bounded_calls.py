"""Calls of native code that waits for other ranks, and whose wait no other thread can end.

Gloo waits until each member has connected, up to the group's timeout of half an hour. If a member dies meanwhile, the
round is over, and the process has to go on in another one. So a helper thread makes the call, and its caller leaves it
alone when the round is over. A wait that has not ended a second later is one for a lost rank, which cannot succeed any
more; it ends by the group's timeout, and its result is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ronde.errors import PeerLostError

__all__ = ["call_until_over"]

POLL_S = 0.02
GRACE_S = 1.0  # for a call that fails, or succeeds, because of the end of the round


class _CallInThread:
    """A call in a thread; the result or the error is there when `done` is set."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self._function: Callable[[], Any] | None = function
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        threading.Thread(target=self._run, name="ronde-process-group", daemon=True).start()

    def _run(self) -> None:
        assert self._function is not None
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # each thread has its own
            self.result = self._function()
        except BaseException as error:
            self.error = error
        self._function = None
        self.done.set()


def call_until_over(
    function: Callable[[], Any], over: Callable[[], str | None], end_connections: Callable[[], None]
) -> Any:
    """Return the result of `function`, or raise its error; raise PeerLostError when the round is over.

    Args:
        function: waits for other ranks. It runs in another thread.
        over: returns why the round is over; None if it is not.
        end_connections: ends connections of the call, so that waits for data on these end. Called if the round is over.
    """
    call = _CallInThread(function)
    while not call.done.wait(POLL_S):
        if (reason := over()) is not None:
            end_connections()
            call.done.wait(GRACE_S)
            raise PeerLostError(
                f"the process group cannot be made: another rank was lost meanwhile ({reason})"
            ) from call.error
    if call.error is not None:
        raise call.error
    return call.result
