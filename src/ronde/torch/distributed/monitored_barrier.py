"""A barrier that names the ranks that did not come.

Every rank reports to rank 0 by a message. Rank 0 waits for the reports until the deadline, then answers every rank with
one byte by rank: 1 for those missing. So all ranks raise the same error, also those that come later. The barriers of a
group are counted, and each has its own context of messages: a report that comes too late matches no later one.

The errors have the words of Gloo's, which programs look for, such as "Rank 1 failed to pass monitoredBarrier".
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy

from ronde.errors import PeerLostError, TimeoutError
from ronde.torch.distributed.work import InFlightMemory

if TYPE_CHECKING:
    from ronde import _native

__all__ = ["monitored_barrier"]

_REPORT, _ANSWER = 0, 1  # tags
_ANSWER_MARGIN_NS = 5 * 10**9  # rank 0 may have begun to wait later than a rank that waits for its answer
_FOR_THE_NEXT_NS = 10**6  # after the deadline, for a report that has just arrived


def monitored_barrier(
    mailbox: _native.Mailbox,
    ranks: Sequence[int],
    rank: int,
    name: str,
    limit_ns: int,
    wait_all_ranks: bool,
) -> None:
    """Wait for all ranks of a group. Rank 0 raises TimeoutError that names the missing ranks, and so do the others.

    `ranks`: by rank of the group, the rank in the mailbox. `name`: the same on all ranks, of this barrier alone.
    `wait_all_ranks`: whether the error names all missing ranks, or the first that rank 0 has found.
    """
    context = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    answer = numpy.zeros(len(ranks), numpy.uint8)
    reached = f"Rank {rank} successfully reached monitoredBarrier"
    refused = f"{reached}, but received errors while waiting for send/recv from rank 0"
    began_ns = time.monotonic_ns()
    try:
        if rank == 0:
            _collect(mailbox, ranks, context, answer, began_ns + limit_ns, wait_all_ranks)
        elif not _report(mailbox, ranks[0], context, answer, limit_ns):
            raise TimeoutError(
                f"{refused}: it has not answered after {limit_ns / 1e9:g} s: it did not come to the barrier, or left "
                f"it earlier without this rank",
                "monitored_barrier",
                time.monotonic_ns() - began_ns,
                (0,),
            )
    finally:
        mailbox.cancel(context, "the barrier has ended")
    missing = tuple(map(int, numpy.flatnonzero(answer)))
    if missing:
        shown = ", ".join(map(str, missing))
        some = f"ank{'s' if len(missing) > 1 else ''} {shown}"
        failed = f"R{some} failed to pass monitoredBarrier: Rank 0 timed out in monitoredBarrier"
        raise TimeoutError(
            f"{refused if rank else failed}: r{some} did not come within {limit_ns / 1e9:g} s",
            "monitored_barrier",
            time.monotonic_ns() - began_ns,
            missing,
        )


def _collect(
    mailbox: _native.Mailbox,
    ranks: Sequence[int],
    context: int,
    answer: numpy.typing.NDArray[numpy.uint8],
    deadline_ns: int,
    wait_all_ranks: bool,
) -> None:
    """Wait for the reports, note in `answer` which are missing, and tell all ranks."""
    reports = [mailbox.receive(peer, context, _REPORT, 0, 0) for peer in ranks[1:]]
    for rank, report in enumerate(reports, 1):
        left_ns = max(deadline_ns - time.monotonic_ns(), _FOR_THE_NEXT_NS)
        if not _has_come(report, left_ns):
            answer[rank] = 1
            if not wait_all_ranks:
                break
    for peer in ranks[1:]:
        message = mailbox.send(peer, context, _ANSWER, answer.ctypes.data, answer.nbytes)
        InFlightMemory.keep_leftover(message, answer)


def _has_come(report: _native.Message, limit_ns: int) -> bool:
    """Return whether a rank has reported within the limit; one that has left does not."""
    try:
        return report.wait(limit_ns)
    except PeerLostError:
        return False


def _report(
    mailbox: _native.Mailbox,
    first: int,
    context: int,
    answer: numpy.typing.NDArray[numpy.uint8],
    limit_ns: int,
) -> bool:
    """Report to rank 0, and return whether it has answered."""
    received = mailbox.receive(first, context, _ANSWER, answer.ctypes.data, answer.nbytes)
    InFlightMemory.keep_leftover(received, answer)  # if rank 0 does not come
    mailbox.send(first, context, _REPORT, 0, 0).wait(-1)
    return received.wait(limit_ns + _ANSWER_MARGIN_NS)
