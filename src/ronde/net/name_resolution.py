"""Resolves host names in threads, because a name server may not answer within the caller's time limit.

1. There is one query at a time for each name. A caller that cannot wait any longer leaves it open, and the next caller
   gets its answer.
2. Until there is a new answer the last one counts: the name server may be lost together with a host that the caller
   now looks for at another address.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Answer", "NameResolver"]

Answer = Sequence[tuple[Any, ...]]  # of socket.getaddrinfo


class NameResolver:
    """Open queries and known answers. `ask` returns the addresses of a host and port, or raises OSError."""

    def __init__(self, ask: Callable[[str, int], Answer]) -> None:
        self._ask = ask
        self._queries: dict[tuple[str, int], _NameQuery] = {}
        self._known: dict[tuple[str, int], Answer] = {}

    def begin_query(self, host: str, port: int) -> _NameQuery:
        """Return the open query for this name, or begin one."""
        query = self._queries.get((host, port))
        if query is None or query.pid != os.getpid():  # a thread does not survive a fork
            query = self._queries[host, port] = _NameQuery(lambda: self._ask(host, port))
        return query

    def find_addresses(self, host: str, port: int, within_ns: int) -> Answer:
        """Return the addresses after `within_ns` at most. Raises OSError if they are not known by then."""
        name, query = (host, port), self.begin_query(host, port)
        if query.done.wait(max(0, within_ns) / 1e9):
            if self._queries.get(name) is query:
                del self._queries[name]
            if not isinstance(query.answer, OSError):
                self._known[name] = query.answer
            elif name not in self._known or query.answer.errno != socket.EAI_AGAIN:
                raise query.answer.with_traceback(None)
        elif name not in self._known:
            raise OSError(errno.ETIMEDOUT, f"no name server has answered yet where {host} is")
        return self._known[name]


class _NameQuery:
    """A thread that asks, then sets `answer` and `done`."""

    def __init__(self, ask: Callable[[], Answer]) -> None:
        self.pid = os.getpid()
        self.done = threading.Event()
        self.answer: Answer | OSError = ()
        self._ask = ask
        threading.Thread(target=self._run, name="ronde-names", daemon=True).start()

    def _run(self) -> None:
        try:
            self.answer = self._ask()
        except OSError as error:
            self.answer = error
        finally:
            self.done.set()
