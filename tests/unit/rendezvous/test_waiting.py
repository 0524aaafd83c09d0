"""Messages of a node that waits for a round."""

from __future__ import annotations

from ronde.rendezvous.membership import Budget
from ronde.rendezvous.rules import Rules
from ronde.rendezvous.state import JobState, JobTerms
from ronde.rendezvous.wait_messages import waits_in_vain


def test_a_node_that_waits_for_slots_does_not_count_nodes() -> None:
    rules = Rules(min_nodes=1, max_nodes=8, min_slots=4)
    state = JobState(JobTerms.of(rules, Budget()), "a", joined=1)
    said = waits_in_vain(rules, state, False)
    assert said.startswith("waited 600 s for 4 slots, and the node here has fewer; add others")


def test_a_node_that_waits_for_its_first_round_names_the_option_that_limits_it() -> None:
    rules = Rules(min_nodes=2, max_nodes=2, first_join_timeout_ns=5 * 10**9)
    state = JobState(JobTerms.of(rules, Budget()), "a", joined=1)
    said = waits_in_vain(rules, state, False, is_new=True)
    assert said.startswith("waited 5 s for all nodes")
    assert said.endswith("or wait longer (--start-timeout)")
    later = waits_in_vain(rules, state, False)
    assert later.startswith("waited 600 s for all nodes")
    assert later.endswith("or wait longer (--rdzv-conf join_timeout=SECONDS)")
