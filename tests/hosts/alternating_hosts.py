"""A cluster whose tasks run on hosts that are network namespaces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.hosts.ssh import SshServers

from ronde.launch.clusters.cluster import SlotEvents, Ticket
from ronde.launch.clusters.local import PROGRAM, LocalCluster
from ronde.testing.hosts import Hosts

ROOT = Path(__file__).parents[2]


class AlternatingHosts(LocalCluster):
    """A cluster whose slots are on several hosts in turn, each reached by a command."""

    def __init__(self, slots: int, commands: Sequence[tuple[str, ...]]) -> None:
        super().__init__(slots)
        self._commands = commands

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        for ticket in tickets:
            self._command = self._commands[ticket.slot % len(self._commands)]
            super().request([ticket], events)


def task_programs(hosts: Hosts, servers: SshServers) -> list[tuple[str, ...]]:
    """Return the commands that start a task on each of the hosts, by ssh."""
    program = ("env", f"PYTHONPATH={ROOT}", *PROGRAM)
    return [(servers.client, hosts.ipv4(host), *program) for host in range(hosts.count)]
