"""A relay between a store's clients and its server that cuts connections in the middle of messages."""

from __future__ import annotations

import random
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["CuttingRelay"]

RESET = struct.pack("ii", 1, 0)


class CuttingRelay:
    """Relays connections from `address` to the server at `target()`, host and port.

    Each connection, in each direction, carries a random number of bytes, less than `most`, and breaks then: by a reset
    or an end, for one side or the other first.
    """

    def __init__(self, target: Callable[[], tuple[str, int]], seed: int, most: int) -> None:
        self._target = target
        self._chance = random.Random(seed)
        self._most = most
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._mine, self._yours = socket.socketpair()
        self._selector.register(self._mine, selectors.EVENT_READ)
        self._left: dict[socket.socket, int] = {}
        self._other: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._yours.send(b"x")
        self._thread.join()
        for sock in (*self._other, self._listener, self._mine, self._yours):
            sock.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._mine:
                    return
                if sock is self._listener:
                    self._accept()
                elif sock in self._other:
                    self._pass_on(sock)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target())
        except OSError:
            client.close()
            return
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._other[one] = other
            self._left[one] = self._chance.randrange(self._most)
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, sock: socket.socket) -> None:
        other = self._other[sock]
        try:
            data = sock.recv(1 << 16)
            other.sendall(data[: self._left[sock]])
        except OSError:
            data = b""
        self._left[sock] -= len(data)
        if not data or self._left[sock] < 0:
            self.cuts += self._left[sock] < 0
            self._cut(sock, other)

    def _cut(self, *both: socket.socket) -> None:
        for sock in self._chance.sample(both, 2):
            if self._chance.random() < 0.5:
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._selector.unregister(sock)
            del self._other[sock], self._left[sock]
            sock.close()
