"""What a driver needs to know about the places in which its agents run.

`HostAgents` has hosts, reached by ssh, or this machine; `TaskAgents` has tasks, which a cluster starts in its slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ronde.launch.config import LaunchConfig
    from ronde.launch.driver.agent_process import AgentProcess
    from ronde.launch.driver.driver import Driver
    from ronde.launch.driver.host_health import Limits
    from ronde.launch.host_list import Host
    from ronde.stores.tcp import StoreClient

__all__ = ["Placement"]


class Placement(Protocol):
    """Where the agents of one job run. The driver calls everything in the thread of its loop.

    `is_given_by_user`: whether the user has named the hosts, so that one that cannot be reached is the user's mistake.
    `limits`: which hosts take part. `config`: of all agents; each one adds its slots and addresses. `store`: in which
    the agents meet, once `open` has been called.
    """

    is_given_by_user: bool
    limits: Limits
    config: LaunchConfig
    store: StoreClient

    def open(self, driver: Driver) -> None:
        """Serve what agents need to reach the driver, and offer the first hosts by `driver.offer_hosts`."""

    def start_agents(self, hosts: Sequence[Host]) -> None:
        """Have an agent started on each host, and give it to the driver by `driver.add_agent`."""

    def greeted(self, agent: AgentProcess) -> None:
        """Give the agent, which has said hello, its assignment, now or later."""

    def is_replaced(self, agent: AgentProcess) -> bool:
        """Return whether another agent comes in the place of one that has ended; it has been added then."""

    def explain_shortage(self, reason: str) -> str:
        """Return the reason why there are too few hosts, with what this placement knows about it."""

    def end(self) -> None:
        """Start no more agents: the job is over, and running ones are about to end."""

    def close(self) -> None:
        """Close everything. Agents that still run are ended."""
