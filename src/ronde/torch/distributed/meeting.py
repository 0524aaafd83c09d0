"""How the members of a process group find each other.

Ranks that are not connected meet in a store: that of torch.distributed, or one of Ronde's. Every process that reaches
torch's can read and write there, so it only carries facts that are no secrets: the address of a rank, and the name of
the job. The job key, by which ranks recognise each other, comes from the same places as for `ronde.init`
(`net/job_keys`).

Ranks of one world meet by messages of its mailbox, so that they need no store any more.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from torch.distributed import Store as TorchsOwnStore

from ronde.comm.byte_exchange import Exchange, framed, unframed
from ronde.comm.communicator_factory import CommunicatorFactory
from ronde.comm.world_attempt import EpochOverError, WorldAttempt
from ronde.comm.world_epochs import Epoch
from ronde.errors import PeerLostError, ProtocolError, RondeError, TimeoutError
from ronde.net import addresses
from ronde.net.host import host_identity, host_name
from ronde.net.job_keys import find_job_key
from ronde.settings import Settings, environment
from ronde.stores.store import Store
from ronde.stores.torch import TorchStore
from ronde.torch.distributed.work import InFlightMemory

if TYPE_CHECKING:
    from ronde._native import Mailbox, Message

__all__ = ["MailboxMeeting", "address_towards", "factory_of", "meet", "store_of"]

_log = logging.getLogger(__name__)

Made = TypeVar("Made")

_GOES_ON, _HAS_FAILED, _TIMED_OUT = b"+", b"!", b"?"  # the first byte of a message about a new group
_GRACE_NS = 2 * 10**9
_NOTICE_NS = 10**10  # when a rank says for which one it waits
_MOST_BYTES = 1 << 24  # of such a message: bounds the memory that a peer can make this rank allocate

# By store and name of a group, the last epoch to which this process has come, and whether a group came of it: one of
# the same name may be made again at the same store.
_last_epochs: dict[tuple[str, str], tuple[Epoch, bool]] = {}


def meet(
    store: Store,
    rank: int,
    size: int,
    name: str | None,
    deadline_ns: int,
    make: Callable[[WorldAttempt], Made],
    call: str,
) -> Made:
    """Return the result of `make`, which the members make together; all of them call it.

    `name`: of the group; None: this process meets at this store once. `call`: the user's, for messages. Raises
    TimeoutError that names the missing ranks, PeerLostError if another member has raised.
    """
    began_ns = time.monotonic_ns()
    last: Epoch | None = None
    has_formed = False
    place = None if name is None else (str(getattr(store, "address", "")), name)
    if place is not None:
        last, has_formed = _last_epochs.get(place, (None, False))
    while True:
        attempt = WorldAttempt(
            store, rank, size, began_ns, deadline_ns, last, has_formed=has_formed, call=call
        )
        last, has_formed = attempt.epoch, False
        try:
            made = make(attempt)
        except BaseException as error:
            if place is not None:
                _last_epochs[place] = last, False
            cause = attempt.end(error)
            if isinstance(cause, EpochOverError):
                continue
            if cause is error:
                raise
            raise cause from None
        if place is not None:
            _last_epochs[place] = last, True
        if rank == 0:
            with suppress(RondeError):  # all members have what they need of the store
                attempt.delete_earlier_epochs()
        return made


class MailboxMeeting:
    """Members of a new group, which are connected as ranks of a world, as an exchange (`comm/byte_exchange`).

    The first member collects the bytes of all and tells them to all. `ranks`: of the members in the world, `rank` is
    this one's. `context`: of these messages alone. A member that fails tells the others.
    """

    def __init__(
        self, mailbox: Mailbox, ranks: Sequence[int], rank: int, context: int, deadline_ns: int
    ) -> None:
        self._mailbox, self._ranks, self._rank = mailbox, ranks, rank
        self._context, self._deadline_ns = context, deadline_ns
        self._began_ns = time.monotonic_ns()
        if rank != ranks[0]:
            self._deadline_ns += _GRACE_NS  # for the first member's list of those that did not come in time

    def exchange(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all members, by their place in `ranks`.

        Raises TimeoutError that names the missing ranks, PeerLostError if another member has raised or died.
        """
        first, *others = self._ranks
        if self._rank != first:
            self._send(first, _GOES_ON + mine)
            return unframed(np.frombuffer(self._receive(first), np.uint8))
        received = [mine, *(self._receive(rank) for rank in others)]
        everything = b"".join(framed(each).tobytes() for each in received)
        for rank in others:
            self._send(rank, _GOES_ON + everything)
        return received

    def tell_failure(self, error: BaseException) -> None:
        """Tell the first member, or all, that this one has failed. It must not go on."""
        first, *others = self._ranks
        ranks = others if self._rank == first else [first]
        if isinstance(error, TimeoutError):
            message = _TIMED_OUT + str(error).encode()
        else:
            name = type(error).__name__
            text = f"rank {self._rank} on {host_name()} failed in new_group(): {name}: {error}"
            message = _HAS_FAILED + text.encode()
        for rank in ranks:
            with suppress(RondeError):
                self._send(rank, message)
        self._mailbox.cancel(self._context, "an earlier attempt to make a group of these ranks has failed")

    def _send(self, rank: int, message: bytes) -> None:
        size = np.array([len(message)], np.int64)
        body = np.frombuffer(message, np.uint8)
        for part in (size, body):
            sent = self._mailbox.send(rank, self._context, 0, part.ctypes.data, part.nbytes)
            self._wait(sent, part, rank)

    def _receive(self, rank: int) -> bytes:
        size = np.empty(1, np.int64)
        self._receive_into(size, rank)
        if not 0 < size[0] <= _MOST_BYTES:
            raise ProtocolError(f"rank {rank} sent a malformed message about a new group")
        body = np.empty(size[0], np.uint8)
        self._receive_into(body, rank)
        message = body.tobytes()
        kind, rest = message[:1], message[1:]
        if kind == _TIMED_OUT:
            raise TimeoutError(rest.decode(errors="replace"), "new_group")
        if kind == _HAS_FAILED:
            raise PeerLostError(rest.decode(errors="replace"), rank)
        return rest

    def _receive_into(self, memory: np.ndarray, rank: int) -> None:
        received = self._mailbox.receive(rank, self._context, 0, memory.ctypes.data, memory.nbytes)
        self._wait(received, memory, rank)

    def _wait(self, message: Message, memory: np.ndarray, rank: int) -> None:
        try:
            if message.wait(min(_NOTICE_NS, self._left_ns())):
                return
            _log.warning("%s", self._missing(rank))
            if not message.wait(self._left_ns()):
                waited_ns = time.monotonic_ns() - self._began_ns
                raise TimeoutError(f"timed out: {self._missing(rank)}", "new_group", waited_ns, (rank,))
        except BaseException:
            InFlightMemory.keep_leftover(message, memory)
            raise

    def _left_ns(self) -> int:
        return max(1, self._deadline_ns - time.monotonic_ns())

    def _missing(self, rank: int) -> str:
        waited_s = (time.monotonic_ns() - self._began_ns) / 1e9
        return (
            f"rank {self._rank} has waited {waited_s:.1f} s for rank {rank} to make a group of the ranks "
            f"{', '.join(map(str, self._ranks))}; every member must call new_group()"
        )


def store_of(store: TorchsOwnStore) -> tuple[Store, str]:
    """Return the store of a process group, and the host that serves it, "" if none is known."""
    below = store
    while hasattr(below, "underlying_store"):
        below = below.underlying_store
    host = str(getattr(below, "host", ""))
    where = f"{host}:{below.port}" if host else type(below).__name__
    return TorchStore(store, f"torch's store ({where})"), host


def factory_of(exchange: Exchange, wanted: Settings, store_host: str) -> CommunicatorFactory:
    """Return the factory of the connections, alike on all members. Raises UsageError if this process has no job key."""
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
