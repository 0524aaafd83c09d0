"""The places where the agents of a soak meet, and their faults: a file, an etcd, a store in an agent or alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.conformance.etcd_cluster import EtcdCluster
from tests.ports import free_ports


class Place:
    """What an agent needs to be told to meet there (`words`, `conf`), and how the place fails and comes back.

    The bare one is served by an agent: the first, and by others after its death.
    """

    in_agent = True

    def __init__(self, folder: Path) -> None:
        self.words = (
            "--rdzv-backend",
            "tcp",
            "--rdzv-endpoint",
            f"127.0.0.1:{free_ports(1, '127.0.0.1')[0]}",
        )
        self.conf = ""

    def kill(self) -> bool:
        """Return whether there was something to kill."""
        return False

    def freeze(self) -> bool:
        """Return whether there was something to stop."""
        return False

    def mend(self) -> None:
        """Let it be there again."""

    def close(self) -> None:
        self.kill()


class InFile(Place):
    """Nothing runs there that could fail."""

    in_agent = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.words = ("--rdzv-backend", "file", "--rdzv-endpoint", str(folder / "meeting"))


class InStore(Place):
    """A `ronde store`, with or without a journal."""

    in_agent = False

    def __init__(self, folder: Path, journal: bool) -> None:
        super().__init__(folder)
        self.conf = "is_host=false"
        self._journal = ("--journal", str(folder / "journal")) if journal else ()
        self._address = self.words[-1]
        self._log = folder / "store.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.mend()

    def kill(self) -> bool:
        process, self._process = self._process, None
        if process:
            process.kill()
            process.wait()
        return process is not None

    def freeze(self) -> bool:
        if self._process:
            self._process.send_signal(signal.SIGSTOP)
        return self._process is not None

    def mend(self) -> None:
        if self._process:
            self._process.send_signal(signal.SIGCONT)
            return
        host, _, port = self._address.partition(":")
        words = (sys.executable, "-m", "ronde", "store", "--host", host, "--port", port, *self._journal)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, env=dict(os.environ))


class InEtcd(Place):
    """One member, which keeps its data."""

    in_agent = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._cluster = EtcdCluster()
        self._cluster.__enter__()
        self._runs = True
        self.words = ("--rdzv-backend", "etcd", "--rdzv-endpoint", self._cluster.endpoints[0])

    def kill(self) -> bool:
        if self._runs:
            self._cluster.kill(0)
        was, self._runs = self._runs, False
        return was

    def mend(self) -> None:
        if not self._runs:
            self._cluster.start(0)
        self._runs = True

    def close(self) -> None:
        self._cluster.__exit__(None, None, None)


KINDS = ("agent", "store", "journal", "file", "etcd")


def make(kind: str, folder: Path) -> Place:
    match kind:
        case "agent":
            return Place(folder)
        case "file":
            return InFile(folder)
        case "etcd":
            return InEtcd(folder)
    return InStore(folder, journal=kind == "journal")
