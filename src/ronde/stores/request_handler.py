"""Answers the requests of a served store's clients from its table, without input, output or a clock.

The rules:
  1. A session is one client, across its connections. A request with the number of the session's last one is a
     repetition, because the answer was lost: it gets the same answer and has no effect.
  2. A request that must wait is parked under the keys or the queue that it waits for. A change of these retries it, the
     longest waiting first; its answer is then in `woken`.
  3. With a journal, a turn is `begin_turn`, any number of requests, then `keep_turn` once the result of `pack_turn` is
     written; or `refuse_turn`, which undoes the turn and answers its requests again, with a refusal for those that
     would change something. No answer may leave before that.
  4. Without a journal, the native fast path (cpp/binding/store_session.h) answers most requests before they come here,
     from `content` and the sessions. It answers SET, GET, WAIT, ADD and COMPARE_SET, if the request is valid, is no
     repetition, need not wait and wakes no other request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ronde._native import StoreSession
from ronde.errors import ProtocolError, UsageError
from ronde.stores import wire
from ronde.stores.journal import pack_changes, pack_sessions
from ronde.stores.store import KEY_LIMIT_BYTES, VALUE_LIMIT_BYTES
from ronde.stores.table import NUMBER_BYTES, Table
from ronde.stores.wire import ANSWER, FRAME_LIMIT_BYTES, Request, Status, StoreOperation, answer

__all__ = ["RequestHandler", "Parked", "ClientSession"]

REMEMBERED_NS = 600 * 10**9  # how long to keep the last answer of a client that is gone
MAX_DEPARTED = 10_000
OK = answer(Status.OK)
ABSENT = answer(Status.ABSENT)

_ParkedSessions = dict[bytes, dict["ClientSession", None]]
_pack_head = ANSWER.pack


class ClientSession(StoreSession):
    """One client. `number`, `answer`: of its last numbered request; `connection`: an object of the server."""

    __slots__ = ("connection", "id", "parked")

    def __init__(self, id: bytes = b"") -> None:
        self.id = id
        self.answer = OK
        self.parked: Parked | None = None
        self.connection: Any = None


class Parked:
    """A waiting request, under `names` in `index`; `retry` returns the answer, or where to wait next."""

    __slots__ = ("index", "names", "request", "retry")

    def __init__(
        self, index: _ParkedSessions, names: tuple[bytes, ...], retry: Callable[[], bytes | Parked]
    ) -> None:
        self.index = index
        self.names = names
        self.retry = retry
        self.request: Request = (0, 0, 0, b"", b"")

    @property
    def number(self) -> int:
        return self.request[1]

    @property
    def timeout_ns(self) -> int:
        return self.request[2]


class _TurnEntry(NamedTuple):
    """A request of a turn, or a parked one that was retried, with the earlier `number` and `answer` of its session."""

    session: ClientSession
    connection: Any
    request: Request
    number: int
    answer: bytes


_Handler = Callable[[ClientSession, bytes, bytes], bytes | Parked]


class RequestHandler:
    """All sessions of one store, and its table. `woken`: answers for waiting connections; the server empties it."""

    def __init__(self) -> None:
        self.table = Table()
        self.woken: list[tuple[Any, bytes]] = []
        self._refusal_reason = ""
        self._sessions: dict[bytes, ClientSession] = {}
        self._departed: dict[ClientSession, int] = {}  # when they left, the oldest first
        self._waiting: _ParkedSessions = {}
        self._poppers: _ParkedSessions = {}
        self._fingerprints: dict[bytes, tuple[bytes, bytes]] = {}  # of long values, by key
        self._turn: list[_TurnEntry] | None = None
        by_operation: dict[int, _Handler] = {
            StoreOperation.SET: self._set,
            StoreOperation.GET: self._get,
            StoreOperation.WAIT: self._wait,
            StoreOperation.ADD: self._add,
            StoreOperation.COMPARE_SET: self._compare_set,
            StoreOperation.DELETE: self._delete,
            StoreOperation.CHECK: self._check,
            StoreOperation.NUM_KEYS: self._num_keys,
            StoreOperation.APPEND: self._append,
            StoreOperation.MULTI_GET: self._multi_get,
            StoreOperation.MULTI_SET: self._multi_set,
            StoreOperation.DELETE_PREFIX: self._delete_prefix,
            StoreOperation.PUSH: self._push,
            StoreOperation.POP: self._pop,
            StoreOperation.QUEUE_LEN: self._queue_len,
            StoreOperation.WATCH: self._watch,
            StoreOperation.HOLD: self._hold,
            StoreOperation.BYE: self._bye,
        }
        self._handlers = by_operation
        self._named = frozenset(operation for operation in wire.OPERATIONS if wire.is_named(operation))

    @property
    def content(self) -> tuple[dict[bytes, bytes], dict[bytes, Any]]:
        """The values by key, and by key the sessions whose requests wait for it; for the native fast path."""
        return self.table.values, self._waiting

    # Sessions

    def open_session(self, id: bytes) -> ClientSession:
        """Return the session of the client with this id, which has a new connection; without an id, a new session."""
        session = self._sessions.get(id)
        if session is None:
            session = ClientSession(id)
            if id:
                self._sessions[id] = session
        self._departed.pop(session, None)
        self._unpark(session)
        return session

    def note_departure(self, session: ClientSession, now_ns: int) -> None:
        """Note that a client is gone: its parked request and held keys go. It may come back."""
        self._unpark(session)
        for key in self.table.release_holder(session):
            self._retry_waiting(key)
        if session.id in self._sessions:
            self._departed[session] = now_ns
        while self._departed:
            oldest, left_ns = next(iter(self._departed.items()))
            if now_ns - left_ns < REMEMBERED_NS and len(self._departed) <= MAX_DEPARTED:
                break
            del self._departed[oldest], self._sessions[oldest.id]

    def _bye(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        self._sessions.pop(session.id, None)
        raise ConnectionResetError("said goodbye")

    # Requests

    def answer_request(
        self,
        session: ClientSession,
        operation: int,
        number: int,
        timeout_ns: int,
        key: bytes,
        argument: bytes,
    ) -> bytes | None:
        """Return the answer to a request; None if it is parked.

        Raises ProtocolError if it is malformed, ConnectionResetError if it is a goodbye.
        """
        if session.parked is not None:
            raise ProtocolError("a client of the store asks again while it waits for an answer")
        if self._turn is not None:
            request = operation, number, timeout_ns, key, argument
            self._turn.append(
                _TurnEntry(session, session.connection, request, session.number, session.answer)
            )
        if number and number == session.number:
            return session.answer
        handler = self._handlers.get(operation)
        if handler is None or len(key) > KEY_LIMIT_BYTES or (not key and operation in self._named):
            raise ProtocolError("a request to the store has an unknown operation or an invalid key")
        if self._refusal_reason and operation in _CHANGING:
            return answer(Status.FAILED, self._refusal_reason.encode())
        try:
            reply = handler(session, key, argument)
        except UsageError as error:
            reply = answer(Status.REFUSED, str(error).encode())
        if isinstance(reply, Parked):
            if timeout_ns == 0:
                return ABSENT
            reply.request = operation, number, timeout_ns, key, argument
            self._park(session, reply)
            return None
        if number:
            session.number, session.answer = number, reply
        return reply

    def expire_request(self, session: ClientSession) -> bytes:
        """Return the answer to a parked request that has reached its timeout."""
        self._unpark(session)
        return ABSENT

    # Waiting

    def _park(self, session: ClientSession, parked: Parked) -> None:
        session.parked, session.is_parked = parked, True
        for name in parked.names:
            parked.index.setdefault(name, {})[session] = None

    def _unpark(self, session: ClientSession) -> None:
        parked, session.parked, session.is_parked = session.parked, None, False
        if parked is None:
            return
        for name in parked.names:
            waiting = parked.index.get(name)
            if waiting is not None:
                waiting.pop(session, None)
                if not waiting:
                    del parked.index[name]

    def _retry_waiting(self, key: bytes) -> None:
        """Retry the requests that wait for the key."""
        for session in list(self._waiting.get(key, ())):
            self._retry_parked(session)

    def _retry_parked(self, session: ClientSession) -> None:
        parked = session.parked
        assert parked is not None
        if self._turn is not None:
            self._turn.append(
                _TurnEntry(session, session.connection, parked.request, session.number, session.answer)
            )
        reply = parked.retry()
        if isinstance(reply, Parked):
            if reply.names != parked.names:
                self._unpark(session)
                reply.request = parked.request
                self._park(session, reply)
            return
        self._unpark(session)
        if parked.number:
            session.number, session.answer = parked.number, reply
        if session.connection is not None:  # else the client repeats the request when it is back
            self.woken.append((session.connection, reply))

    # Keys

    def _set(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        if len(argument) > VALUE_LIMIT_BYTES:
            raise _too_long(argument)
        self.table.set(key, argument)
        if key in self._waiting:
            self._retry_waiting(key)
        return OK

    def _get(self, session: ClientSession, key: bytes, argument: bytes) -> bytes | Parked:
        value = self.table.get(key)
        if value is None:
            return Parked(self._waiting, (key,), partial(self._get, session, key, argument))
        return _pack_head(1 + len(value), 0) + value

    def _wait(self, session: ClientSession, key: bytes, argument: bytes) -> bytes | Parked:
        keys = wire.keys_from(argument)
        keys.reverse()
        return self._wait_for(keys, None)

    def _multi_get(self, session: ClientSession, key: bytes, argument: bytes) -> bytes | Parked:
        keys = wire.keys_from(argument)
        return self._wait_for(keys[::-1], keys)

    def _wait_for(self, left: list[bytes], wanted: list[bytes] | None) -> bytes | Parked:
        """Wait for the keys in `left`, from its end on, then answer with the values of the `wanted` keys."""
        while True:
            while left and self.table.get(left[-1]) is not None:
                left.pop()
            if left:
                return Parked(self._waiting, (left[-1],), partial(self._wait_for, left, wanted))
            if wanted is None:
                return OK
            values = self.table.multi_get(wanted)
            if values is not None:
                return answer(Status.OK, _within_frame(wire.pack_values(values)))
            left = wanted[::-1]

    def _add(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        try:
            amount = int(argument) if len(argument) <= NUMBER_BYTES else None
        except ValueError:
            amount = None
        if amount is None:
            raise ProtocolError("a request to the store has an invalid number")
        total = self.table.add(key, amount)
        number = self.table.get(key) or b"%d" % total  # faster than formatting it again
        if key in self._waiting:
            self._retry_waiting(key)
        return _pack_head(1 + len(number), 0) + number

    def _compare_set(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        expected, desired = wire.split_expected(argument)
        if len(desired) > VALUE_LIMIT_BYTES:
            raise _too_long(desired)
        value = self.table.compare_set(key, expected, desired)
        if key in self._waiting:
            self._retry_waiting(key)
        return _pack_head(1 + len(value), 0) + value

    def _delete(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        if not self.table.delete(key):
            return ABSENT
        if key in self._waiting:
            self._retry_waiting(key)
        return OK

    def _check(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        return OK if self.table.check(wire.keys_from(argument)) else ABSENT

    def _num_keys(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        return answer(Status.OK, b"%d" % self.table.num_keys())

    def _append(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        self.table.append(key, argument)
        self._retry_waiting(key)
        return OK

    def _multi_set(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        values = {each: value or b"" for each, value in wire.pairs_from(argument).items()}
        self.table.multi_set(values)
        for each in values:
            if each in self._waiting:
                self._retry_waiting(each)
        return OK

    def _delete_prefix(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        keys, queues = self.table.delete_prefix(key)
        for each in keys:
            if each in self._waiting:
                self._retry_waiting(each)
        return answer(Status.OK, b"%d" % (len(keys) + len(queues)))

    # Queues

    def _push(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        if len(argument) > VALUE_LIMIT_BYTES:
            raise _too_long(argument)
        self.table.push(key, argument)
        if key in self._poppers:
            self._retry_parked(next(iter(self._poppers[key])))
        return OK

    def _pop(self, session: ClientSession, key: bytes, argument: bytes) -> bytes | Parked:
        value = self.table.pop(key)
        if value is None:
            return Parked(self._poppers, (key,), partial(self._pop, session, key, argument))
        return answer(Status.OK, value)

    def _queue_len(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        return answer(Status.OK, b"%d" % self.table.queue_len(key))

    # Watched and held keys

    def _watch(self, session: ClientSession, key: bytes, argument: bytes) -> bytes | Parked:
        return self._watch_for(wire.known_from(argument))

    def _watch_for(self, known: dict[bytes, bytes | None]) -> bytes | Parked:
        changed: dict[bytes, bytes | None] = {}
        for key, before in known.items():
            value = self.table.get(key)
            if (None if value is None else self._fingerprint(key, value)) != before:
                changed[key] = value
        if not changed:
            return Parked(self._waiting, tuple(known), partial(self._watch_for, known))
        return answer(Status.OK, _within_frame(wire.pack_pairs(changed)))

    def _fingerprint(self, key: bytes, value: bytes) -> bytes:
        """Return the fingerprint of the key's value; that of a long value is cached, because many may watch it."""
        if len(value) <= wire.DIGEST_BYTES:
            return wire.fingerprint(value)
        before = self._fingerprints.get(key)
        if before is None or before[0] is not value:
            if len(self._fingerprints) > len(self._waiting) + 64:  # most of these keys are no longer watched
                self._fingerprints.clear()
            before = self._fingerprints[key] = value, wire.fingerprint(value)
        return before[1]

    def _hold(self, session: ClientSession, key: bytes, argument: bytes) -> bytes:
        if len(argument) > VALUE_LIMIT_BYTES:
            raise _too_long(argument)
        self.table.hold(key, argument, session)
        if key in self._waiting:
            self._retry_waiting(key)
        return OK

    # Turns with a journal

    def begin_turn(self) -> None:
        """Begin a turn that can be undone."""
        self._turn = []
        self.table.begin_changes()

    def pack_turn(self) -> bytes:
        """Return the turn's changes for the journal; b"" if there are none."""
        changes = pack_changes(self.table.changes())
        if not changes:
            return b""
        changed = {each.session: None for each in self._turn or () if each.session.number != each.number}
        return changes + pack_sessions((each.id, each.number, each.answer) for each in changed if each.id)

    def keep_turn(self) -> None:
        """End the turn, and keep its changes."""
        self._turn = None
        self.table.keep_changes()

    def refuse_turn(self, reason: str) -> list[tuple[Any, bytes | None]]:
        """Undo the turn; return the answers that its requests get instead, None for a request that is parked."""
        turn, self._turn = self._turn or [], None
        self.table.undo_changes()
        self.woken.clear()
        for session, _, _, number, old in reversed(turn):
            self._unpark(session)
            session.number, session.answer = number, old
        self._refusal_reason = reason
        answers: list[tuple[Any, bytes | None]] = []
        for session, connection, request, _, _ in turn:
            if session.parked is None and session.connection is connection:
                answers.append((connection, self.answer_request(session, *request)))
        self._refusal_reason = ""
        answers += self.woken
        self.woken.clear()
        return answers

    def remembered_sessions(self) -> list[tuple[bytes, int, bytes]]:
        """Return id, number and answer of all sessions with a numbered request."""
        return [(each.id, each.number, each.answer) for each in self._sessions.values() if each.number]

    def restore_session(self, id: bytes, number: int, last: bytes, now_ns: int) -> None:
        """Restore a session from a journal."""
        session = self.open_session(id)
        session.number, session.answer = number, last
        self._departed[session] = now_ns


_CHANGING = frozenset(
    {
        StoreOperation.SET,
        StoreOperation.ADD,
        StoreOperation.COMPARE_SET,
        StoreOperation.DELETE,
        StoreOperation.APPEND,
        StoreOperation.MULTI_SET,
        StoreOperation.DELETE_PREFIX,
        StoreOperation.PUSH,
        StoreOperation.POP,
    }
)


def _too_long(value: bytes) -> ProtocolError:
    return ProtocolError(f"a value of {len(value)} bytes exceeds the limit of {VALUE_LIMIT_BYTES} bytes")


def _within_frame(value: bytes) -> bytes:
    if len(value) >= FRAME_LIMIT_BYTES:
        raise UsageError(
            f"the values asked for have {len(value)} bytes, more than one answer may have ({FRAME_LIMIT_BYTES}); ask "
            "for fewer at a time"
        )
    return value
