"""Simulates jobs whose workers continue: real agents, runs of workers and reserves on the real rendezvous.

    python -m tests.sim.continuing --seeds 100000
    python -m tests.sim.continuing --seed 7 --nodes 64

The world is that of `agents`. Workers form the world of a round when all of them have come to it; they work, and come
to a commit now and then, where they follow a wish for another world. When a member dies or leaves, the others leave,
too, and wait for a place. All finish together. Workers are killed, raise, have not said yet that they continue, or die
while they start. Each node has a reserve, and may go on with fewer workers.

Checked is, beside what is checked there: the members of a world have come for one round, with all of its ranks and no
rank twice; no worker that continues is signalled while the job goes on and its node is well; a round has the least
number of workers; and every job ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tests.sim.agents import AgentNode, AgentSimulation
from tests.sim.common_order import require
from tests.sim.rendezvous import BAD_TIMES_NS, main
from tests.sim.rendezvous_checks import Checks
from tests.sim.rendezvous_node import MS, S, SimNode

from ronde.launch.agent.decisions import (
    Agent,
    AgentEnd,
    Effect,
    EndContinuing,
    EndJob,
    Failing,
    InterruptAgent,
    JoinRound,
    LeaveJob,
    NotifyWorkers,
    RequestChange,
    StartWorkers,
    StopWorkers,
    UpdateNode,
    WorkersContinue,
    WorkersEnded,
    WorkersSettled,
    WorkerState,
    WorldLeft,
)
from ronde.launch.agent.reserve import Reserve, ReserveEffect, SetReserveTimer, StartReserve
from ronde.launch.agent.worker_group import Event as GroupEvent
from ronde.launch.agent.worker_group import (
    Exited,
    GroupEnd,
    GroupSettled,
    GroupTimer,
    InterruptGroup,
    NoRoundFollows,
    Policy,
    SetGroupTimer,
    SignalWorkers,
    Started,
    StopGroup,
    WorkerAwaits,
    WorkerCompleted,
    WorkerContinues,
    WorkerGroup,
    WorkerJoined,
    WorkerJoins,
)
from ronde.rendezvous.membership import (
    Budget,
    Ejected,
    Failure,
    JobClosed,
    RendezvousBroken,
    RendezvousEvent,
    Round,
    RoundEnded,
)
from ronde.rendezvous.participant import Participant

SIGKILL, SIGTERM = 9, 15
SLOTS = 3
# From this number of workers or nodes on, they need not all hear of each other's end, or be checked by each other.
MANY = 100
INIT_TIMEOUT_NS = 60 * S  # after which a worker gives up to wait for the others


@dataclass(eq=False)
class SimWorker:
    """One process. `told`: the newest round in which it has a place; `rank`: in that round."""

    node: ContinuingNode
    key: int
    continues: bool = False
    is_alive: bool = True
    told: int = -1
    rank: int = -1
    size: int = 0
    world: World | None = None
    left: int = -1  # the last round whose world it has left

    @property
    def sim(self) -> ContinuingSimulation:
        return self.node.jobs

    def come(self) -> None:
        """Come to the world of the newest round."""
        if self.is_alive and self.world is None and self.told > self.left:
            self.sim.world(self.told).add(self)
            self.node.group_event(self, lambda rank: WorkerJoins(rank, 0))

    def leave(self) -> None:
        """Leave the world, and wait for a place in a later round."""
        if (world := self.world) is None or not self.is_alive:
            return
        self.world, self.left = None, max(self.left, world.number)
        world.lose(self)
        self.node.group_event(self, WorkerAwaits)
        self.node.note_left()
        self.come()

    def die(self) -> None:
        self.is_alive = False
        if world := self.world:
            self.world = None
            world.lose(self)

    def hear(self, what: str, number: int) -> None:
        """Get a message of the agent. It leaves a world in which it still waits for others for a newer one."""
        world = self.world
        if what == "lost" and self.node.leaves and self.key % 5 == 4:
            return  # it is stuck in the user's program
        if self.is_alive and world is None and what == "lost" and self.node.leaves:
            self.left = max(self.left, number)
            self.node.group_event(self, WorkerAwaits)
        elif not self.is_alive or world is None:
            self.come()
        elif (what == "lost" and world.number <= number) or (
            world.number < self.told and not world.has_formed
        ):
            self.leave()
        elif what != "lost":
            world.is_unwanted = True


@dataclass(eq=False)
class World:
    """The workers that have come to a round."""

    sim: ContinuingSimulation
    number: int
    members: dict[int, SimWorker] = field(default_factory=dict)  # by rank
    size: int = 0  # as those know it that have come; a member may have another place by now
    has_formed: bool = False
    is_lost: bool = False
    is_unwanted: bool = False
    has_completed: bool = False

    def add(self, worker: SimWorker) -> None:
        require(worker.rank not in self.members, "two workers of rank", worker.rank, "in round", self.number)
        require(self.size in (0, worker.size), "a world of several sizes in round", self.number)
        self.size = worker.size
        require(not self.has_formed, "a worker comes to a world that is complete:", self.number)
        worker.world = self
        self.members[worker.rank] = worker
        if self.is_lost:
            worker.node.later(self.sim.latency_ns(), lambda: worker.leave() if worker.world is self else None)
        elif len(self.members) == worker.size:
            self.has_formed = True
            self.sim.counts["worlds"] += 1
            for each in self.members.values():
                each.node.later(self.sim.latency_ns(), lambda each=each: each.node.note_joined(each))  # type: ignore[misc]
            self.plan_commit(self.sim.rng.randrange(1, 4))
        else:
            worker.node.later(INIT_TIMEOUT_NS, lambda: self.give_up(worker))

    def give_up(self, worker: SimWorker) -> None:
        if worker.world is self and not self.has_formed:
            self.sim.counts["workers give up to wait"] += 1
            worker.node.exit_worker(worker, 1, blames_peer=True)

    def plan_commit(self, left: int) -> None:
        self.sim.at(self.sim.now_ns + self.sim.rng.randrange(10 * S), lambda: self.commit(left))

    def commit(self, left: int) -> None:
        """Come to a commit together, or to the end."""
        workers = list(self.members.values())
        if self.is_lost:
            return
        if any(worker.node.is_frozen for worker in workers):
            self.plan_commit(left)
        elif self.is_unwanted:
            self.sim.counts["planned changes"] += 1
            for worker in workers:
                worker.leave()
        elif left:
            self.plan_commit(left - 1)
        else:
            self.has_completed = True
            for worker in workers:
                worker.node.complete(worker)

    def lose(self, worker: SimWorker) -> None:
        """A member has gone: the others learn that from their connections."""
        if self.has_completed or (self.is_lost and self.size > MANY):
            return
        self.is_lost = True
        for other in self.members.values():
            if other is not worker and other.is_alive and other.world is self:
                delay_ns = self.sim.latency_ns()
                other.node.later(delay_ns, lambda other=other: other.leave() if other.world is self else None)  # type: ignore[misc]


class ContinuingNode(AgentNode):
    """An agent with the shell's part of its work, in simulated time."""

    def __init__(self, sim: ContinuingSimulation, host: int, start: int) -> None:
        super().__init__(sim, host, start)
        self.jobs = sim
        self.node = replace(self.node, slots=SLOTS)
        self.agent = Agent(sim.budget, 10**18)
        self.group = WorkerGroup([])
        self.by_rank: dict[int, SimWorker] = {}
        self.reserve = Reserve()
        self.reserved: dict[int, SimWorker] = {}
        self.keys = 0
        self.cause: int | None = None
        self.counted = 0
        self.timer = 0
        self.wish = False
        self.is_joining = False
        self.is_outside = False  # workers run, but are in no world
        self.ends_all = False  # workers may be signalled
        self.leaves = False  # those that are still in the world of the last round may be signalled

    # What the agent asks for

    def told(self, event: RendezvousEvent) -> None:
        is_unsure = isinstance(event, Ejected) and event.is_unsure
        self.leaves = self.leaves or is_unsure
        self.ends_all = self.ends_all or isinstance(event, Ejected | JobClosed | RendezvousBroken)
        self.ends_all = self.ends_all and not (is_unsure and self.works_in_place())
        if isinstance(event, RoundEnded) and self.interrupted and self.round is None:
            self.tell_agent(event)  # it was interrupted between two rounds, and exits: it is in neither
        else:
            super().told(event)

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case JoinRound(is_outside):
                    self.is_joining, self.is_outside = True, is_outside
                    self.describe()
                    SimNode.start(self)
                    self.fill_reserve(SLOTS - self.node.slots)
                case UpdateNode():
                    self.update()
                case StartWorkers():
                    if self.workers and not effect.keeps:
                        self.jobs.counts["workers whose state may be old"] += 1
                        self.end_workers_of_old_state()
                    self.place_workers(effect.round, effect.again)
                case EndJob() | LeaveJob() | RequestChange() | AgentEnd():
                    self.tell_others(effect)
                case StopWorkers(reason, at_once, keeps):
                    require(self.workers, self.name, "has no workers to stop")
                    self.is_joining = False
                    self.step_group(StopGroup(reason, at_once, keeps))
                case EndContinuing(reason):
                    self.ends_all = True
                    self.step_group(NoRoundFollows(reason))
                case NotifyWorkers(number, _, is_lost):
                    self.tell("lost" if is_lost else "wanted", number)
                case _:
                    super().act([effect])

    def tell_others(self, effect: EndJob | LeaveJob | RequestChange | AgentEnd) -> None:
        match effect:
            case RequestChange(reason):
                self.perform(self.participant.request_change(reason))
            case EndJob():
                self.ends_all = True
                super().act([effect])
            case LeaveJob(reason):
                self.perform(self.participant.leave(reason, 40 * S if self.workers else 0))
            case AgentEnd():
                for worker in self.reserved.values():
                    worker.die()
                self.exited(effect)

    def describe(self) -> None:
        continuing = len(self.group.survivors) if self.workers else 0
        left = [each for each in self.by_rank.values() if each.is_alive and not each.continues]
        require(not left and self.workers == (continuing > 0), self.name, "joins while it has other workers")
        at_once = min(continuing + len(self.reserve.ready), SLOTS)
        slots = at_once if continuing and at_once >= self.jobs.least else SLOTS
        self.node = replace(self.node, slots=slots, has_workers=self.workers and not self.is_outside)

    def update(self) -> None:
        self.describe()
        self.perform(self.participant.update_node(self.node))

    def place_workers(self, round: Round, again: bool) -> None:
        self.jobs.checks.began(self, round)
        self.jobs.check_left_nodes(self, round)
        survivors = [self.by_rank[rank] for rank in self.group.survivors] if self.workers else []
        require(bool(survivors) == self.workers, self.name, "has workers twice")
        self.jobs.check_state(self, survivors, round)
        self.round, self.workers, self.worked_in = round, True, round.number
        was_outside = self.is_outside
        self.is_joining = self.wish = self.ends_all = self.leaves = self.is_outside = False
        first = sum(node.slots for node in round.nodes[: round.group_rank])
        size = sum(node.slots for node in round.nodes)
        ranks = list(range(first, first + round.nodes[round.group_rank].slots))
        policy = Policy(starts_again=again)
        self.group, self.by_rank, self.cause, self.counted = WorkerGroup(ranks, policy), {}, None, 0
        self.jobs.counts["workers that go on in place"] += len(survivors)
        self.jobs.counts["workers that outlive a lease"] += len(survivors) * was_outside
        placed = list(survivors)
        while len(placed) < len(ranks) and (key := self.reserve.take_ready()) is not None:
            placed.append(self.reserved.pop(key))
            self.jobs.counts["workers from the reserve"] += 1
        while len(placed) < len(ranks):
            placed.append(self.new_worker())
        for rank, worker in zip(ranks, placed):
            self.by_rank[rank] = worker
        for rank, worker in zip(ranks, placed):
            worker.told, worker.rank, worker.size = round.number, rank, size
            is_new = worker not in survivors
            self.step_group(Started(rank, worker.key, None if is_new else 0, worker.continues))
            delay_ns = self.jobs.rng.randrange(S) if is_new else self.jobs.latency_ns()
            self.later(delay_ns, lambda worker=worker: self.begin_work(worker))  # type: ignore[misc]
        if again:
            self.fill_reserve(SLOTS - len(ranks))
        self.note_ready()

    def new_worker(self) -> SimWorker:
        self.keys += 1
        return SimWorker(self, self.keys)

    def begin_work(self, worker: SimWorker) -> None:
        if not worker.is_alive:
            return
        if not worker.continues:
            if self.jobs.now_ns < BAD_TIMES_NS and self.jobs.rng.random() < 0.05:
                self.exit_worker(worker, 1)
                return
            worker.continues = True
            self.group_event(worker, WorkerContinues)
        worker.hear("placed", worker.told)

    def tell(self, what: str, number: int) -> None:
        for rank in self.group.survivors:
            worker = self.by_rank[rank]
            self.later(self.jobs.latency_ns(), lambda worker=worker: worker.hear(what, number))  # type: ignore[misc]

    # Workers

    def group_event(self, worker: SimWorker, make: Callable[[int], GroupEvent]) -> None:
        rank = next((rank for rank, each in self.by_rank.items() if each is worker), None)
        if rank is not None:
            self.step_group(make(rank))

    def step_group(self, event: GroupEvent) -> None:
        effects = self.group.step(self.now_ns(), event)
        if len(self.group.survivors) != self.counted:
            self.counted = len(self.group.survivors)
            self.tell_agent(WorkersContinue(self.counted))
        if self.group.cause is not None and self.cause is None:
            self.cause = self.group.cause
            self.tell_agent(Failing(self.failure(self.cause)))
        for effect in effects:
            match effect:
                case SignalWorkers(ranks, signum, _):
                    for rank in ranks:
                        self.signal_worker(self.by_rank[rank], signum)
                case SetGroupTimer(at_ns):
                    self.timer += 1
                    timer = self.timer
                    self.later(
                        int((at_ns - self.now_ns()) / self.rate) + 1,
                        lambda timer=timer: self.step_group(GroupTimer()) if timer == self.timer else None,  # type: ignore[misc]
                    )
                case GroupSettled():
                    self.tell_agent(WorkersSettled())
                case GroupEnd(code, reason, failed, is_late):
                    self.workers = False
                    if is_late:  # the agent keeps the failure for its own end
                        code, failed = 0, None
                    if code == 0 and self.round:
                        succeeded = self.jobs.checks.succeeded.setdefault(self.round.number, set())
                        succeeded.add(self.node.id)
                    failure = None if failed is None else self.failure(failed)
                    self.tell_agent(WorkersEnded(code, reason, failure))

    def failure(self, rank: int) -> Failure:
        worker = self.group.workers[rank]
        return Failure(
            rank,
            0,
            self.node.host,
            worker.pid,
            worker.exit_code or 1,
            f"{rank} failed",
            "",
            worker.blames_peer,
        )

    def works_in_place(self) -> bool:
        """Whether an agent whose lease has run out may keep workers."""
        return self.agent.state is WorkerState.HEALTHY and not self.is_joining and bool(self.group.survivors)

    def end_workers_of_old_state(self) -> None:
        for worker in self.by_rank.values():
            worker.die()
        self.workers = False

    def signal_worker(self, worker: SimWorker, signum: int) -> None:
        is_late = self.leaves and worker.left < self.worked_in
        allowed = is_late or self.ends_all or not worker.continues or self.interrupted or not worker.is_alive
        require(allowed or self.is_spent(), self.name, "ends a worker that continues")
        delay_ns = self.jobs.rng.randrange(10 * MS, S // 10 if signum == SIGKILL else 2 * S)
        self.later(delay_ns, lambda: self.exit_worker(worker, -signum))

    def is_spent(self) -> bool:
        return self.round is not None and self.round.restarts >= self.jobs.budget.restarts

    def exit_worker(self, worker: SimWorker, code: int, blames_peer: bool = False) -> None:
        if worker.is_alive:
            worker.die()
            self.group_event(worker, lambda rank: Exited(rank, code, blames_peer))

    def complete(self, worker: SimWorker) -> None:
        """All ranks have finished: the worker says so, and ends."""
        self.later(self.jobs.latency_ns(), lambda: self.group_event(worker, WorkerCompleted))
        self.later(self.jobs.rng.randrange(MS, S), lambda: self.exit_worker(worker, 0))

    def note_joined(self, worker: SimWorker) -> None:
        self.group_event(worker, WorkerJoined)

    def note_left(self) -> None:
        self.later(self.jobs.latency_ns(), self.ask_for_change)

    def ask_for_change(self) -> None:
        if not self.has_left() or self.round is None:
            return
        if self.wish:
            self.tell_agent(WorldLeft(self.round.number, "more workers"))
        else:
            self.later(15 * S, self.ask_after_silence)

    def ask_after_silence(self) -> None:
        if self.has_left() and self.round is not None:
            self.tell_agent(WorldLeft(self.round.number, "all have left"))

    def has_left(self) -> bool:
        if self.round is None or not self.workers or self.is_joining:
            return False
        running = [worker for worker in self.by_rank.values() if worker.is_alive]
        return bool(running) and all(worker.left >= self.round.number for worker in running)

    def fail(self, blames_peer: bool = False) -> None:
        """Kill one of the workers; those that lose a peer continue."""
        running = [worker for worker in self.by_rank.values() if worker.is_alive]
        if running and self.workers and not blames_peer:
            self.jobs.counts["failures"] += 1
            self.exit_worker(self.jobs.rng.choice(running), self.jobs.rng.choice((1, -SIGKILL)))

    # The reserve

    def fill_reserve(self, lacking: int) -> None:
        self.follow(self.reserve.want(self.now_ns(), self.jobs.reserve + lacking))

    def follow(self, effects: list[ReserveEffect]) -> None:
        for effect in effects:
            match effect:
                case StartReserve():
                    worker = self.new_worker()
                    self.reserved[worker.key] = worker
                    self.reserve.note_started(worker.key)
                    self.later(self.jobs.rng.randrange(2 * S), lambda key=worker.key: self.be_ready(key))  # type: ignore[misc]
                case SetReserveTimer(at_ns):
                    self.later(
                        at_ns - self.now_ns() + MS, lambda: self.follow(self.reserve.wake_up(self.now_ns()))
                    )

    def be_ready(self, key: int) -> None:
        if self.has_exited or key not in self.reserved:
            return
        if self.jobs.now_ns < BAD_TIMES_NS and self.jobs.rng.random() < 0.1:
            self.end_spare(key)
            return
        self.reserve.note_ready(key)
        if self.jobs.loses_ready_spares and self.jobs.now_ns < BAD_TIMES_NS and self.jobs.rng.random() < 0.3:
            self.later(self.jobs.rng.randrange(20 * S), lambda: self.end_spare(key))
        self.note_ready()

    def end_spare(self, key: int) -> None:
        if self.has_exited or key not in self.reserved:
            return  # it has a place by now
        self.reserved.pop(key).die()
        self.reserve.note_ended(self.now_ns(), key)
        self.follow(self.reserve.wake_up(self.now_ns()))

    def note_ready(self) -> None:
        if not self.workers or self.wish or not self.reserve.ready or self.has_exited:
            return
        if self.is_joining:
            if self.group.survivors:
                self.update()
        elif self.round and self.round.nodes[self.round.group_rank].slots < SLOTS:
            self.wish = True
            self.tell("wanted", self.round.number)
            self.ask_for_change()

    # Fates

    def die(self, is_noticed: bool) -> None:
        for worker in [*self.by_rank.values(), *self.reserved.values()]:
            worker.die()
        super().die(is_noticed)

    def interrupt(self, signum: int) -> None:
        self.interrupted = self.is_leaving = True
        if self.workers:
            self.step_group(InterruptGroup(signum))
        self.tell_agent(InterruptAgent(signum, "interrupted"))

    def tell_agent(self, event: object) -> None:
        if not self.has_exited:
            super().tell_agent(event)  # type: ignore[arg-type]


class PatientChecks(Checks):
    """Those of the rendezvous, for jobs that may wait for workers of nodes that are there."""

    def gave_up(self, node: SimNode, nodes: Sequence[SimNode]) -> None:
        if not self.rules.min_slots:
            super().gave_up(node, nodes)


class ContinuingSimulation(AgentSimulation):
    node_type: type[AgentNode] = ContinuingNode
    module = "tests.sim.continuing"

    def __init__(self, seed: int, nodes: int) -> None:
        self.worlds: dict[int, World] = {}
        # Before the nodes are made: how many workers a node may go on with, and how many spares it has.
        self.least = 1 + seed % SLOTS
        self.reserve = seed % 2
        self.loses_ready_spares = seed % 10 == 7
        super().__init__(seed, nodes)
        self.budget = Budget(self.rng.choice((0, 10, 100)), self.budget.changes)
        self.checks = PatientChecks(self.rules, self.budget)
        for node in self.nodes:
            assert isinstance(node, ContinuingNode)
            node.agent = Agent(self.budget, 10**18)
        if self.rng.random() < 0.5:
            least = self.rules.min_nodes * self.rng.randint(self.least, SLOTS)
            self.rules = self.checks.rules = replace(self.rules, min_slots=least)
            for node in self.nodes:
                node.participant = Participant(self.rules)

    def world(self, number: int) -> World:
        return self.worlds.setdefault(number, World(self, number))

    def draw_fates(self, nodes: int) -> None:
        super().draw_fates(nodes)
        for _ in range(self.rng.choice((0, 1, 3, 8))):
            self.at(self.rng.randrange(BAD_TIMES_NS), self.kill_worker)

    def kill_worker(self) -> None:
        if node := self.victim():
            node.later(0, node.fail)
            if self.rng.random() < 0.2 and (other := self.victim()):  # two at once
                other.later(self.rng.randrange(10 * MS), other.fail)

    def check_state(self, node: ContinuingNode, survivors: Sequence[SimWorker], round: Round) -> None:
        """No worker goes on in place after others have worked without it: its state may be another one than theirs."""
        for worker in survivors:
            for number in range(worker.told + 1, round.number):
                world = self.worlds.get(number)
                has_worked = world is not None and world.has_formed
                require(
                    not has_worked,
                    node.name,
                    "goes on in round",
                    round.number,
                    "without having been in",
                    number,
                )

    def check_left_nodes(self, node: ContinuingNode, round: Round) -> None:
        """No node that is not in the round has workers in an earlier world, but for those that are frozen."""
        if len(self.checks.begun[round.number]) > 1 and len(self.nodes) > MANY:
            return
        ids = {each.id for each in round.nodes}
        total = sum(each.slots for each in round.nodes)
        require(total >= self.rules.min_slots, "round", round.number, "has", total, "workers")
        for other in self.nodes:
            assert isinstance(other, ContinuingNode)
            if (
                other.workers
                and other.is_alive
                and other.worked_in < round.number
                and other.node.id not in ids
                and any(each.is_alive and each.left < other.worked_in for each in other.by_rank.values())
            ):
                excused = other.is_frozen or other.thawed_ns + S > self.now_ns
                require(
                    excused, other.name, "still has workers of round", other.worked_in, "in", round.number
                )


if __name__ == "__main__":
    sys.exit(main(None, ContinuingSimulation))
