"""Lets ranks of Horovod meet without horovodrun."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from groups import Broken

from ronde.testing import ranks

HOST = "localhost"


@contextlib.contextmanager
def horovod_places(size: int) -> Iterator[list[ranks.Place]]:
    """Serve the meeting of ranks on this machine (Horovod's controller by Gloo) and yield the place of each.

    Raises Broken if Horovod is not installed.
    """
    try:
        server: Any = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
        hosts: Any = importlib.import_module("horovod.runner.common.util.hosts")
    except ImportError as error:
        raise Broken(f"{type(error).__name__}: {error}") from None
    port = server.start()
    try:
        server.init(hosts.get_host_assignments(hosts.parse_hosts(f"{HOST}:{size}"), size))
        yield [ranks.Place(environ=_environment(rank, size, port)) for rank in range(size)]
    finally:
        server.stop()


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "HOROVOD_HOSTNAME": HOST,
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
    }
