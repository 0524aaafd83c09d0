"""A program: a cable that takes its time, between two network interfaces of this machine.

    python -m ronde.testing.delay INTERFACE INTERFACE MILLISECONDS

Every frame that comes out of one interface goes into the other after that time, in order. It is for kernels without
`netem`. It prints `ready`, and runs until it is killed.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque

ALL_PROTOCOLS = 3  # ETH_P_ALL
SOL_PACKET, PACKET_IGNORE_OUTGOING, PACKET_VNET_HDR = 263, 23, 15
HEADER_BYTES = 10
MOST_BYTES = HEADER_BYTES + 65536 + 64
BUFFER_BYTES = 8 << 20


def open_interface(name: str) -> socket.socket:
    """Return a socket that takes the frames of the interface before they are cut up and their checksums are made."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    sock.setsockopt(
        SOL_PACKET, PACKET_VNET_HDR, 1
    )  # what the hardware would have to do travels with the frame
    sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sock.bind((name, ALL_PROTOCOLS))
    sock.setblocking(False)
    return sock


def relay(names: list[str], delay_ns: int) -> None:
    """Pass frames on, for ever."""
    ends = [open_interface(name) for name in names]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    # The delay is the same for all, so the order is too.
    waiting: deque[tuple[int, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        timeout_s = max(0.0, (waiting[0][0] - time.monotonic_ns()) / 1e9) if waiting else None
        for sock in select.select(ends, [], [], timeout_s)[0]:
            try:
                while True:
                    data = sock.recv(MOST_BYTES)
                    waiting.append((time.monotonic_ns() + delay_ns, other[sock], data))
            except BlockingIOError:
                pass
        while waiting and waiting[0][0] <= time.monotonic_ns():
            _, sock, data = waiting.popleft()
            try:
                sock.send(data)
            except OSError:  # lost, as on any network
                continue


if __name__ == "__main__":
    relay(sys.argv[1:3], int(float(sys.argv[3]) * 1e6))
