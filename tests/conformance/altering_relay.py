"""A relay without the job key between the two ends of connections, which alters messages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Alter", "AlteringRelay"]

TO_SERVER_BYTES, TO_CLIENT_BYTES = 54 + 32, 54 + 32 + 1  # of a handshake: a hello, a proof, a welcome
LENGTH_BYTES = 4

# Gets whether a message goes to the server, its number in that direction from 0, and its bytes; returns what goes on.
# An OSError drops the message and ends the connection.
Alter = Callable[[bool, int, bytes], bytes]


class AlteringRelay:
    """Relays connections from `address` to the server at `target()`, host and port.

    It relays handshakes unchanged, and passes messages through `alter`, on connections whose hello `concerns` it.
    `receive` returns the next message from a socket: one that begins with its length, or another piece of a stream.
    `seen`: all received bytes.
    """

    def __init__(
        self,
        target: Callable[[], tuple[str, int]],
        alter: Alter,
        concerns: Callable[[bytes], bool] = lambda _hello: True,
        receive: Callable[[socket.socket], bytes] | None = None,
        at: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self._target = target
        self._alter = alter
        self._concerns = concerns
        self._receive = receive or _receive_frame
        self.seen = b""
        self._listener = socket.create_server(at)
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
            try:
                server = socket.create_connection(self._target())
            except OSError:  # it is not there yet: the client tries again
                client.close()
                continue
            self._socks += [client, server]
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = bytearray()
            for ends in ((client, server, True, hello), (server, client, False, hello)):
                self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, to_server: bool, hello: bytearray) -> None:
        number = 0
        try:
            left = TO_SERVER_BYTES if to_server else TO_CLIENT_BYTES
            while left:
                data = source.recv(left)
                if not data:
                    break
                left -= len(data)
                if to_server:
                    hello += data
                sink.sendall(data)
            while message := self._receive(source):
                self.seen += message
                if self._concerns(bytes(hello)):
                    message = self._alter(to_server, number, message)
                    number += 1
                sink.sendall(message)
        except OSError:
            pass
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _receive_frame(sock: socket.socket) -> bytes:
    """Return the next message with its length, or nothing at the end."""
    head = sock.recv(LENGTH_BYTES, socket.MSG_WAITALL)
    return head + sock.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL) if head else b""
