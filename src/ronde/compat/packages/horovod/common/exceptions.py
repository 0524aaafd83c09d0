"""The errors of elastic programs, by Horovod's names."""

from __future__ import annotations

from ronde.errors import CollectiveError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have come or gone, and training goes on with its present state. Programs catch it; Ronde never raises it.

    `skip_sync`: the state is the same on all ranks, so no rank has to send it.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than Horovod was built for. Ronde is not built for any, and never raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} is running, but {installed_version} was installed", name=name)
        self.name = name
        self.version = version
        self.installed_version = installed_version
