"""Begins a new job in a store where an earlier job has ended.

A file, an etcd or a `ronde store` outlives the job, and keeps its state under its --rdzv-id, which is often the
default. If no node of that job lives, the first node to arrive begins another job. If one lives, it may be about to
end, so the new node waits for a moment; then it is too late for that job, and reports so.

Compare-and-set on the state decides, so of several nodes that arrive at once one begins the job, and the others find
it. The job begins in a new term without a leader: the first node that joins claims to lead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ronde.errors import ProtocolError
from ronde.rendezvous.codec import decode_roster, decode_state, encode
from ronde.rendezvous.membership import Node
from ronde.rendezvous.state import ALIVE, STATE, JobPhase, JobState, JobTerms, alive_key
from ronde.stores.base import Store

__all__ = ["succeed_ended_job"]

NOBODY = ""
LOOK_NS = 10**9 // 2  # the interval between calls of `go_on`


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
        gone = store.watch(known, max(0, min(left_ns, LOOK_NS)))
        if STATE in gone:
            return ""  # another node was faster
        for key in gone:
            del left[key]
        if left and left_ns <= 0:
            return _too_late(state, sorted({host for host in left.values() if host}))
    if not left:
        job = f"{state.job}+{state.term + 1}"
        began = JobState(terms, NOBODY, term=state.term + 1, version=state.version + 1, job=job)
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
