"""A simulated node: the real `Participant` with a shell in simulated time, and an agent with random behaviour."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.rendezvous_checks import INTERRUPTED
from tests.sim.rendezvous_store import Taker, Values, Waiter

from ronde.rendezvous.effects import (
    Changes,
    Compare,
    Compared,
    Effect,
    Event,
    FindChanges,
    Hold,
    NotifyAgent,
    Pop,
    Popped,
    Probe,
    Probed,
    Set,
    Stored,
    Tick,
    Watch,
)
from ronde.rendezvous.membership import (
    AllSucceeded,
    Ejected,
    Failure,
    JobClosed,
    Node,
    NodesLost,
    RendezvousBroken,
    RendezvousEvent,
    Round,
    RoundBegan,
    RoundEnded,
)
from ronde.rendezvous.participant import Participant
from ronde.rendezvous.state import decode_state

if TYPE_CHECKING:
    from tests.sim.rendezvous import Simulation

S = 10**9
MS = 10**6
NEVER_NS = 10**18
KNOCK_NS = S
GRACE_NS = S  # by which a leader's knowledge may be older
CLOSE_NS = 3 * S  # how long the shell goes on to finish its work, for example to end the job


class SimNode:
    """One start of an agent."""

    def __init__(self, sim: Simulation, host: int, start: int) -> None:
        self.sim = sim
        self.name = f"{host}.{start}"
        rng = sim.rng
        self.origin_ns = rng.randrange(10**18)
        self.rate = 1 + rng.uniform(-1e-4, 1e-4)
        self.node = Node(
            f"n{self.name}",
            f"host{host}",
            f"10.0.0.{host}",
            1,
            f"tcp:10.0.0.{host}:9",
            1024 + start,
            meeting=f"tcp:n{self.name}",
        )
        self.host = host
        self.place = sim.store  # where it meets the others
        self.participant = Participant(sim.rules)
        self.is_alive = True
        self.is_frozen = self.has_no_power = False
        self.thawed_ns = -(10**18)
        self.postponed: list[Callable[[], None]] = []
        self.operations: deque[Effect] = deque()
        self.is_busy = False
        self.known: Values = {}
        self.waiter: Waiter | None = None
        self.watches = 0  # how many have been asked for: only the answer to the last one counts
        self.queue: str | None = None
        self.taker: Taker | None = None
        self.is_leaving = False
        self.is_protected = False  # nothing happens to it
        self.has_ended_job = False
        self.is_heard = False  # it has ended the job, and nothing keeps that from the store
        self.is_waiting = False  # for a round
        self.to_hold: dict[str, bytes] = {}  # before anything else is asked
        self.store = 0  # counts the stores that were lost
        self.tick_ns = -1  # of simulated time, when one is due
        self.round: Round | None = None  # that it works in
        self.succeeded: set[int] = set()
        self.last_number = -1
        self.work = 0  # grows with each activity, so that earlier plans are void
        self.outcome: RendezvousEvent | None = None
        self.led_to_the_end = False
        self.is_harmed = False  # something has happened to it, so that others may take it for dead
        self.well_ns = 0  # since when nothing of that goes on any more
        self.joined_ns = 0  # when it joined, or came back to life after that

    # Time

    def now_ns(self) -> int:
        return self.origin_ns + int(self.sim.now_ns * self.rate)

    def later(self, delay_ns: int, do: Callable[[], None]) -> None:
        """Do this later, if the node still lives; if it is frozen, when it thaws."""

        def now() -> None:
            if self.is_frozen:
                self.postponed.append(now)
            elif self.is_alive:
                do()

        self.sim.at(self.sim.now_ns + delay_ns, now)

    def schedule_tick(self) -> None:
        due_ns = int((self.participant.wake_ns - self.origin_ns) / self.rate) + 1
        due_ns = max(due_ns, self.sim.now_ns + 1)
        if self.tick_ns < 0 or due_ns < self.tick_ns:
            self.tick_ns = due_ns
            self.later(due_ns - self.sim.now_ns, lambda: self.tick(due_ns))

    def tick(self, due_ns: int) -> None:
        if due_ns == self.tick_ns:
            self.tick_ns = -1
            if self.now_ns() >= self.participant.wake_ns:
                self.step(Tick())
            else:
                self.schedule_tick()

    # The shell

    def step(self, event: Event) -> None:
        self.perform(self.participant.step(self.now_ns(), event))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case NotifyAgent(event):
                    self.told(event)
                case Watch(known):
                    self.known = dict(known)
                    self.watch()
                case Pop(queue):
                    self.queue = queue
                    self.pop()
                case Probe():
                    self.probe_agents(effect)
                case _:
                    self.operations.append(effect)
        self.next_operation()
        self.schedule_tick()

    def probe_agents(self, asked: Probe) -> None:
        shut = tuple(node for node in asked.addresses if self.sim.probe_result(self, node) == "shut")
        self.later(self.sim.rng.randrange(KNOCK_NS), lambda: self.step(Probed.of(asked, shut)))

    def next_operation(self) -> None:
        if self.operations and not self.is_busy:
            self.is_busy = True
            effect = self.operations[0]
            if isinstance(effect, Set) and self.sim.freezes_before(self, effect):
                store = self.store
                self.later(0, lambda: self.ask(effect) if store == self.store else None)
            else:
                self.ask(effect)

    def ask(self, effect: Effect) -> None:
        """Send an effect to the store; after a failure send it again, whether or not it was carried out."""
        sim, store = self.sim, self.store

        def arrive() -> None:
            if store != self.store:
                return
            if sim.hiccups():
                self.later(sim.latency_ns() + sim.rng.randrange(S), again)
                return
            if not self.is_alive and isinstance(effect, Hold):
                return  # a hold that arrives after its sender's death has no effect
            self.hold()
            result = self.place.execute(self.node.id, effect)
            if isinstance(effect, Hold):
                self.well_ns = sim.now_ns
            elif isinstance(effect, Compare) and result == effect.desired:
                self.has_written(effect.desired)
            if sim.hiccups():
                self.later(sim.latency_ns() + sim.rng.randrange(S), again)
            else:
                self.later(
                    sim.latency_ns(), lambda: self.answered(effect, result) if store == self.store else None
                )

        def again() -> None:
            if store == self.store:
                self.ask(effect)

        sim.at(sim.now_ns + sim.latency_ns(), arrive)

    def answered(self, effect: Effect, result: Values | bytes | None) -> None:
        self.operations.popleft()
        self.is_busy = False
        if isinstance(effect, FindChanges):
            assert isinstance(result, dict)
            self.step(Changes(effect.known, result))
        elif isinstance(effect, Set):
            self.step(Stored(effect.values))
        elif isinstance(effect, Compare):
            assert isinstance(result, bytes)
            if self.has_ended_job and result == effect.desired:
                self.sim.checks.wrote(self, decode_state(result))
            self.step(Compared(result))
        self.next_operation()

    def has_written(self, raw: bytes) -> None:
        self.sim.checks.decided(self, decode_state(raw))

    def watch(self) -> None:
        self.watches += 1
        number = self.watches
        if self.waiter:
            self.waiter.is_over = True

        def arrive() -> None:
            if number == self.watches and self.is_alive:
                self.waiter = self.place.watch(dict(self.known), answer)

        def answer(changed: Values) -> None:
            self.later(self.sim.latency_ns(), lambda: seen(changed))

        def seen(changed: Values) -> None:
            if number == self.watches:
                self.known |= changed
                self.watch()
                self.step(Changes({}, changed))

        self.sim.at(self.sim.now_ns + self.sim.latency_ns(), arrive)

    def watch_again(self, delay_ns: int) -> None:
        """Watch again, after the watching connection was lost."""
        number = self.watches
        if self.waiter and not self.waiter.is_over:
            self.waiter.is_over = True
            self.later(delay_ns, lambda: self.watch() if number == self.watches else None)

    def pop(self) -> None:
        if self.taker:
            self.taker.is_over = self.sim.rng.random() < 0.5  # it may still take something
        queue, sim, store = self.queue, self.sim, self.store
        if queue is None:
            return

        def arrive() -> None:
            if self.is_alive and queue == self.queue and store == self.store:
                self.taker = self.place.pop(queue, answer)

        def answer(values: tuple[bytes, ...]) -> None:
            if sim.hiccups(sim.crowd):  # they are lost, with the connection
                self.later(sim.latency_ns(), self.reconnect)
            else:
                self.later(sim.latency_ns(), lambda: popped(Popped(queue, values)))

        def popped(event: Event) -> None:
            if queue == self.queue and store == self.store:
                self.pop()
                self.step(event)

        sim.at(sim.now_ns + sim.latency_ns(), arrive)

    # Fates

    def die(self, is_noticed: bool) -> None:
        """End the node. `is_noticed`: its connection breaks; otherwise it is only silent."""
        self.is_alive = False
        self.has_no_power = not is_noticed
        self.is_harmed = True
        self.work += 1
        if self.waiter:
            self.waiter.is_over = True
        if self.taker:
            self.taker.is_over = True
        if is_noticed:
            self.sim.at(self.sim.now_ns + self.sim.latency_ns(), lambda: self.lose_connection(False))

    def harm(self) -> None:
        self.is_harmed, self.is_heard = True, False
        self.well_ns = NEVER_NS

    def lose_connection(self, comes_back: bool) -> None:
        self.harm()
        self.joined_ns = self.sim.now_ns
        held = self.place.lose(self.node.id)
        if comes_back:
            self.hold_again(held, self.sim.rng.randrange(2 * S))

    def hold_again(self, held: dict[str, bytes], delay_ns: int) -> None:
        """Reconnect, after the client has noticed the loss of its connection."""

        self.to_hold = held
        self.later(delay_ns, self.hold)

    def hold(self) -> None:
        if self.to_hold and self.is_alive:
            held, self.to_hold = self.to_hold, {}
            for key, value in held.items():
                self.place.held[self.node.id][key] = value
                self.place.put(key, value)
            self.well_ns = self.sim.now_ns

    def lose_store(self, within_ns: int = 3 * S) -> None:
        """Lose all operations under way; after a while there is another store, or the same one again."""
        self.harm()
        self.store += 1
        self.watches += 1
        self.queue, self.is_busy = None, True
        store = self.store
        self.later(
            self.sim.rng.randrange(within_ns), lambda: self.find_store() if store == self.store else None
        )

    def knows_all(self) -> bool:
        state = self.participant.state
        return (
            not self.is_leaving
            and state is not None
            and state.roster is not None
            and self.participant._replica.is_whole
        )

    def version(self) -> int:
        return self.participant.state.version if self.participant.state else -1

    def reconnect(self) -> None:
        """Break the connection."""
        self.lose_connection(comes_back=False)
        self.lose_store()

    def cut_off(self) -> None:
        """Keep the node from the store for up to a minute. Its workers run on."""
        self.lose_connection(comes_back=False)
        self.lose_store(60 * S)

    def find_store(self) -> None:
        self.operations.clear()
        self.is_busy = False
        self.joined_ns = self.well_ns = self.sim.now_ns
        if self.participant.has_joined:
            self.perform(self.participant.enter_store(self.now_ns()))
            self.watch_over()

    def watch_over(self) -> None:
        """A protected node survives until its state is in the store."""
        if self.participant.store_identity.is_unclear:
            self.later(S // 10, self.watch_over)
        else:
            self.is_protected = False

    def freeze(self, for_ns: int) -> None:
        if self.is_alive and not self.is_frozen:
            self.is_frozen = True
            self.harm()
            self.sim.at(self.sim.now_ns + for_ns, self.thaw)

    def thaw(self) -> None:
        self.is_frozen = False
        self.thawed_ns = self.joined_ns = self.well_ns = self.sim.now_ns
        postponed, self.postponed = self.postponed, []
        for do in postponed:
            self.sim.at(self.sim.now_ns, do)

    # The agent

    def start(self) -> None:
        self.is_waiting = True
        self.joined_ns = self.well_ns = self.sim.now_ns
        self.perform(self.participant.join(self.now_ns(), self.node, self.sim.budget))

    def plan(self, delay_ns: int, do: Callable[[], None]) -> None:
        """Let the agent do this later, unless another activity begins first."""
        self.work += 1
        work = self.work
        self.later(delay_ns, lambda: do() if work == self.work else None)

    def told(self, event: RendezvousEvent) -> None:
        self.sim.note(self.name, "is told", event)
        match event:
            case RoundBegan(round):
                self.sim.checks.began(self, round)
                self.recover()
                self.round = round
                self.plan(*self.sim.draw_work(self))
            case RoundEnded(number, cause):
                self.sim.checks.ended(self, number, cause)
                if isinstance(cause, NodesLost) and cause.nodes:
                    self.sim.counts["rounds ended by losses"] += 1
                self.join_again()
            case Ejected():
                self.sim.counts["ejected"] += 1
                self.sim.checks.harmed(self, event)
                self.join_again()
            case AllSucceeded(number):
                self.sim.checks.all_succeeded(self, number)
                self.finish(event)
            case RendezvousBroken():
                self.sim.checks.gave_up(self, self.sim.nodes)
                self.finish(event)
            case JobClosed():
                self.finish(event)

    def recover(self) -> None:
        """Faults before this round was decided no longer justify taking this node for lost."""
        state = self.participant.state
        assert state
        decided_ns = self.sim.checks.decided_ns[self.place, state.roster]
        if not self.is_leaving and not self.to_hold and decided_ns - self.well_ns > GRACE_NS:
            self.is_harmed = False

    def join_again(self) -> None:
        self.round = None
        slow = self.sim.rng.random() < 0.02 / self.sim.crowd
        self.is_harmed = self.is_harmed or slow
        self.plan(self.sim.rng.randrange((60 if slow else 2) * S), self.start)

    def succeed(self) -> None:
        assert self.round
        self.succeeded.add(self.round.number)
        self.sim.note(self.name, "succeeds")
        self.perform(self.participant.succeed(self.now_ns()))

    def fail(self, blames_peer: bool = False) -> None:
        if self.round:
            self.sim.note(self.name, "fails")
            self.sim.counts["failures"] += 1
            failure = Failure(
                self.round.group_rank, 0, self.node.host, 1, 1, f"by {self.name}", "", blames_peer
            )
            self.perform(self.participant.fail(failure))

    def finish(self, event: RendezvousEvent) -> None:
        self.round = None
        self.outcome = event
        self.work += 1
        self.later(self.sim.rng.randrange(S), self.close)

    def end_job(self) -> None:
        """End the job as by Ctrl-C, after which an agent ends as soon as it can."""
        self.sim.checks.ends_job(self)
        self.has_ended_job = self.participant.has_joined
        # Otherwise it may have to read the state first.
        is_known = self.sim.now_ns - self.sim.restarted_ns > 10 * S
        self.is_heard = self.has_ended_job and is_known and not self.is_harmed and not self.sim.hiccup
        self.is_harmed = self.is_leaving = True
        self.perform(self.participant.end_job(INTERRUPTED))

    def close(self, patience_ns: int = CLOSE_NS) -> None:
        if not self.is_alive:
            return
        if (self.participant.is_ending or self.operations) and patience_ns > 0:
            self.later(S // 10, lambda: self.close(patience_ns - S // 10))
            return
        self.sim.note(self.name, "closes")
        self.sim.checks.goes(self)
        self.led_to_the_end = self.participant.is_leader
        self.die(is_noticed=True)
