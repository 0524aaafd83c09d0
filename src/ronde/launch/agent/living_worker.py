"""A worker's process with what belongs to it, as it goes from one run of the workers to the next."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from ronde.errors import ProtocolError
from ronde.launch.agent.outputs import WorkerOutput
from ronde.launch.launch_plan import PLACE, WorkerPlan
from ronde.launch.screen import OutputStream
from ronde.process.membership_channel import FromAgent, FromWorker, MembershipChannel, PlaceInRound
from ronde.process.process_groups import GroupLeader

__all__ = ["LivingWorker"]


@dataclass(eq=False)
class LivingWorker:
    """One process, whatever its rank.

    `since_ns`: when it started. `placed_ns`: when it got its present place. `continues`: it has said so, and this is
    its training of the number `trainings`, from 1. `has_joined`: it has been in the world of a round. `has_completed`:
    it knows that all ranks have finished. `world`: the number of the first round to which its world can belong: later
    than each that it has left. `places`: the rounds that it has been in, with its rank in each: a message may still
    name an earlier one. `channel`: None if workers of this job never continue. `home`: its first place among the
    workers of the node, whose GPU it may use.
    """

    process: GroupLeader
    output: WorkerOutput
    channel: MembershipChannel | None
    since_ns: int
    streams: set[OutputStream] = field(default_factory=set)
    placed_ns: int = 0
    world: int = 0
    continues: bool = False
    trainings: int = 0
    has_joined: bool = False
    has_completed: bool = False
    places: dict[int, int] = field(default_factory=dict)  # rank by round
    home: int = 0

    @property
    def takes_newcomers(self) -> bool:
        """Whether new processes can take part in its training, because a new program begins with the same one."""
        return self.trainings + self.has_completed <= 1

    def send_message(self, message: FromAgent) -> None:
        """Send a message, if the worker can get one. A worker that reads nothing is not waited for."""
        if self.channel is not None:
            self.channel.send(message)

    def note_continues(self) -> None:
        """Note that it has begun a training."""
        self.continues, self.has_completed = True, False
        self.trainings += 1

    def read_messages(self) -> list[FromWorker]:
        """Return what it has sent; nothing after a message that is none."""
        if self.channel is not None:
            with contextlib.suppress(ProtocolError):
                return self.channel.read()
        return []

    def give_place(self, plan: WorkerPlan, number: int, reason: str, lost: tuple[str, ...]) -> None:
        """Tell the worker its place in a round that has begun, and show its output under its new rank."""
        variables = {name: value for name, value in plan.environment.items() if name in PLACE}
        self.output.change_place(
            plan.rank, plan.local_rank, self.streams
        )  # before it writes under its new rank
        self.send_message(PlaceInRound(number, variables, reason, lost))
