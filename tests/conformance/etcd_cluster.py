"""A real etcd on free ports of this machine, in a folder that goes with it: one member, or several."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import pytest
from tests.ports import free_ports

START_S = 60


class EtcdCluster:
    """For use in a `with` statement; skips the test where there is no etcd. `extra` are further options of etcd."""

    def __init__(self, members: int = 1, host: str = "127.0.0.1", extra: tuple[str, ...] = ()) -> None:
        if shutil.which("etcd") is None:
            pytest.skip("needs the program `etcd` (Debian: apt install etcd-server)")
        self._host = f"[{host}]" if ":" in host else host
        self._extra = extra
        self._folder = Path(tempfile.mkdtemp(prefix="ronde-etcd-"))
        ports = free_ports(2 * members, host)
        self._clients, self._peers = ports[:members], ports[members:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members

    @property
    def endpoints(self) -> list[str]:
        return [f"{self._host}:{port}" for port in self._clients]

    @property
    def peer_port(self) -> int:
        """Where members talk to each other, by HTTP too."""
        return self._peers[0]

    def __enter__(self) -> Self:
        try:
            for member in range(len(self._clients)):
                self.start(member)
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self, member: int) -> None:
        """Start a member, with the data that it had if it has been there before."""
        scheme = "https" if "--cert-file" in " ".join(self._extra) else "http"
        client = f"{scheme}://{self._host}:{self._clients[member]}"
        peers = [f"http://{self._host}:{port}" for port in self._peers]
        options = {
            "name": f"m{member}",
            "data-dir": f"{self._folder}/m{member}",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peers[member],
            "initial-advertise-peer-urls": peers[member],
            "initial-cluster": ",".join(f"m{index}={peer}" for index, peer in enumerate(peers)),
            "initial-cluster-token": self._folder.name,
        }
        command = ["etcd", *(f"--{name}={value}" for name, value in options.items()), *self._extra]
        with (self._folder / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, member: int) -> None:
        """Kill the member, without a chance to say goodbye."""
        process = self._processes[member]
        assert process
        process.kill()
        process.wait()
        self._processes[member] = None

    def stop(self, member: int) -> None:
        """Let it no longer run, without its connections ending."""
        process = self._processes[member]
        assert process
        process.send_signal(signal.SIGSTOP)

    def _wait(self) -> None:
        from ronde.stores.etcd import EtcdStore

        if "--cert-file" not in " ".join(self._extra):
            for endpoint in self.endpoints:
                EtcdStore(endpoint, "start", START_S * 10**9).close()
            return
        deadline = time.monotonic() + START_S
        while "ready to serve client requests" not in (self._folder / "m0.log").read_text():
            assert time.monotonic() < deadline, (self._folder / "m0.log").read_text()
            time.sleep(0.02)

    def _end(self) -> None:
        for member, process in enumerate(self._processes):
            if process:
                self.kill(member)
        shutil.rmtree(self._folder, ignore_errors=True)
