"""Identifies the host of this process, and the processes around it that its identity depends on."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ronde.core.identity import Surroundings

__all__ = ["full_host_name", "host_identity", "host_name", "surroundings"]

HYDRA_PROXY = "hydra_pmi_proxy"


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
    import hashlib  # here, because the launcher of one machine does not need it

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


def surroundings(environ: Mapping[str, str]) -> Surroundings:
    """Return the facts that `core/identity` needs besides the environment."""
    from ronde.core.identity import Surroundings  # here, because the launcher does not need it

    return Surroundings(os.geteuid(), _ancestor(HYDRA_PROXY) if "MPI_LOCALNRANKS" in environ else 0)


def _ancestor(command: str) -> int:
    """Return the id of the nearest ancestor that runs `command`, 0 if there is none."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as file:
                stat = file.read()
        except OSError:
            return 0
        name, _, rest = stat.partition("(")[2].rpartition(")")
        if name == command:
            return pid
        pid = int(rest.split()[1])
    return 0
