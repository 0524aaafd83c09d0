"""Crowds of connections, made by processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ronde.net.addresses import parse_address, resolve

NOBODY = 65534

# Keeps COUNT connections open, each made again when it breaks if AGAIN is 1; tells when it has made all of them once.
CROWD = """
import resource, select, socket, sys
family, count, again, words = int(sys.argv[1]), int(sys.argv[3]), sys.argv[4] == "1", bytes.fromhex(sys.argv[5])
host, _, port = sys.argv[2].rpartition(" ")
place = (host, int(port)) if host else "\\0" + port
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 100), hard))
poll, socks = select.epoll(), {}

def connect():
    sock = socket.socket(family)
    sock.setblocking(False)
    try:
        sock.connect(place)
    except BlockingIOError:
        pass
    except OSError:
        return
    socks[sock.fileno()] = sock
    if words:
        try:
            sock.send(words)
        except OSError:
            pass
    poll.register(sock.fileno(), select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR)

for _ in range(count):
    connect()
print("here", flush=True)
while True:
    for fd, _ in poll.poll(0.1):
        socks.pop(fd).close()
    while again and len(socks) < count:
        before = len(socks)
        connect()
        if len(socks) == before:
            break
"""


@contextmanager
def crowd(
    address: str, count: int, again: bool = True, words: bytes = b""
) -> Iterator[subprocess.Popen[str]]:
    """Have so many connections to `address` made by a process, which goes on with that until the end."""
    endpoint = resolve(parse_address(address))[0]
    if isinstance(endpoint.sockaddr, str):
        place = endpoint.sockaddr[1:]
    else:
        place = f"{endpoint.sockaddr[0]} {endpoint.sockaddr[1]}"
    family = {socket.AF_UNIX: 1, socket.AF_INET: 2}[endpoint.family]
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", CROWD, str(family), place, str(count), str(int(again)), words.hex()],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={"PATH": os.defpath},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
    finally:
        process.kill()
        process.communicate()


# Finds every listening socket of this network namespace as soon as it is there, and keeps COUNT connections to each.
STALKER = """
import os, resource, select, socket, sys
count, words = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
os.setgroups([])
os.setresuid(int(sys.argv[3]), int(sys.argv[3]), int(sys.argv[3]))
poll, socks, crowds = select.epoll(), {}, {}

def listeners():
    for line in open("/proc/net/unix").readlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[3] == "00010000" and fields[7].startswith("@ronde"):
            yield socket.AF_UNIX, "\\0" + fields[7][1:]
    for line in open("/proc/net/tcp").readlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            yield socket.AF_INET, ("127.0.0.1", int(local.partition(":")[2], 16))

def connect(target):
    sock = socket.socket(target[0])
    sock.setblocking(False)
    try:
        sock.connect(target[1])
    except BlockingIOError:
        if target[0] == socket.AF_UNIX:
            return False
    except OSError:
        return False
    socks[sock.fileno()] = sock, target
    crowds[target] = crowds.get(target, 0) + 1
    if words:
        try:
            sock.send(words)
        except OSError:
            pass
    poll.register(sock.fileno(), select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR)
    return True

print("here", flush=True)
while True:
    for target in set(listeners()):
        while crowds.get(target, 0) < count and connect(target):
            pass
    for fd, _ in poll.poll(0.005):
        sock, target = socks.pop(fd)
        sock.close()
        crowds[target] -= 1
"""


@contextmanager
def stalker(count: int, words: bytes = b"") -> Iterator[None]:
    """Have a process of another user crowd every listener that it finds, with so many connections each."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", STALKER, str(count), words.hex(), str(NOBODY)],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={"PATH": os.defpath},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
