"""An etcd lease that a thread keeps alive, and the keys that have it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from contextlib import suppress

from ronde.errors import PeerError
from ronde.stores.etcd_gateway import Gateway, Message, Refusal

__all__ = ["EtcdLease"]

RENEWALS = 3  # in the time of the lease

_log = logging.getLogger(__name__)


class EtcdLease:
    """A lease of about `ttl_ns`; takes over the gateway. Raises PeerLostError or Refusal if etcd grants none."""

    def __init__(self, gateway: Gateway, ttl_ns: int) -> None:
        self._gateway = gateway
        self._ttl_ns = ttl_ns
        self._kept: dict[str, Message] = {}
        self._lock = threading.Lock()  # guards the lease, its keys and the gateway
        self._ended = threading.Event()
        self.number = ""
        self._granted_s = 0.0
        self._grant_lease()
        self._thread = threading.Thread(target=self._run, name="ronde-etcd-lease", daemon=True)
        self._thread.start()

    def keep_key(self, name: str, put: Message) -> None:
        """Repeat this put whenever the lease has run out."""
        with self._lock:
            self._kept[name] = put
            if put["lease"] != self.number:  # the lease has run out since the put
                self._hold_keys()

    def kept_names(self) -> list[str]:
        """Return the names of the kept keys."""
        with self._lock:
            return list(self._kept)

    def drop_keys(self, names: Iterable[str]) -> None:
        """Stop keeping these keys."""
        with self._lock:
            for name in names:
                self._kept.pop(name, None)

    def renew_now(self) -> None:
        """Renew the lease, or take a new one. Raises PeerLostError."""
        with self._lock:
            self._renew()

    def close(self, timeout_ns: int) -> None:
        """Revoke the lease, which deletes its keys."""
        self._ended.set()
        self._thread.join()
        with suppress(PeerError, Refusal):  # otherwise the lease runs out
            self._gateway.post("lease/revoke", {"ID": self.number}, timeout_ns)
        self._gateway.hang_up()

    def abandon(self) -> None:
        """Close the connection in a forked child; the lease is the parent's."""
        self._gateway.hang_up()

    def _run(self) -> None:
        while not self._ended.wait(self._granted_s / RENEWALS):
            try:
                with self._lock:
                    self._renew(int(self._granted_s * 1e9 / RENEWALS))
            except Exception as error:
                # Any error: without this thread, the others take this process for dead.
                _log.info("cannot keep alive what this process holds in etcd: %s", error)

    def _renew(self, timeout_ns: int | None = None) -> None:
        answer = self._gateway.post("lease/keepalive", {"ID": self.number}, timeout_ns)
        if int(answer.get("result", {}).get("TTL", 0)) > 0:
            return
        _log.info("etcd was out of reach for longer than a lease; holding %d keys again", len(self._kept))
        self._grant_lease(timeout_ns)
        self._hold_keys(timeout_ns)

    def _grant_lease(self, timeout_ns: int | None = None) -> None:
        seconds = max(1, -(-self._ttl_ns // 10**9))
        answer = self._gateway.post("lease/grant", {"TTL": str(seconds)}, timeout_ns)
        self.number, self._granted_s = answer["ID"], float(answer["TTL"])

    def _hold_keys(self, timeout_ns: int | None = None) -> None:
        for put in self._kept.values():
            put["lease"] = self.number
            self._gateway.post("kv/put", put, timeout_ns)
