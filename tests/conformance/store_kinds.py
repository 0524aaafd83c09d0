"""All kinds of stores, each of which can be opened any number of times, here and in other processes."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pytest
from tests.conformance.etcd_cluster import EtcdCluster

from ronde.net.stores.base import Store
from ronde.settings import JobKey

SECOND = 10**9
LONG = 60 * SECOND
ROOT = Path(__file__).parents[2]
HELD_NS = 2 * SECOND  # the shortest lease that etcd grants

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


@dataclass(frozen=True)
class Where:
    """How to open a store; can be sent to another process."""

    kind: str
    address: str
    key: str = ""
    prefix: str = ""

    def open(self) -> Store:
        kind = self.kind.removeprefix("prefix-")
        store = self._open(kind)
        if kind == self.kind:
            return store
        from ronde.net.stores.prefix import PrefixStore

        return PrefixStore(PrefixStore(store, "job/"), "round 1/")

    def _open(self, kind: str) -> Store:
        if kind == "file":
            from ronde.net.stores.file import FileStore

            return FileStore(self.address)
        if kind == "etcd":
            from ronde.net.stores.etcd import EtcdStore

            return EtcdStore(self.address, self.prefix, LONG, lease_ns=HELD_NS)
        if kind == "torch":
            from ronde.net.stores.torch import TorchStore

            host, _, port = self.address.rpartition(":")
            return TorchStore(host, int(port), "ronde", LONG)
        from ronde.net.stores.tcp import StoreClient

        return StoreClient(self.address, JobKey(bytes.fromhex(self.key)), LONG)


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
    from ronde.net.stores.memory import MemoryStore
    from ronde.net.stores.prefix import PrefixStore

    store = MemoryStore()
    yield (lambda: PrefixStore(store.fork(), "job/") if name.startswith("prefix") else store.fork()), None


@contextmanager
def served(name: str, address: str) -> Iterator[tuple[Callable[[], Store], Where | None]]:
    from ronde.net.stores.tcp import StoreServer

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


class Remote:
    """A client of a store in a separate process, which receives calls through pipes, and can be killed."""

    def __init__(self, where: Where) -> None:
        command = [sys.executable, "-m", "tests.conformance.store_kinds"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdin
        assert self._process.stdout
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout
        self.pid = self._process.pid
        self._send(where)

    def start(self, method: str, *arguments: Any) -> None:
        """Make a call; `result` returns its result."""
        self._send((method, arguments))

    def result(self) -> Any:
        answer = pickle.load(self._from)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, method: str, *arguments: Any) -> Any:
        self.start(method, *arguments)
        return self.result()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(BrokenPipeError):
            self._to.close()
        if error:
            self._process.kill()
        self._process.wait()
        self._from.close()

    def _send(self, message: object) -> None:
        pickle.dump(message, self._to)
        self._to.flush()


def serve() -> None:
    """Be such a process."""
    calls, answers = sys.stdin.buffer, sys.stdout.buffer
    store = pickle.load(calls).open()
    while True:
        try:
            method, arguments = pickle.load(calls)
        except EOFError:
            break
        answer: Any
        try:
            if method == "fork and sleep":
                answer = os.fork()
                if answer == 0:
                    os.closerange(0, 2)
                    time.sleep(arguments[0])
                    os._exit(0)
            else:
                answer = getattr(store, method)(*arguments)
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()
    store.close()


if __name__ == "__main__":
    from tests.conformance import store_kinds

    store_kinds.serve()
