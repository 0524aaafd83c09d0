"""The rendezvous of nodes that share a store: the shell of `participant`, and one factory per backend.

1. One thread steps the machine: it waits for news and for the machine's next time, never for the store; the threads of
   a `StoreSession` do that. If the store is lost, another thread searches for it, or for another one, and the machine
   goes on there with a new session. Without a session the machine still gets the time, so workers end when the lease
   does.
2. A file, an etcd or a `ronde store` outlives the job, and keeps its state under its --rdzv-id, which is often the
   default. If no node of that job lives, the first node to arrive begins another job. If one lives, it may be about to
   end, so the new node waits for a moment; then it is too late for that job, and reports so. Compare-and-set on the
   state decides, so of several nodes that arrive at once one begins the job, and the others find it. The job begins in
   a new term without a leader: the first node that joins claims to lead.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ronde.errors import (
    AuthenticationError,
    PeerLostError,
    ProtocolError,
    RondeError,
    TimeoutError,
    UsageError,
)
from ronde.job_key import JobKey
from ronde.net.event_queue import EventQueue
from ronde.rendezvous.effects import Effect, Event, NotifyAgent, Probe, Probed, Tick
from ronde.rendezvous.membership import (
    Budget,
    Failure,
    Node,
    Notice,
    RendezvousBroken,
    RendezvousEvent,
    Rules,
)
from ronde.rendezvous.participant import Participant
from ronde.rendezvous.probes import find_ended
from ronde.rendezvous.rendezvous import RendezvousConfig
from ronde.rendezvous.state import (
    ALIVE,
    STATE,
    JobPhase,
    JobState,
    JobTerms,
    alive_key,
    decode_roster,
    decode_state,
    encode,
)
from ronde.rendezvous.store_access import (
    FixedStoreAccess,
    FoundStore,
    StoreAccess,
    TcpStoreAccess,
    endpoint_of,
    etcd_endpoint,
    may_rehost,
    open_etcd_store,
    open_file_store,
)
from ronde.rendezvous.store_session import StoreSession
from ronde.stores.etcd_gateway import parse_endpoints
from ronde.stores.store import Store

__all__ = ["StoreRendezvous", "make_etcd", "make_file", "make_static", "make_tcp"]

NAMED_HOSTS = 8
LONGEST_WAIT_NS = 60 * 10**9
CLOSE_NS = 3 * 10**9
CONNECT_NS = 10**9  # for one attempt, so that `close` does not wait longer
LEAST_NS = 10**8  # for the last attempt
LEAST_SILENCE_NS = 2 * 10**9  # of the store, before a notice
LEAVING_NS = 3 * 10**9  # how long nodes of an earlier job may take to end
CHECK_NS = 10**9 // 2  # the interval between calls of `go_on`, while an earlier job ends
NO_LEADER = ""
OTHER_JOB_REMEDY = (
    "does it belong to another job? Then choose another port; otherwise give all nodes the same RONDE_JOB_KEY"
)
NO_STORE_REMEDY = "start the node that serves it, correct --rdzv-endpoint, or wait longer (--start-timeout)"

_log = logging.getLogger(__name__)


class StoreRendezvous:
    """The `Rendezvous` of a node over a store.

    `group_rank`: the given group rank of this node, -1 if none is given. `start_timeout_ns`: how long to wait for the
    store. `runs_once`: a job that has ended in the store is this one, and ends this node; else a new job follows it.
    """

    def __init__(
        self,
        rules: Rules,
        access: StoreAccess,
        group_rank: int = -1,
        start_timeout_ns: int = 300 * 10**9,
        runs_once: bool = False,
    ) -> None:
        self._rules = rules
        self._start_timeout_ns = min(start_timeout_ns, rules.join_timeout_ns)
        self._access = access
        self._given_rank = group_rank
        self._runs_once = runs_once
        self._participant = Participant(rules)
        self._events: EventQueue[RendezvousEvent] = EventQueue()
        self._news: queue.SimpleQueue[Callable[[], list[Effect]] | None] = queue.SimpleQueue()
        self._session: StoreSession | None = None
        self._old_sessions: list[StoreSession] = []  # their threads may still be ending
        self._thread: threading.Thread | None = None
        self._node = ""
        self._terms: JobTerms | None = None
        self._is_closing = False
        self._close_by_ns = 0
        self._is_lost = False
        self._search: threading.Thread | None = None
        self._has_reported_silence = False  # of the store
        self._has_moved = False  # to another store
        # This node was redirected from it, and could not connect.
        self._failed_from: StoreSession | None = None

    # Calls of the agent

    def fileno(self) -> int:
        return self._events.fileno()

    def events(self) -> list[RendezvousEvent]:
        return self._events.take()

    def join(self, node: Node, budget: Budget) -> None:
        if self._given_rank >= 0:
            node = replace(node, wish=self._given_rank)
        self._node, self._terms = node.id, JobTerms.of(self._rules, budget)
        now_ns = time.monotonic_ns()  # the store may take a while
        # `describe_node` needs the store: only then it is known whether this node serves it.
        self._news.put(lambda: self._participant.join(now_ns, self._access.describe_node(node), budget))
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="ronde-rendezvous", daemon=True)
            thread.start()
            self._thread = thread

    def update_node(self, node: Node) -> None:
        if self._given_rank >= 0:
            node = replace(node, wish=self._given_rank)
        self._news.put(lambda: self._participant.update_node(self._access.describe_node(node)))

    def fail(self, failure: Failure) -> None:
        self._news.put(lambda: self._participant.fail(failure))

    def request_change(self, reason: str) -> None:
        self._news.put(lambda: self._participant.request_change(reason))

    def succeed(self) -> None:
        self._news.put(lambda: self._participant.succeed(time.monotonic_ns()))

    def note_awaited_exit(self, awaits_exit: bool) -> None:
        self._news.put(lambda: self._participant.note_awaited_exit(time.monotonic_ns(), awaits_exit))

    def end_job(self, reason: str) -> None:
        self._news.put(lambda: self._participant.end_job(reason))

    def leave(self, reason: str, ends_within_ns: int = 0) -> None:
        self._news.put(lambda: self._participant.leave(reason, ends_within_ns))

    def serves_others(self) -> bool:
        return self._access.serves_store()

    def close(self) -> None:
        """Send what is still to be sent, and close all. A second call does nothing."""
        if self._is_closing:
            return
        self._close_by_ns = deadline_ns = time.monotonic_ns() + CLOSE_NS
        self._is_closing = True
        self._news.put(None)
        if self._thread:
            self._thread.join(CLOSE_NS / 1e9)
        if self._search:
            self._search.join(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))
            self._close_found_store()
        session = self._session
        is_done = session is not None and not self._is_lost and session.finish(deadline_ns)
        others = self._participant.others if is_done else []
        self._access.close(lambda timeout_ns: self._wait_until_gone(others, timeout_ns))
        if session:
            self._end_session(session)
        for session in self._old_sessions:
            session.finish(deadline_ns)
        self._events.close()

    def _close_found_store(self) -> None:
        with suppress(queue.Empty):
            while True:
                if news := self._news.get_nowait():
                    news()  # its effects are void, but it closes a store that was found

    def _wait_until_gone(self, others: Sequence[str], timeout_ns: int) -> None:
        """Wait for the other nodes, which read the end of the job from the store that this node serves."""
        deadline_ns = time.monotonic_ns() + timeout_ns
        known: dict[str, bytes | None] = {alive_key(node): ALIVE for node in others}
        try:
            while self._session and known and (left_ns := deadline_ns - time.monotonic_ns()) > 0:
                for key in self._session.store.watch(known, left_ns):
                    del known[key]
        except RondeError:
            return

    # The thread

    def _run(self) -> None:
        try:
            self._open_first_store()
            while self._handle_next():
                pass
            while self._is_ending_job():
                self._handle_next()
        except Exception as error:  # or the agent would wait forever
            _log.exception("the rendezvous has failed")
            self._is_lost = True
            self._perform(self._participant.give_up(f"the rendezvous has failed: {error!r}"))

    def _open_first_store(self) -> None:
        """Open the store as soon as it exists."""
        deadline_ns = time.monotonic_ns() + self._start_timeout_ns
        has_reported = False
        while not self._is_closing:
            left_ns = deadline_ns - time.monotonic_ns()
            try:
                if store := self._succeed_ended_job(
                    self._access.open_store(max(min(left_ns, CONNECT_NS), LEAST_NS))
                ):
                    self._begin_session(store)
                return
            except TimeoutError as error:
                if left_ns <= CONNECT_NS:
                    message = str(error).partition("for the store ")[2] or str(error)
                    waited = f"waited {self._start_timeout_ns / 1e9:g} s for the store {message}"
                    self._give_up(f"{waited}; {NO_STORE_REMEDY}")
                    return
                if not has_reported:
                    self._events.put(Notice(str(error)))
                has_reported = True
            except AuthenticationError as error:
                self._give_up(f"{error}; {OTHER_JOB_REMEDY}")
                return
            except RondeError as error:
                self._give_up(str(error))
                return

    def _succeed_ended_job(self, store: Store) -> Store | None:
        """Return the store if this node may take part there. Raises TimeoutError if it is gone again."""
        assert self._terms
        if self._runs_once:
            return store
        silence_ns = self._rules.silence_ns
        patience_ns = max(silence_ns, LEAVING_NS)
        try:
            reason = succeed_ended_job(store, self._terms, patience_ns, lambda: not self._is_closing)
        except PeerLostError as error:  # the job there ended, and with it the node that served the store
            store.close()
            time.sleep(LEAST_NS / 1e9)
            raise TimeoutError(str(error), operation="store", waited_ns=LEAST_NS) from None
        except BaseException:
            store.close()
            raise
        if reason:
            store.close()
            self._give_up(reason)
            return None
        return store

    def _begin_session(self, store: Store) -> None:
        self._session = StoreSession(store, self._node, self._on_event, self._on_loss, self._on_moved)

    def _end_session(self, session: StoreSession) -> None:
        session.close()
        self._session, self._has_reported_silence = None, False
        self._old_sessions = [each for each in self._old_sessions if not each.finish(0)] + [session]

    def _give_up(self, reason: str) -> None:
        self._is_lost = True
        self._perform(self._participant.give_up(reason))

    def _on_event(self, session: StoreSession, event: Event) -> None:
        """Queue an event; called by a session's threads."""

        def step() -> list[Effect]:
            return self._participant.step(time.monotonic_ns(), event) if session is self._session else []

        self._news.put(step)

    def _on_loss(self, session: StoreSession, error: Exception) -> None:
        """Queue the loss of the store; called by a session's threads."""
        self._news.put(lambda: self._search_store(session, error))

    def _on_moved(self, session: StoreSession, address: str) -> None:
        """Queue a redirection to another store; called by a session's threads."""
        self._news.put(lambda: self._move_to(session, address))

    def _move_to(self, session: StoreSession, address: str) -> list[Effect]:
        """Move to the store of the others. The state of this node is of a job that it has begun alone."""
        if session is not self._session or self._is_lost or self._is_done():
            return []
        if session is self._failed_from and self._has_moved:
            return []  # a frozen node may redirect to a store that the others have left together with this one
        try:
            store = self._access.open_store_at(address)
        except RondeError as error:  # the node there has died, or is overloaded; the redirection stays
            _log.info("%s", error)
            self._failed_from = session
            return []
        self._end_session(session)
        self._begin_session(store)
        return self._participant.enter_store(time.monotonic_ns(), forget=f"the job goes on at {address}")

    def _search_store(self, session: StoreSession, error: Exception) -> list[Effect]:
        """Start the search for the lost store or another one."""
        if session is not self._session or self._is_lost or self._is_done():
            return []
        _log.info("%s", error)
        has_broken = isinstance(error.__cause__ or error.__context__, ConnectionError)  # not a timeout
        broke_now = has_broken and self._participant.store_silence.is_fresh(time.monotonic_ns())
        if not broke_now and self._rules.rehost and not self._has_reported_silence:
            self._events.put(Notice(f"{error}; looking for it and for the other nodes"))
        self._end_session(session)
        nodes = self._participant.roster
        were_there = self._participant.store_identity.present_nodes if broke_now else None
        self._participant.lose_store(broke_now)

        def search() -> None:
            try:
                found = self._access.find_store(nodes, were_there, lambda: not self._is_done())
                reason = f"the rendezvous cannot go on: {error}"
                if not found and nodes and self._rules.rehost:
                    hosts = ", ".join(
                        sorted({node.host for node in nodes if node.id != self._node})[:NAMED_HOSTS]
                    )
                    reason += f"; too few of the other nodes could be reached instead ({hosts})"
            except Exception as failure:
                found, reason = None, f"the rendezvous cannot go on: {failure}"
            self._news.put(lambda: self._resume_at(found, reason))

        self._search = threading.Thread(target=search, name="ronde-rendezvous-search", daemon=True)
        self._search.start()
        return []

    def _resume_at(self, found: FoundStore | None, reason: str) -> list[Effect]:
        """Go on at the store that was found, or give up."""
        if self._is_lost or self._is_done() or found is None:
            if found:
                found.store.close()
            self._is_lost = True
            return self._participant.give_up(reason)
        self._begin_session(found.store)
        self._has_moved = self._has_moved or found.is_elsewhere
        return self._participant.enter_store(time.monotonic_ns(), found.gone, elsewhere=found.is_elsewhere)

    def _probe_agents(self, asked: Probe) -> None:
        """Probe agents in a separate thread, because that takes a while."""

        def probe() -> None:
            event = Probed.of(asked, find_ended(asked.addresses))
            self._news.put(lambda: self._participant.step(time.monotonic_ns(), event))

        threading.Thread(target=probe, name="ronde-rendezvous-probe", daemon=True).start()

    def _is_done(self) -> bool:
        """Return whether `close` was called and this node has nothing left to send."""
        return self._is_closing and not self._is_ending_job()

    def _is_ending_job(self) -> bool:
        """Return whether this node is ending the job, with time left to write that, or to find the store for it."""
        may_say = not self._is_lost and (self._session is not None or self._search is not None)
        return may_say and self._participant.is_ending and time.monotonic_ns() < self._close_by_ns

    def _handle_next(self) -> bool:
        """Wait for one piece of news or the next time, and handle it; return whether to go on."""
        wait_ns = LONGEST_WAIT_NS
        if self._participant.has_joined:  # also without a store, because the lease may run out
            wait_ns = self._participant.wake_ns - time.monotonic_ns()
            if wait_ns <= 0:  # before news, which may never cease
                self._tick(time.monotonic_ns())
        if self._is_closing:
            wait_ns = min(wait_ns, self._close_by_ns - time.monotonic_ns())
        try:
            news = self._news.get(timeout=max(wait_ns, 0) / 1e9)
        except queue.Empty:
            return True
        if news is None:
            return False
        self._perform(news())
        if self._has_reported_silence:
            self._watch_store()
        if self._has_moved:
            self._access.redirect_nodes(self._participant.store_identity.is_redirecting)
        return True

    def _tick(self, now_ns: int) -> None:
        # Before the agent asks for a place in the next round: a node that has asked there does not count elsewhere.
        must_leave = self._participant.must_end_workers(now_ns)
        effects = self._participant.step(now_ns, Tick())
        self._watch_store(must_leave)
        self._perform(effects)

    def _watch_store(self, must_leave: bool = False) -> None:
        """Report a silent store, and leave it when its silence is so long that the others take this node for lost."""
        session, now_ns = self._session, time.monotonic_ns()
        if session is None or self._participant.is_over:
            return
        silent_ns, limit_s = self._participant.store_silence.silent_ns(now_ns), self._rules.silence_ns / 1e9
        is_silent = silent_ns >= max(self._rules.heartbeat_ns * 3 // 2, LEAST_SILENCE_NS)
        if is_silent != self._has_reported_silence:
            what = f"has not answered for {silent_ns / 1e9:.1f} s" if is_silent else "answers again"
            then = (
                f"; after {limit_s:g} s the workers here leave their world or are ended" if is_silent else ""
            )
            self._events.put(Notice(f"the store at {session.store.address} {what}{then}"))
            self._has_reported_silence = is_silent
        if self._rules.rehost and (must_leave or self._participant.store_silence.is_cut_off(now_ns)):
            self._perform(
                self._search_store(
                    session,
                    PeerLostError(f"the store at {session.store.address} has not answered for {limit_s:g} s"),
                )
            )

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, NotifyAgent):
                event = effect.event
                if isinstance(event, RendezvousBroken) and (refusal := self._access.last_refusal()):
                    event = RendezvousBroken(f"{event.reason}; the store here {refusal}")
                self._events.put(event)
            elif isinstance(effect, Probe):
                self._probe_agents(effect)
            elif self._session and not self._is_lost:
                self._session.perform(effect)


# An earlier job in the store


def succeed_ended_job(store: Store, terms: JobTerms, patience_ns: int, go_on: Callable[[], bool]) -> str:
    """Begin a new job in the store if its job has ended; return why that is impossible, or "".

    Raises the store's errors.
    """
    raw = store.watch({STATE: None}, 0).get(STATE)
    try:
        state = decode_state(raw) if raw else None
        if raw is None or state is None or state.phase in (JobPhase.FORMING, JobPhase.RUNNING):
            return ""
        hosts = {state.leader: "", **{node.id: node.host for node in _roster(store, state)}}
    except ProtocolError:
        return ""  # the state of another version, which the machine reports
    left = {alive_key(node): host for node, host in hosts.items() if node}
    deadline_ns = time.monotonic_ns() + patience_ns
    while left and go_on():
        left_ns = deadline_ns - time.monotonic_ns()
        known: dict[str, bytes | None] = {STATE: raw, **dict.fromkeys(left, ALIVE)}
        gone = store.watch(known, max(0, min(left_ns, CHECK_NS)))
        if STATE in gone:
            return ""  # another node was faster
        for key in gone:
            del left[key]
        if left and left_ns <= 0:
            return _too_late(state, sorted({host for host in left.values() if host}))
    if not left:
        job = f"{state.job}+{state.term + 1}"
        began = JobState(terms, NO_LEADER, term=state.term + 1, version=state.version + 1, job=job)
        if store.compare_set(STATE, raw, encode(began)) == encode(began) and state.roster:
            store.delete_prefix(state.roster.prefix)
    return ""


def _roster(store: Store, state: JobState) -> tuple[Node, ...]:
    if state.roster is None:
        return ()
    found = store.watch(dict.fromkeys(state.roster.keys), 0)
    parts = tuple(found.get(key) or b"" for key in state.roster.keys)
    return decode_roster(parts) if all(parts) else ()


def _too_late(state: JobState, hosts: list[str]) -> str:
    how = "has completed" if state.phase == JobPhase.COMPLETED else f"has ended ({state.reason})"
    where = f" on {', '.join(hosts)}" if hosts else ""
    return (
        f"the job that met here {how}, and nodes of it{where} are still there: wait until they have gone, "
        "or give this job another --rdzv-id"
    )


# Backends


def make_tcp(config: RendezvousConfig, key: JobKey) -> StoreRendezvous:
    """Return the rendezvous over a store at host:port, which the node with that address serves.

    With the option `is_host` the user decides whether this node serves the store; with `rehost=false` the loss of the
    store ends the job.
    """
    access = TcpStoreAccess(endpoint_of(config), key, config.truth("is_host"), config)
    rules = config.rules(rehost=may_rehost(config))
    return StoreRendezvous(rules, access, config.node_rank, config.start_timeout_ns, _runs_once(config))


def make_static(config: RendezvousConfig, key: JobKey) -> StoreRendezvous:
    """Return the rendezvous of nodes with given group ranks; the node of group rank 0 serves the store.

    Workers use the port of the endpoint (MASTER_PORT), so the nodes meet at another one.
    """
    if not 0 <= config.node_rank < config.max_nodes:
        raise UsageError(
            f"the rendezvous 'static' needs --node-rank from 0 to {config.max_nodes - 1}, not {config.node_rank}"
        )
    if config.min_nodes != config.max_nodes:
        raise UsageError(
            f"the rendezvous 'static' needs a fixed number of nodes, not {config.min_nodes} to {config.max_nodes}"
        )
    endpoint = endpoint_of(config)
    ours = replace(endpoint, port=_meeting_port(endpoint.port))
    try:
        access = TcpStoreAccess(ours, key, config.node_rank == 0, config)
    except UsageError as error:
        raise UsageError(
            f"{error} (the port at which nodes meet if their workers use port {endpoint.port})"
        ) from None
    rules = config.rules(places_are_given=True, rehost=may_rehost(config))
    return StoreRendezvous(rules, access, config.node_rank, config.start_timeout_ns, _runs_once(config))


def make_file(config: RendezvousConfig, _: JobKey) -> StoreRendezvous:
    """Return the rendezvous in a file on a file system that all nodes share."""
    if not config.endpoint:
        raise UsageError("the rendezvous 'file' needs the path of a file: --rdzv-endpoint PATH")
    access = FixedStoreAccess(lambda _: open_file_store(config))
    return StoreRendezvous(
        config.rules(), access, config.node_rank, config.start_timeout_ns, _runs_once(config)
    )


def make_etcd(config: RendezvousConfig, _: JobKey) -> StoreRendezvous:
    """Return the rendezvous in an etcd, whose members are at host:port[,host:port...]."""
    if not config.endpoint:
        raise UsageError(
            "the rendezvous 'etcd' needs the address of etcd: --rdzv-endpoint HOST:PORT[,HOST:PORT...]"
        )
    parse_endpoints(etcd_endpoint(config), "", "", "")  # raises now if the endpoint is invalid
    access = FixedStoreAccess(partial(open_etcd_store, config))
    return StoreRendezvous(
        config.rules(), access, config.node_rank, config.start_timeout_ns, _runs_once(config)
    )


def _runs_once(config: RendezvousConfig) -> bool:
    return config.truth("run_once") is True


def _meeting_port(port: int) -> int:
    """Return the port where the nodes meet, for the port of their workers.

    It is not the next one, because jobs on one machine often have neighbouring ports; and it is rather below the ports
    that systems give to outgoing connections.
    """
    return port - 10_000 if port >= 20_000 else port + 10_000
