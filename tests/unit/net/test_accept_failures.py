"""A listener whose `accept` fails."""

from __future__ import annotations

from ronde.net.accept_failures import FIRST_PAUSE_NS, GIVE_UP_NS, LONGEST_PAUSE_NS, AcceptFailures, Verdict

HOUR_NS = 3600 * 10**9


def tries(failures: AcceptFailures, is_shortage: bool, until_ns: int) -> list[Verdict]:
    verdicts: list[Verdict] = []
    now_ns = 1
    while now_ns < until_ns and not (verdicts and verdicts[-1].is_final):
        verdicts.append(failures.note_failure(is_shortage, now_ns))
        now_ns += verdicts[-1].pause_ns
    return verdicts


def test_a_shortage_is_waited_for_with_growing_pauses_and_reported_once() -> None:
    verdicts = tries(AcceptFailures(), True, HOUR_NS)
    assert not any(verdict.is_final for verdict in verdicts)
    assert [verdict.is_new for verdict in verdicts] == [True] + [False] * (len(verdicts) - 1)
    assert verdicts[0].pause_ns == FIRST_PAUSE_NS
    assert max(verdict.pause_ns for verdict in verdicts) == LONGEST_PAUSE_NS


def test_another_failure_that_lasts_is_final() -> None:
    verdicts = tries(AcceptFailures(), False, HOUR_NS)
    assert verdicts[-1].is_final
    assert GIVE_UP_NS <= sum(verdict.pause_ns for verdict in verdicts[:-1]) <= GIVE_UP_NS + LONGEST_PAUSE_NS


def test_a_success_begins_anew() -> None:
    failures = AcceptFailures()
    failures.note_failure(False, 1)
    failures.note_success()
    assert failures.note_failure(False, HOUR_NS) == Verdict(FIRST_PAUSE_NS, True, False)
