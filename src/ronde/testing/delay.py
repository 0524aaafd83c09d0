"""A program: a slow cable between two network interfaces of this machine.

    python -m ronde.testing.delay INTERFACE INTERFACE MILLISECONDS

It passes every frame from one interface to the other after that time, in order, on kernels without `netem`. It prints
`ready`, and runs until it is killed.
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
    """Return a socket for the frames of the interface before segmentation and checksums."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    # A header with the work left to the hardware precedes each frame.
    sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sock.bind((name, ALL_PROTOCOLS))
    sock.setblocking(False)
    return sock


def relay(names: list[str], delay_ns: int) -> None:
    """Pass frames on until this process is killed."""
    ends = [open_interface(name) for name in names]
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    # All frames have the same delay, so they keep their order.
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
            except OSError:  # the frame is lost
                continue


if __name__ == "__main__":
    relay(sys.argv[1:3], int(float(sys.argv[3]) * 1e6))
