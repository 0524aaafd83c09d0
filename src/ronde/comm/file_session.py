"""Sessions of ranks that meet in a file, where only the ranks themselves know whether a job is over.

The file outlives the job, with everything that killed ranks have left there. So a job is a *session*: its keys have a
prefix that is new for every job, the key `session` has that prefix and the ranks, and each rank holds a key while it
lives. A rank that finds no living rank of the session begins another one and deletes the old. Compare-and-set decides,
so two ranks that arrive at once agree.
"""

from __future__ import annotations

import json
import os
import secrets

from ronde.errors import UsageError
from ronde.net.host import host_name
from ronde.stores.prefix import PrefixStore
from ronde.stores.store import Store

__all__ = ["join_session"]

SESSION = "session"


def join_session(store: Store, rank: int) -> Store:
    """Join the session of this rank's job; return its part of the store, which closes the store when it is closed.

    Raises UsageError if another living process has the same rank.
    """
    while True:
        seen = store.multi_get([SESSION], 0)[0] if store.check([SESSION]) else b""
        name, ranks = _decode(seen)
        alive = [each for each in ranks if store.check([_life(name, each)])]
        if rank in alive:
            holder = store.get(_life(name, rank), 0).decode()
            raise UsageError(
                f"two processes have rank {rank} of the job that meets at {store.address}: "
                f"the other one is {holder}; give every process another rank, or every job another file"
            )
        if not alive:
            old, name, ranks = name, secrets.token_hex(8), []
        store.hold(_life(name, rank), f"process {os.getpid()} on {host_name()}".encode())
        mine = json.dumps([name, sorted({*ranks, rank})]).encode()
        if store.compare_set(SESSION, seen, mine) == mine:
            if not alive and old:
                store.delete_prefix(f"{old}/")
            return PrefixStore(store, f"{name}/")
        store.delete_key(_life(name, rank))  # another rank was faster: read again


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
    return "", []  # no session of Ronde: to be replaced
