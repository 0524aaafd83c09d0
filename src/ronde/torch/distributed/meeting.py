"""How the members of a process group find each other: through the store of torch.distributed.

Every process that reaches that store can read and write there, so it only carries what strangers may know: where a rank
listens, and a name of the job. The job key, by which the members recognise each other, comes from the same places as
for `ronde.init` (`net/job_keys`).

A store can outlive a group: after `destroy_process_group` the next group may find the keys of the last one. So each
rank counts, in the store, how often it has come, and all keys contain that number. Ranks that destroy and make a group
equally often have the same number, also if one of them is a new process.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch.distributed import Store

from ronde.errors import PeerLostError, ProtocolError, RemoteError, RondeError, TimeoutError
from ronde.job_key import JobKey
from ronde.net import addresses
from ronde.net.host import host_identity, host_name
from ronde.net.job_keys import find_job_key
from ronde.settings import Settings, environment

__all__ = ["Meeting", "Place"]

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05  # between two looks for the others
_SHOWN = 16  # missing ranks in an error


class Place(NamedTuple):
    """What the members agree on: the key of their job, a name for it, and this host's address for other hosts."""

    key: JobKey
    name: str
    address: str


class Meeting:
    """The members of one new group at the store.

    Every member makes one, with the same `size`, and calls the same methods in the same order. `check` raises an error
    if another member is known to be lost.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        deadline_ns: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._began_ns, self._deadline_ns = time.monotonic_ns(), deadline_ns
        self._check = check
        self._times = self._ask(lambda: store.add(f"ronde/times/{rank}", 1))
        self._exchanges = 0

    def exchange(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all members, by rank. Raises TimeoutError that names the missing ranks, RemoteError."""
        self._exchanges += 1
        keys = [self._key(f"{self._exchanges}/{rank}") for rank in range(self._size)]
        self._ask(lambda: self._store.set(keys[self._rank], mine))
        pause_s = _SHORTEST_PAUSE_S
        while not self._ask(lambda: self._store.check(keys)):
            self.check()
            if time.monotonic_ns() > self._deadline_ns:
                raise self._timeout(keys)
            time.sleep(pause_s)  # and not `Store.wait`, which warns of every limit that it exceeds
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return [bytes(self._ask(partial(self._store.get, key))) for key in keys]

    def agree_on_place(self, wanted: Settings) -> Place:
        """Return the place of the group's connections. Raises UsageError if this process has no job key."""
        mine = {"host": host_identity(wanted.host_id), "name": secrets.token_hex(8)}
        records = [_record(each, rank) for rank, each in enumerate(self.exchange(json.dumps(mine).encode()))]
        is_one_machine = len({record["host"] for record in records}) == 1
        name = f"torch.distributed {records[0]['name']}"
        key = find_job_key(
            name,
            environment(),
            key=wanted.job_key,
            descriptor=wanted.job_key_fd,
            file=wanted.job_key_file,
            is_insecure=wanted.insecure_job_key,
            is_one_machine=is_one_machine,
        )
        if wanted.interface:
            return Place(key, name, addresses.address_of_interface(wanted.interface))
        return Place(key, name, "127.0.0.1" if is_one_machine else _address_towards(self._store))

    def check(self) -> None:
        """Raise the failure of another member that has told it."""
        self._check()
        failed = self._key("failed")
        if self._ask(lambda: self._store.check([failed])):
            rank, _, text = bytes(self._store.get(failed)).decode(errors="replace").partition(" ")
            raise RemoteError(f"rank {rank} failed while the group was made: {text}", int(rank))

    def tell_failure(self, error: BaseException) -> None:
        """Tell the other members that this one has failed, so that they need not wait for it."""
        if not isinstance(error, (RemoteError, TimeoutError)):
            text = f"{self._rank} on {host_name()}: {type(error).__name__}: {error}"
            with suppress(Exception):
                self._store.set(self._key("failed"), text)

    def _key(self, name: str) -> str:
        return f"ronde/{self._times}/{name}"

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            raise PeerLostError(f"the store of torch.distributed is lost: {text}") from None

    def _timeout(self, keys: Sequence[str]) -> TimeoutError:
        missing = tuple(
            rank for rank, key in enumerate(keys) if not self._ask(partial(self._store.check, [key]))
        )
        waited_ns = time.monotonic_ns() - self._began_ns
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        return TimeoutError(
            f"rank {self._rank} waited {waited_ns / 1e9:.1f} s for the other {self._size - 1} ranks of a process "
            f"group; missing: {shown or 'none'}. Do all of them make the group?",
            "init_process_group",
            waited_ns,
            missing,
        )


def _record(received: bytes, rank: int) -> dict[str, str]:
    with suppress(ValueError):
        record = json.loads(received)
        if isinstance(record, dict) and all(isinstance(record.get(name), str) for name in ("host", "name")):
            return record
    raise ProtocolError(
        f"rank {rank} of the process group sent a malformed record: is its backend 'ronde', too?"
    )


def _address_towards(store: Store) -> str:
    """Return this host's address on the way to the host of the store, or else to anywhere."""
    below = store
    while hasattr(below, "underlying_store"):
        below = below.underlying_store
    host = getattr(below, "host", "")
    if host and not addresses.is_loopback(host):
        with suppress(RondeError):
            return addresses.address_towards(host)
    return addresses.address_towards()
