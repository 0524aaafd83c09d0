"""Decides what a listener does while `accept` fails: growing pauses, one report, and an end. Pure.

A shortage (descriptors, memory) may pass, so the listener never gives up for that. Any other failure that lasts for
GIVE_UP_NS is final, such as a system call that a sandbox forbids: peers should be refused at once rather than wait.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["AcceptFailures", "Verdict"]

FIRST_PAUSE_NS, LONGEST_PAUSE_NS = 10 * 10**6, 10**9
GIVE_UP_NS = 10 * 10**9


class Verdict(NamedTuple):
    """What to do now: report the failure if `is_new`, stop listening if `is_final`, else retry after `pause_ns`."""

    pause_ns: int
    is_new: bool
    is_final: bool


class AcceptFailures:
    """The failures of one listener since its last success."""

    def __init__(self) -> None:
        self._since_ns: int | None = None
        self._pause_ns = FIRST_PAUSE_NS

    def note_failure(self, is_shortage: bool, now_ns: int) -> Verdict:
        """Note a failure of `accept` that concerns the listener, and return what to do."""
        is_new = self._since_ns is None
        if self._since_ns is None:
            self._since_ns = now_ns
        is_final = not is_shortage and now_ns - self._since_ns >= GIVE_UP_NS
        verdict = Verdict(self._pause_ns, is_new, is_final)
        self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS)
        return verdict

    def note_success(self) -> None:
        """Note that `accept` has worked."""
        self._since_ns = None
        self._pause_ns = FIRST_PAUSE_NS
