"""The driver's end of mpirun's remote shells (`remote_shell`), in the driver's loop.

The remote shells of one mpirun are processes of this machine and user; nobody else can connect.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from ronde.errors import AuthenticationError
from ronde.launch.loop import Loop, Order
from ronde.net.unix_peers import check_user

__all__ = ["LOST", "RemoteShell", "ShellServer"]

_PROGRAM = Path(__file__).with_name("remote_shell.py")
LOST = 255  # the exit code of a remote shell whose command could not be run
READ_BYTES = 64 * 1024


class RemoteShell:
    """One remote shell: it waits for the exit code of `command` on `host`."""

    def __init__(self, sock: socket.socket, host: str, command: str) -> None:
        self._sock, self.host, self.command = sock, host, command

    def finish(self, exit_code: int) -> None:
        """Let the remote shell end with this exit code."""
        with self._sock, suppress(OSError):  # mpirun may have ended it
            self._sock.sendall(str(exit_code).encode())


class ShellServer:
    """Listens for remote shells. `asked` is called for each, with its command; `finish` it then.

    `folder`: a directory that only this user may enter. `program`: the path of the remote shell, there. The stack
    closes what this opens.
    """

    def __init__(
        self, folder: Path, loop: Loop, stack: ExitStack, asked: Callable[[RemoteShell], None]
    ) -> None:
        self._loop, self._asked = loop, asked
        self._stack = stack
        path = folder / "socket"
        self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(str(path))
        self._listener.listen(128)
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), Order.NODES, self._accept)
        stack.callback(loop.unwatch, self._listener.fileno())
        program = folder / "remote_shell"
        words = [sys.executable, "-I", "-S", str(_PROGRAM), str(path)]
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o700)
        self.program = str(program)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            try:
                check_user(sock)
            except AuthenticationError:
                sock.close()
                return
            sock.setblocking(False)
            self._stack.callback(sock.close)
            self._loop.watch(sock.fileno(), Order.NODES, partial(self._read, sock, bytearray()))

    def _read(self, sock: socket.socket, request: bytearray) -> None:
        data = os.read(sock.fileno(), READ_BYTES)
        request += data
        if data and not request.endswith(b"\n"):
            return
        self._loop.unwatch(sock.fileno())
        if not data:
            sock.close()
            return
        host, command = json.loads(request)
        self._asked(RemoteShell(sock, host, command))
