"""Messages of a node that waits for a round."""

from __future__ import annotations

from ronde.core.rendezvous.membership import Budget
from ronde.core.rendezvous.rules import Rules
from ronde.core.rendezvous.state import JobState, JobTerms
from ronde.core.rendezvous.wait_messages import waits_in_vain


def test_a_node_that_waits_for_slots_does_not_count_nodes() -> None:
    rules = Rules(min_nodes=1, max_nodes=8, min_slots=4)
    state = JobState(JobTerms.of(rules, Budget()), "a", joined=1)
    said = waits_in_vain(rules, state, False)
    assert said.startswith("waited 600 s for 4 slots, and the node here has fewer; add others")
