"""Ranks that meet in a file, where nobody but the ranks themselves knows whether a job is over.

The file outlives the job, and with it whatever a rank that was killed has left there. So a job is a *session*: its keys
begin with a name that is new for every job, the key `session` has that name and the ranks, and each rank holds a key
for as long as it lives. Whoever comes and finds nobody of the session alive begins another one and removes the old.
All this is decided by compare-and-set, so two who come at once agree.
"""

from __future__ import annotations

import json
import os
import secrets

from ronde.errors import UsageError
from ronde.net.host import host_name
from ronde.net.stores.base import Store
from ronde.net.stores.prefix import PrefixStore

__all__ = ["join_session"]

SESSION = "session"


def join_session(store: Store, rank: int) -> Store:
    """Return the part of the store that belongs to the job of this rank; closing it closes the store.

    Raises UsageError if another process lives that is the same rank.
    """
    while True:
        seen = store.multi_get([SESSION], 0)[0] if store.check([SESSION]) else b""
        name, ranks = _decode(seen)
        alive = [each for each in ranks if store.check([_life(name, each)])]
        if rank in alive:
            holder = store.get(_life(name, rank), 0).decode()
            raise UsageError(
                f"two processes say that they are rank {rank} of the job that meets at {store.address}: "
                f"the other one is {holder}; give every process a rank of its own, or every job a file"
            )
        if not alive:
            old, name, ranks = name, secrets.token_hex(8), []
        store.hold(_life(name, rank), f"process {os.getpid()} on {host_name()}".encode())
        mine = json.dumps([name, sorted({*ranks, rank})]).encode()
        if store.compare_set(SESSION, seen, mine) == mine:
            if not alive and old:
                store.delete_prefix(f"{old}/")
            return PrefixStore(store, f"{name}/")
        store.delete_key(_life(name, rank))  # somebody was faster: look again


def _life(name: str, rank: int) -> str:
    return f"{name}/alive/{rank}"


def _decode(session: bytes) -> tuple[str, list[int]]:
    if not session:
        return "", []
    try:
        name, ranks = json.loads(session)
        if isinstance(name, str) and all(isinstance(rank, int) for rank in ranks):
            return name, ranks
    except (ValueError, TypeError):
        pass
    return "", []  # not ours: it is replaced
