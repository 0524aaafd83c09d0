"""A barrier that tells which ranks have not come: rank 0 waits for a message of each other rank, then lets all pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch

from ronde.errors import PeerError, TimeoutError

__all__ = ["follow", "lead"]

Send = Callable[[torch.Tensor, int], Any]  # to a rank
Receive = Callable[[torch.Tensor, int], Any]  # from a rank

_PASS, _FAIL = 0, 1


def lead(send: Send, receive: Receive, hosts: Sequence[str], limit_ns: int, waits_for_all: bool) -> None:
    """Take part as rank 0. `hosts`: of all ranks. `waits_for_all`: to name all ranks that do not come, not one.

    Raises TimeoutError that names ranks which have not come within the limit, or are lost.
    """
    deadline_ns = time.monotonic_ns() + limit_ns
    ranks = range(1, len(hosts))
    arrivals = [receive(_message(), rank) for rank in ranks]
    missing: dict[int, PeerError] = {}
    for rank, arrival in zip(ranks, arrivals, strict=True):
        try:
            _wait(arrival, deadline_ns)
        except PeerError as error:
            missing[rank] = error
            if not waits_for_all:
                break
    for rank in ranks:
        with suppress(PeerError):
            send(_message(_FAIL if missing else _PASS), rank)
    if missing:
        _raise_missing(missing, hosts, limit_ns)


def follow(send: Send, receive: Receive, rank: int, host: str, limit_ns: int) -> None:
    """Take part as another rank. `host`: rank 0's. Raises TimeoutError if other ranks have not come, or rank 0 not."""
    reached = (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
        f"rank 0 on {host}"
    )
    answer = _message()
    try:
        send(_message(), 0)
        _wait(receive(answer, 0), time.monotonic_ns() + limit_ns)
    except PeerError as error:
        raise TimeoutError(f"{reached}: {error}", "monitored_barrier", limit_ns, (0,)) from error
    if answer.item() != _PASS:
        raise TimeoutError(
            f"{reached}: other ranks have not come in time; its error names them",
            "monitored_barrier",
            limit_ns,
        )


def _raise_missing(missing: dict[int, PeerError], hosts: Sequence[str], limit_ns: int) -> NoReturn:
    noun = "Rank" if len(missing) == 1 else "Ranks"
    where = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in missing)
    first = next(iter(missing.values()))
    cause = (
        f"Rank 0 timed out in monitoredBarrier after {limit_ns // 10**6} ms"
        if isinstance(first, TimeoutError)
        else str(first)
    )
    raise TimeoutError(
        f"{noun} {', '.join(map(str, missing))} failed to pass monitoredBarrier: {cause}, waiting for {where}",
        "monitored_barrier",
        limit_ns,
        tuple(missing),
    ) from first


def _message(content: int = _PASS) -> torch.Tensor:
    return torch.tensor([content], dtype=torch.uint8)


def _wait(work: Any, deadline_ns: int) -> None:
    left_us = max(1, (deadline_ns - time.monotonic_ns()) // 1000)  # 0 would be no limit
    work.wait(timedelta(microseconds=left_us))
