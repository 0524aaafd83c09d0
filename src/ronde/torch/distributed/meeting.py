"""How the members of a process group find each other.

They meet in a store: that of torch.distributed, or one of Ronde's. Every process that reaches torch's can read and
write there, so it only carries what strangers may know: where a rank listens, and the name of the job. The job key, by
which members recognise each other, comes from the same places as for `ronde.init` (`net/job_keys`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from torch.distributed import Store as TorchsOwnStore

from ronde.comm.byte_exchange import Exchange
from ronde.comm.communicator_factory import CommunicatorFactory
from ronde.comm.world_attempt import EpochOverError, WorldAttempt
from ronde.comm.world_epochs import Epoch
from ronde.errors import ProtocolError, RondeError
from ronde.net import addresses
from ronde.net.host import host_identity
from ronde.net.job_keys import find_job_key
from ronde.settings import Settings, environment
from ronde.stores.store import Store
from ronde.stores.torch import TorchStore

__all__ = ["meet", "store_of", "factory_of"]

Made = TypeVar("Made")

# By the name of a group, the last epoch to which this process has come, and whether a group came of it: a group of the
# same name may be made again at the same store.
_last_epochs: dict[str, tuple[Epoch, bool]] = {}


def meet(
    store: Store,
    rank: int,
    size: int,
    name: str | None,
    deadline_ns: int,
    make: Callable[[WorldAttempt], Made],
    call: str = "init_process_group() or new_group()",
) -> Made:
    """Return what `make` makes together with the other members, which all call it.

    `name`: of the group; None: this process meets at this store once. `call`: the user's, for messages. Raises
    TimeoutError that names the missing ranks, PeerLostError if another member has raised.
    """
    began_ns = time.monotonic_ns()
    last: Epoch | None = None
    has_formed = False
    if name is not None:
        last, has_formed = _last_epochs.get(name, (None, False))
    while True:
        attempt = WorldAttempt(
            store, rank, size, began_ns, deadline_ns, last, has_formed=has_formed, call=call
        )
        last, has_formed = attempt.epoch, False
        try:
            made = make(attempt)
        except BaseException as error:
            if name is not None:
                _last_epochs[name] = last, False
            cause = attempt.end(error)
            if isinstance(cause, EpochOverError):
                continue
            if cause is error:
                raise
            raise cause from None
        if name is not None:
            _last_epochs[name] = last, True
        if rank == 0:
            with suppress(RondeError):  # all members have what they need of the store
                attempt.delete_earlier_epochs()
        return made


def store_of(store: TorchsOwnStore) -> tuple[Store, str]:
    """Return the store of a process group, and the host that serves it, "" if none is known."""
    below = store
    while hasattr(below, "underlying_store"):
        below = below.underlying_store
    host = str(getattr(below, "host", ""))
    where = f"{host}:{below.port}" if host else type(below).__name__
    return TorchStore(store, f"torch's store ({where})"), host


def factory_of(exchange: Exchange, wanted: Settings, store_host: str) -> CommunicatorFactory:
    """Return what makes the connections, alike on all members. Raises UsageError if this process has no job key."""
    mine = {"host": host_identity(wanted.host_id), "name": secrets.token_hex(8)}
    records = [_record(each, rank) for rank, each in enumerate(exchange(json.dumps(mine).encode()))]
    is_one_machine = len({record["host"] for record in records}) == 1
    key = find_job_key(
        f"torch.distributed {records[0]['name']}",
        environment(),
        key=wanted.job_key,
        descriptor=wanted.job_key_fd,
        file=wanted.job_key_file,
        is_insecure=wanted.insecure_job_key,
        is_one_machine=is_one_machine,
    )
    if wanted.interface:
        return CommunicatorFactory(wanted, key, addresses.address_of_interface(wanted.interface))
    return CommunicatorFactory(wanted, key, "127.0.0.1" if is_one_machine else address_towards(store_host))


def address_towards(host: str) -> str:
    """Return this host's address on the way to another host, or to any if that is not known."""
    if host and not addresses.is_loopback(host):
        with suppress(RondeError):
            return addresses.address_towards(host)
    return addresses.address_towards()


def _record(received: bytes, rank: int) -> dict[str, str]:
    with suppress(ValueError):
        record = json.loads(received)
        if isinstance(record, dict) and all(isinstance(record.get(name), str) for name in ("host", "name")):
            return record
    raise ProtocolError(
        f"rank {rank} of the process group sent a malformed record: is its backend 'ronde', too?"
    )
