"""Connects a rank to its job's store, and serves the store if that is this rank's part.

`comm/world_epochs` decides what the ranks do there.

The ranks can also meet in a file, which needs no server. Only the ranks themselves then know whether a job is over, and
the file outlives the job, with everything that killed ranks have left there. So a job is a *session*: its keys have a
prefix that is new for every job, the key `session` has that prefix and the ranks, and each rank holds a key while it
lives. A rank that finds no living rank of the session begins another one and deletes the old. Compare-and-set decides,
so two ranks that arrive at once agree.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ronde.comm.identity import MeetingPoint, Surroundings
from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.net import addresses
from ronde.net.authentication import SECRET
from ronde.net.host import host_name
from ronde.net.job_keys import INSECURE, find_job_key
from ronde.settings import Settings, environment
from ronde.stores.file import FileStore
from ronde.stores.prefix import PrefixStore
from ronde.stores.server import StoreServer
from ronde.stores.store import Store
from ronde.stores.tcp import StoreClient

__all__ = ["Meeting", "meet", "surroundings"]

_log = logging.getLogger(__name__)

FILE = "file:"
HYDRA_PROXY = "hydra_pmi_proxy"
SESSION = "session"


@dataclass
class Meeting:
    """The job's store and its key; `address`: on which this host offers data connections, once `find_address` has run.

    Keep it open until all ranks have initialized: they need the server.
    """

    store: Store
    key: JobKey
    target: addresses.Address  # of the store
    server: StoreServer | None = None
    address: str = ""

    def find_address(self, settings: Settings) -> None:
        """Find out the numeric address. Raises UsageError if there is no such interface."""
        self.address = self.address or _listening_address(settings, self.target)

    def last_refusal(self) -> str:
        """Return a description of the last connection that the store served here has refused, or ""."""
        return self.server.last_refusal if self.server else ""

    def close(self) -> None:
        """Close the connection to the store, and the store if it is served here. A second call does nothing."""
        self.store.close()
        if self.server:
            self.server.close()


def meet(
    point: MeetingPoint, rank: int, settings: Settings, check: Callable[[], None] | None = None
) -> Meeting:
    """Return the meeting at `point`, within `settings.start_timeout_ns`.

    `check`: called regularly while the store does not answer; an exception that it raises ends the wait.

    Raises UsageError if there is no job key, the address is taken or not this machine's, or the file cannot be written;
    TimeoutError if no store answers; AuthenticationError if it has another job key.
    """
    if point.address.startswith(FILE):
        return _meet_in_file(point, rank, settings)
    target = addresses.parse_address(point.address)
    is_one_machine = target.is_unix or target.host == "localhost" or addresses.is_loopback(target.host)
    key = _key(point, rank, settings, is_one_machine)
    timeout_ns = settings.start_timeout_ns
    if point.is_torch:
        from ronde.stores.torch import TorchStore  # here, because it imports torch

        store: Store = TorchStore.connect(target.host, target.port, f"ronde/{point.job}", timeout_ns)
        return Meeting(store, key, target)
    is_secret = settings.protection == SECRET
    is_server = point.served_by == rank
    server = StoreServer(point.address, key, is_secret=is_secret) if is_server else None
    try:
        hint = f"rank {point.served_by} serves it in ronde.init()" if point.served_by is not None else ""
        client = StoreClient(point.address, key, timeout_ns, is_secret=is_secret, server=hint, check=check)
        return Meeting(client, key, target, server)
    except BaseException:
        if server:
            server.close()
        raise


def _key(point: MeetingPoint, rank: int, settings: Settings, is_one_machine: bool) -> JobKey:
    is_given = settings.job_key is not None or settings.job_key_fd is not None or bool(settings.job_key_file)
    if settings.insecure_job_key and not is_given and rank == 0:
        _log.warning("%s", INSECURE)
    return find_job_key(
        point.job,
        environment(),
        key=settings.job_key,
        descriptor=settings.job_key_fd,
        file=settings.job_key_file,
        is_insecure=settings.insecure_job_key,
        is_one_machine=is_one_machine,
    )


def _meet_in_file(point: MeetingPoint, rank: int, settings: Settings) -> Meeting:
    named = settings.interface
    address = addresses.address_of_interface(named) if named else _outward_address()
    key = _key(point, rank, settings, addresses.is_loopback(address))
    file = FileStore(point.address.removeprefix(FILE))
    try:
        return Meeting(_join_session(file, rank), key, addresses.Address(host=address), address=address)
    except BaseException:
        file.close()
        raise


def _join_session(store: Store, rank: int) -> Store:
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


def _outward_address() -> str:
    """Return the address by which this machine would reach others; a loopback address if it cannot."""
    try:
        return addresses.address_towards()
    except UsageError:
        return "127.0.0.1"


def _listening_address(settings: Settings, store: addresses.Address) -> str:
    """Return the address of the interface that the settings name, or else of the one that reaches the store."""
    if settings.interface:
        return addresses.address_of_interface(settings.interface)
    return "127.0.0.1" if store.is_unix else addresses.address_towards(store.host)


def surroundings(environ: Mapping[str, str]) -> Surroundings:
    """Return the facts that `comm/identity` needs besides the environment."""
    return Surroundings(os.geteuid(), _ancestor(HYDRA_PROXY) if "MPI_LOCALNRANKS" in environ else 0)


def _ancestor(command: str) -> int:
    """Return the id of the nearest ancestor that runs `command`, 0 if there is none."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                stat = file.read()
        except OSError:
            return 0
        name, _, rest = stat.partition("(")[2].rpartition(")")
        if name == command:
            return pid
        pid = int(rest.split()[1])
    return 0
