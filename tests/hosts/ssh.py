"""Hosts that `ssh` reaches: a server with its own key in each namespace, and a client that knows the keys.

    reason = ssh.require()
    with Hosts(3) as three, SshServers(three) as servers:
        subprocess.run([servers.client, three.ipv4(0), "hostname"])     # prints host-0

Keys, configuration and logs are in one temporary directory; the user's `~/.ssh` is neither read nor written. The client
is a script named `ssh` in `servers.bin`, for programs that have that directory first in PATH.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from ronde.errors import UsageError
from ronde.testing import hosts
from ronde.testing.hosts import Hosts

__all__ = ["SshServers", "require"]

START_S = 20.0
SERVER = "/usr/sbin/sshd"

SERVER_CONFIG = """\
Port 22
AddressFamily any
HostKey {folder}/host-{host}
PidFile none
AuthorizedKeysFile {folder}/authorized
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PrintMotd no
PrintLastLog no
MaxStartups 100
{variables}
"""

CLIENT_CONFIG = """\
Host *
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  User root
"""


@functools.cache
def require() -> str:
    """Return why hosts with ssh cannot be made here, or "" if they can.

    Raises:
        Nothing.
    """
    if reason := hosts.require():
        return reason
    if not os.path.exists(SERVER):
        return f"hosts with ssh need {SERVER} (Debian: apt install openssh-server)"
    if shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "hosts with ssh need the commands `ssh` and `ssh-keygen` (Debian: apt install openssh-client)"
    return ""


class SshServers:
    """One server on each host, whose name is host-INDEX; for use in a `with` statement, which also ends open sessions.

        with Hosts(3) as three, SshServers(three) as servers:
            subprocess.run([servers.client, three.ipv4(0), "hostname"])  # prints host-0

    Args:
        world: The hosts, in their `with` block.
        environ: Variables of all sessions (default: none).

    Attributes:
        client: The path of the client, which knows the keys of all hosts.
        bin: The folder with the client, for PATH.
        folder: The temporary folder with keys, configuration and logs.

    Raises:
        UsageError: `require` gives a reason.
    """

    def __init__(self, world: Hosts, environ: Mapping[str, str] | None = None) -> None:
        if reason := require():
            raise UsageError(reason)
        self._world = world
        self._environ = dict(environ or {})
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self.folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="ronde-ssh-")))
            self.bin = self.folder / "bin"
            self.client = str(self.bin / "ssh")
            self._write()
            for host in range(self._world.count):
                self.start(host)
            undo.callback(self._stop_all)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def start(self, host: int) -> None:
        """Start the server of a host, and wait until it listens. The `with` statement has started all of them once.

        Args:
            host: The number of the host, from 0.

        Raises:
            RuntimeError: The server has ended, or does not listen within 20 s. The error has its log.
        """
        os.makedirs("/run/sshd", exist_ok=True)  # sshd requires it
        script = 'hostname "$1" && exec "$2" -D -e -f "$3"'
        with open(self.folder / f"log-{host}", "ab") as log:
            self._servers[host] = subprocess.Popen(
                [
                    *self._world.command(host),
                    *("unshare", "--uts", "sh", "-c", script, "sh"),
                    *(f"host-{host}", SERVER, str(self.folder / f"config-{host}")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((self._world.ipv4(host), 22), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > deadline or self._servers[host].poll() is not None:
                    text = (self.folder / f"log-{host}").read_text()
                    raise RuntimeError(f"sshd of host {host} does not listen: {text}") from None
                time.sleep(0.01)

    def stop(self, host: int) -> None:
        """Stop the server of a host; open sessions stay.

        Args:
            host: The number of the host, from 0.

        Raises:
            KeyError: The server does not run.
        """
        server = self._servers.pop(host)
        server.terminate()
        server.wait()

    def change_key(self, host: int) -> None:
        """Give the host another key than the one that the client knows, from the next `start` on.

        Args:
            host: The number of the host, from 0.

        Raises:
            subprocess.CalledProcessError: `ssh-keygen` fails.
        """
        self._make_key(f"host-{host}")

    def _known_as(self, host: int) -> str:
        kind, key = (self.folder / f"host-{host}.pub").read_text().split()[:2]
        return f"{self._world.ipv4(host)},{self._world.ipv6(host)} {kind} {key}\n"

    def _stop_all(self) -> None:
        for host in list(self._servers):
            self.stop(host)
        for host in range(self._world.count):
            self._end_sessions(host)

    def _end_sessions(self, host: int) -> None:
        """End the open sessions; after a pulled cable they would outlive their host."""
        for pid in self._world.processes(host):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                    os.kill(pid, signal.SIGKILL)

    def _write(self) -> None:
        self.bin.mkdir()
        self._make_key("user")
        shutil.copy(self.folder / "user.pub", self.folder / "authorized")
        variables = " ".join(f"{name}={value}" for name, value in self._environ.items())
        variables = f"SetEnv {variables}" if variables else ""
        known = []
        for host in range(self._world.count):
            self._make_key(f"host-{host}")
            known.append(self._known_as(host))
            text = SERVER_CONFIG.format(folder=self.folder, host=host, variables=variables)
            (self.folder / f"config-{host}").write_text(text)
        (self.folder / "known").write_text("".join(known))
        (self.folder / "client").write_text(CLIENT_CONFIG.format(folder=self.folder))
        script = Path(self.client)
        script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/client "$@"\n')
        script.chmod(0o755)

    def _make_key(self, name: str) -> None:
        for path in (self.folder / name, self.folder / f"{name}.pub"):
            path.unlink(missing_ok=True)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.folder / name)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
