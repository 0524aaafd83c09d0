"""Formats the launcher's report at the end of a failed job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ronde.launch.agent.decisions import StartWorkers
from ronde.launch.agent.worker import Worker, name_ranks, signal_name
from ronde.launch.agent.worker_group import GroupEnd
from ronde.rendezvous.membership import Failure

__all__ = ["describe_recovery", "report", "report_elsewhere", "tracebacks"]

MOST_TRACEBACKS = 4


def report(
    end: GroupEnd, workers: Mapping[int, Worker], failure: Failure | None, remark: str = ""
) -> list[bytes]:
    """Return the lines: the reason, how the other workers ended, and the last output of the failed worker."""
    if end.exit_code == 0:
        return []
    lines = [f"ronde: {end.reason}{remark}".encode(errors="backslashreplace")]  # it may quote an exception
    others = [worker for rank, worker in sorted(workers.items()) if rank != end.failed_rank]
    if endings := _endings(others):
        lines.append(f"ronde: {endings}".encode(errors="backslashreplace"))
    return lines + (_words(failure) if failure else [])


def describe_recovery(start: StartWorkers, kept: int, promoted: int, started: int, lacking: int) -> str:
    """Return how a round begins for workers that continue.

    `kept`: how many of this node's workers these are. `promoted`: how many spares take places beside them, `started`:
    how many new processes do; `lacking`: how many replacements come later.
    """
    workers = f"{kept} worker{' goes' if kept == 1 else 's go'} on in place (round {start.round.number})"
    others = [
        f"{promoted} from the reserve take{'s' if promoted == 1 else ''} part" if promoted else "",
        f"{started} start{'s' if started == 1 else ''} anew" if started else "",
        f"{lacking} replacement{' starts' if lacking == 1 else 's start'}" if lacking > 0 else "",
    ]
    return "; ".join(filter(None, [start.cause, ", ".join(filter(None, [workers, *others]))]))


def report_elsewhere(reason: str, failure: Failure | None, remark: str = "") -> list[bytes]:
    """Return the lines of a job that another node's failure ended."""
    if failure is None:
        return [f"ronde: {reason}{remark}".encode(errors="backslashreplace")]
    return [
        f"ronde: {failure.message} on {failure.host}{remark}".encode(errors="backslashreplace"),
        *_words(failure),
    ]


def tracebacks(left: Mapping[int, str], first: Failure | None = None) -> list[bytes]:
    """Return the lines with the tracebacks that workers have left to the report, by rank.

    Those from the same lines of the program as an earlier one are left out, because they differ in the message at most,
    which their workers have shown. `first`: the failure whose traceback the report has already.
    """
    places = [_place(first.details)] if first else []
    lines, more = [], 0
    for rank, text in left.items():
        if (place := _place(text)) in places or (first and rank == first.rank):
            continue
        places.append(place)
        if len(places) > MOST_TRACEBACKS:
            more += 1
            continue
        lines.append(f"ronde: the traceback of rank {rank} was:".encode())
        lines += [b"    " + line for line in text.encode(errors="backslashreplace").splitlines()]
    if more:
        lines.append(
            f"ronde: {more} more ranks raised elsewhere: --log-level debug shows each at once".encode()
        )
    return lines


def _place(text: str) -> list[str]:
    """Return the lines of a traceback that say where it was."""
    return [line for line in text.splitlines() if line.lstrip().startswith('File "')]


def _words(failure: Failure) -> list[bytes]:
    if not failure.details:
        return []
    what = "traceback" if failure.details.startswith("Traceback (") else "last output"
    lines = _without_other_threads(failure.details.encode(errors="surrogateescape").split(b"\n"))
    return [f"ronde: the {what} of rank {failure.rank} was:".encode(), *(b"    " + line for line in lines)]


def _without_other_threads(lines: list[bytes]) -> list[bytes]:
    """Leave out the stacks that faulthandler prints of threads that did not cause the fatal signal."""
    if not any(line.startswith(b"Current thread 0x") for line in lines):
        return lines
    kept, is_other = [], False
    for line in lines:
        if line.startswith((b"Thread 0x", b"Extension modules: ")):
            is_other = True
        elif not line.startswith(b" "):
            is_other = is_other and not line
        if not is_other:
            kept.append(line)
    return kept


def _endings(workers: Iterable[Worker]) -> str:
    """Return how these workers ended, one text for all ranks that ended the same way."""
    ranks_by_ending: dict[str, list[int]] = {}
    for worker in workers:
        ranks_by_ending.setdefault(_ending(worker), []).append(worker.rank)
    phrases = []
    for ending, ranks in ranks_by_ending.items():
        were = "was" if len(ranks) == 1 else "were"
        phrases.append(f"{name_ranks(ranks)} {ending.format(were=were)}")
    return "; ".join(phrases)


def _ending(worker: Worker) -> str:
    if worker.returncode is None:
        return "could not be ended"
    if worker.signum:
        return "{were} ended by the launcher"
    if worker.returncode == 0:
        return "succeeded"
    if worker.returncode < 0:
        return f"{{were}} killed by {signal_name(-worker.returncode)} after that"
    return f"ended with exit code {worker.returncode} {'because of' if worker.blames_peer else 'after'} that"
