"""Messages of a node that waits for a round: which nodes are missing, and why no round has begun. Pure."""

from __future__ import annotations

from ronde.rendezvous.rules import Rules
from ronde.rendezvous.state import JobPhase, JobState

__all__ = ["waits_for", "waits_in_vain"]


def waits_for(rules: Rules, state: JobState) -> str:
    """Return a message about the nodes that this node waits for, or "" if it needs no particular ones."""
    if 0 < state.joined < rules.min_nodes:
        return f"{_of_nodes(state.joined, rules.min_nodes)}; waiting for the others"
    return f"{_missing(state.missing)}; waiting for that" if state.missing else ""


def waits_in_vain(rules: Rules, state: JobState | None, has_moved: bool, is_new: bool = False) -> str:
    """Return why no round has begun.

    `has_moved`: this node has left the store, and the others perhaps have not. `is_new`: it has been in no round.
    """
    waited = f"waited {rules.patience_ns(is_new) / 1e9:g} s"
    if state is None:
        return f"{waited} for any sign of the job"
    if state.missing or has_moved:
        return f"waited in vain: {_missing(state.missing)}"
    if state.phase == JobPhase.RUNNING:
        return f"{waited} for a place in the job, which is full with {rules.max_nodes} nodes"
    joined = max(state.joined, 1)
    is_start = is_new and rules.first_join_timeout_ns
    longer = f"or wait longer ({'--start-timeout' if is_start else '--rdzv-conf join_timeout=SECONDS'})"
    if rules.min_slots and joined >= rules.min_nodes:
        have = "the node here has" if joined == 1 else f"the {joined} nodes here have"
        return f"{waited} for {rules.min_slots} slots, and {have} fewer; add others, {longer}"
    return f"{waited} for all nodes: {_of_nodes(joined, rules.min_nodes)}; start the others, {longer}"


def _of_nodes(joined: int, needed: int) -> str:
    return f"{joined} of {needed} nodes {'is' if joined == 1 else 'are'} here"


def _missing(count: int) -> str:
    nodes = "one more node" if count == 1 else f"{count or 'some'} more nodes"
    return f"{nodes} of the last round must be here, or others that cannot be reached might go on as well"
