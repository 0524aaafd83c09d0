"""TCP ports for tests: tests that run at once get different ones, and the kernel assigns them to no other socket.

They lie below those that the kernel chooses (for port 0 and for clients), and each process that runs tests has its own
range. A port that was only free a moment ago may belong to another test by now.
"""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

from ronde.settings import environment

LOWEST = 21_000
FOR_EACH = 500
BESIDE = 10_000  # of the rendezvous `static`: so far below its endpoint the nodes meet


def _of_this_process() -> range:
    # xdist numbers its workers: gw0, gw1, ...
    worker = int(environment().get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    chosen_by_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    shares = max((chosen_by_kernel - LOWEST) // FOR_EACH, 1)
    first = LOWEST + worker % shares * FOR_EACH
    return range(first, first + FOR_EACH)


# Another start for each run, since one may follow another whose connections are still winding down.
_ports = itertools.islice(itertools.cycle(_of_this_process()), os.getpid() % FOR_EACH, None)


def free_port(host: str = "127.0.0.1") -> int:
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports at which nobody listens at this numeric address, nor where nodes meet whose workers have such a port."""
    free = (port for port in _ports if _is_free(port, host) and _is_free(port - BESIDE, host))
    return list(itertools.islice(free, count))


def _is_free(port: int, host: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
