"""Clients of a store in other processes, and how these open the store.

python -m tests.conformance.store_processes serve|record

is such a process. It does without pytest, which takes longer to import than all the rest.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from ronde.settings import JobKey
from ronde.stores.store import Store

SECOND = 10**9
LONG = 60 * SECOND
ROOT = Path(__file__).parents[2]
HELD_NS = 2 * SECOND  # the shortest lease that etcd grants


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
        from ronde.stores.prefix import PrefixStore

        return PrefixStore(PrefixStore(store, "job/"), "round 1/")

    def _open(self, kind: str) -> Store:
        if kind == "file":
            from ronde.stores.file import FileStore

            return FileStore(self.address)
        if kind == "etcd":
            from ronde.stores.etcd import EtcdStore

            return EtcdStore(self.address, self.prefix, LONG, lease_ns=HELD_NS)
        if kind == "torch":
            from ronde.stores.torch import TorchStore

            host, _, port = self.address.rpartition(":")
            return TorchStore.connect(host, int(port), "ronde", LONG)
        from ronde.stores.tcp import StoreClient

        return StoreClient(self.address, JobKey(bytes.fromhex(self.key)), LONG)


class Remote:
    """A client of a store in a separate process, which receives calls through pipes, and can be killed."""

    def __init__(self, where: Where) -> None:
        command = [sys.executable, "-m", "tests.conformance.store_processes", "serve"]
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

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(BrokenPipeError):
            self._to.close()
        if kind:
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


def start_recorder(where: Where, name: str, path: Path) -> subprocess.Popen[bytes]:
    """Start a process that makes random calls, and appends its events to the file."""
    command = [sys.executable, "-m", "tests.conformance.store_processes", "record"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)
    assert process.stdin
    pickle.dump((where, name, str(path)), process.stdin)
    process.stdin.close()
    return process


def record() -> None:
    """Be such a process."""
    from tests.conformance.linearizability import Recorder, random_calls

    where, name, path = pickle.load(sys.stdin.buffer)
    store = where.open()
    with open(path, "wb", buffering=0) as file:
        recorder = Recorder(store, name, lambda event: file.write(pickle.dumps(event)))
        random_calls(recorder, name, 80)
    store.close()


if __name__ == "__main__":
    from tests.conformance import store_processes

    {"serve": store_processes.serve, "record": store_processes.record}[sys.argv[1]]()
