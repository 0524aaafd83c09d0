"""What the launcher says at the end of a job that did not succeed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ronde.core.worker_group import Finish, Worker, name_ranks, signal_name

__all__ = ["report"]


def report(finish: Finish, workers: Mapping[int, Worker], last_words: Sequence[bytes]) -> list[bytes]:
    """Return the lines: the reason, what became of the others, and last what the failed worker had said last."""
    if finish.exit_code == 0:
        return []
    lines = [f"ronde: {finish.reason}".encode()]
    others = [worker for rank, worker in sorted(workers.items()) if rank != finish.failed_rank]
    if fates := _fates(others):
        lines.append(f"ronde: {fates}".encode())
    if last_words:
        lines.append(f"ronde: the last output of rank {finish.failed_rank} was:".encode())
        lines += [b"    " + line for line in last_words]
    return lines


def _fates(workers: Iterable[Worker]) -> str:
    """Return how these workers ended; ranks with the same fate together."""
    ranks_by_fate: dict[str, list[int]] = {}
    for worker in workers:
        ranks_by_fate.setdefault(_fate(worker), []).append(worker.rank)
    phrases = []
    for fate, ranks in ranks_by_fate.items():
        were = "was" if len(ranks) == 1 else "were"
        phrases.append(f"{name_ranks(ranks)} {fate.format(were=were)}")
    return "; ".join(phrases)


def _fate(worker: Worker) -> str:
    if worker.returncode is None:
        return "could not be ended"
    if worker.signum:
        return "{were} ended by the launcher"
    if worker.returncode == 0:
        return "succeeded"
    if worker.returncode < 0:
        return f"{{were}} killed by {signal_name(-worker.returncode)} after that"
    return f"ended with exit code {worker.returncode} {'because of' if worker.blames_peer else 'after'} that"
