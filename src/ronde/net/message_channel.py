"""Messages over an authenticated TCP connection, without blocking: bytes in, whole messages out, and the reverse.

    frame = length of the rest (4 bytes), message, tag (16 bytes)

Every frame is sealed for its place in the stream (cpp/links/sealer.h), so one that is altered, repeated, left out or
from another connection does not open. The length stays readable and is checked before anything is kept; the tag covers
it.
"""

from __future__ import annotations

import socket
import struct

from ronde._native import SealedConnection
from ronde.errors import ProtocolError
from ronde.net.authentication import ConnectionKeys

__all__ = ["MESSAGE_LIMIT_BYTES", "Frames", "MessageChannel"]

MESSAGE_LIMIT_BYTES = 1 << 20
READ_BYTES = 1 << 16
TAG_BYTES = 16
_LENGTH = struct.Struct("!I")


class Frames:
    """The frames of one end of a connection. Does no input or output."""

    def __init__(self, keys: ConnectionKeys) -> None:
        self._seals = SealedConnection(*keys.parts())
        self._inbox = bytearray()  # at most one incomplete frame

    def pack(self, message: bytes) -> bytes:
        """Return the frame of the next message to send. Raises ProtocolError if it exceeds the limit of 1 MiB."""
        if len(message) > MESSAGE_LIMIT_BYTES:
            raise ProtocolError(
                f"a message of {len(message)} bytes exceeds the limit of {MESSAGE_LIMIT_BYTES} bytes"
            )
        return self._seals.seal(_LENGTH.pack(len(message) + TAG_BYTES) + message, _LENGTH.size)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes.

        Raises ProtocolError if a frame is malformed or not the next one. The connection is then unusable.
        """
        inbox = self._inbox
        inbox += data
        messages = []
        start = 0
        while len(inbox) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(inbox, start)
            if not TAG_BYTES <= length <= MESSAGE_LIMIT_BYTES + TAG_BYTES:
                raise ProtocolError(
                    f"a frame has {length} bytes, and frames of messages have {TAG_BYTES} to "
                    f"{MESSAGE_LIMIT_BYTES + TAG_BYTES} bytes: the other end does not speak Ronde's protocol"
                )
            end = start + _LENGTH.size + length
            if len(inbox) < end:
                break
            opened = self._seals.open(bytes(inbox[start:end]), _LENGTH.size)
            if opened is None:
                raise ProtocolError("a message was altered, repeated or left out on its way")
            messages.append(opened[_LENGTH.size :])
            start = end
        del inbox[:start]
        return messages


class MessageChannel:
    """One end of an authenticated connection. It owns the socket, makes it non-blocking, and never waits.

    `unsent` is the number of bytes that the socket has not taken yet: while it is not 0, wait until the socket is
    writable and call `flush`. One thread uses the object. All methods raise OSError if the connection is broken.
    """

    def __init__(self, sock: socket.socket, keys: ConnectionKeys) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = Frames(keys)
        self._outbox = bytearray()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._sock.fileno()

    @property
    def unsent(self) -> int:
        """How many bytes wait until the socket takes them."""
        return len(self._outbox)

    def send(self, message: bytes) -> None:
        """Send a message: what the socket takes now, and the rest with `flush`."""
        self._outbox += self._frames.pack(message)
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        try:
            while self._outbox:
                del self._outbox[: self._sock.send(self._outbox, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived; reads 64 KiB at most.

        Raises ConnectionResetError at the end of the stream, and ProtocolError as `Frames.feed` does.
        """
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("the connection was closed by the other end")
        return self._frames.feed(data)

    def close(self) -> None:
        """Close the socket; a message that it has not taken is lost."""
        self._sock.close()
