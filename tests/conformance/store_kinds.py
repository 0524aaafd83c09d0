"""All kinds of stores, each of which can be opened any number of times, here and in other processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from tests.conformance.etcd_cluster import EtcdCluster
from tests.conformance.store_processes import Where

from ronde.settings import JobKey
from ronde.stores.store import Store

KINDS = [
    "memory",
    "prefix-memory",
    "unix",
    "unix-path",
    "tcp",
    "tcp6",
    "prefix-tcp",
    "file",
    "etcd",
    "torch",
]
WHOLE_KINDS = ["memory", "tcp", "prefix-tcp", "file", "etcd"]  # of those that do everything, one of each make
IN_ONE_PROCESS = {"memory", "prefix-memory"}
ONLY_BOOTSTRAP = {"torch"}  # has no queues, watch, hold, delete_prefix


Open = Callable[[Path], AbstractContextManager[tuple[Callable[[], Store], Where | None]]]
_numbers = itertools.count()


@contextmanager
def kind_of_store(name: str) -> Iterator[Open]:
    """Set up a kind of store for its tests; yields a factory of empty stores of the kind.

    The factory returns a function to open the store here, and a `Where` to open it elsewhere, None for one in memory.
    """
    kind = name.removeprefix("prefix-")
    if kind == "etcd":
        with EtcdCluster() as etcd:
            yield lambda _: here(Where(name, etcd.endpoints[0], prefix=f"test {next(_numbers)}"))
    elif kind == "file":
        yield lambda folder: here(Where(name, str(folder / "store")))
    elif kind == "memory":
        yield lambda _: in_memory(name)
    elif kind == "torch":
        pytest.importorskip("torch.distributed")
        with of_torch():
            pass  # the first store of torch opens files that stay open as long as the process
        yield lambda _: of_torch()
    else:
        address = {"unix": "unix:@ronde-test-{random}", "unix-path": "unix:{folder}/store"}.get(
            kind, "tcp:[::1]:0" if kind == "tcp6" else "tcp:127.0.0.1:0"
        )
        yield lambda folder: served(name, address.format(folder=folder, random=os.urandom(8).hex()))


@contextmanager
def here(where: Where) -> Iterator[tuple[Callable[[], Store], Where | None]]:
    opened: list[Store] = []

    def connect() -> Store:
        opened.append(where.open())
        return opened[-1]

    yield connect, where
    for store in opened:
        store.close()


@contextmanager
def in_memory(name: str) -> Iterator[tuple[Callable[[], Store], Where | None]]:
    from ronde.stores.memory import MemoryStore
    from ronde.stores.prefix import PrefixStore

    store = MemoryStore()
    yield (lambda: PrefixStore(store.fork(), "job/") if name.startswith("prefix") else store.fork()), None


@contextmanager
def served(name: str, address: str) -> Iterator[tuple[Callable[[], Store], Where | None]]:
    from ronde.stores.server import StoreServer

    key = JobKey.generate()
    server = StoreServer(address, key)
    try:
        with here(Where(name, server.address, key.hex())) as opened:
            yield opened
    finally:
        server.close()


@contextmanager
def of_torch() -> Iterator[tuple[Callable[[], Store], Where | None]]:
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with here(Where("torch", f"127.0.0.1:{server.port}")) as opened:
        yield opened
    del server  # torch's server ends with its last reference
