"""A relay without the job key between the two ends of connections, which alters what it passes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Alter", "AlteringRelay"]

HANDSHAKE_BYTES = 54 + 32  # in each direction: a hello and a proof
LENGTH_BYTES = 4

# Gets whether a message goes to the server, its number in that direction from 0, and its bytes; returns what goes on.
Alter = Callable[[bool, int, bytes], bytes]


class AlteringRelay:
    """Passes on what comes to `address` to the server at `target()`, host and port: handshakes as they are, messages as
    `alter` says. A message is a length of 4 bytes and as many bytes. `seen` is all that has come in.
    """

    def __init__(self, target: Callable[[], tuple[str, int]], alter: Alter) -> None:
        self._target = target
        self._alter = alter
        self.seen = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        for sock in (self._listener, *self._socks):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._socks):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target())
            self._socks += [client, server]
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((client, server, True), (server, client, False)):
                self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, to_server: bool) -> None:
        number = 0
        try:
            left = HANDSHAKE_BYTES
            while left:
                data = source.recv(left)
                if not data:
                    break
                left -= len(data)
                sink.sendall(data)
            while message := _receive(source):
                self.seen += message
                sink.sendall(self._alter(to_server, number, message))
                number += 1
        except OSError:
            pass
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _receive(sock: socket.socket) -> bytes:
    """Return the next message, or nothing at the end."""
    head = sock.recv(LENGTH_BYTES, socket.MSG_WAITALL)
    return head + sock.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL) if head else b""
