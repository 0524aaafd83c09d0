"""Identifies the host of this process."""

from __future__ import annotations

import hashlib
import os
import socket

__all__ = ["full_host_name", "host_identity", "host_name"]


def host_name() -> str:
    """Return the name of this machine, for messages."""
    return socket.gethostname()


def full_host_name() -> str:
    """Return the name of this machine with its domain, as /etc/hosts or a name server has it; else without."""
    name = host_name()
    try:
        return socket.getaddrinfo(name, None, flags=socket.AI_CANONNAME)[0][3] or name
    except OSError:
        return name


def host_identity(host_id: str) -> str:
    """Return a text that is equal for two processes if and only if they are on the same host.

    Then they can share memory and abstract Unix sockets. Containers of one machine are different hosts. The identity
    follows from the boot of the machine, the namespaces of network and IPC, /dev/shm, the user, and `host_id`
    (RONDE_HOST_ID).
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "ipc")]
    except OSError:  # some sandboxes hide these
        boot, namespaces = host_name(), []
    try:
        shared_memory = os.stat("/dev/shm").st_dev  # each container has its own
    except OSError:
        shared_memory = 0
    parts = (boot, *namespaces, shared_memory, os.geteuid(), host_id)
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
