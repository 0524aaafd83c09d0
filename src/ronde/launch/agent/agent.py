"""The agent of one node: performs what `ronde.launch.agent.decisions` decides, in one thread with one loop.

The loop watches this process's signals, the rendezvous, and the descriptors of each run of the workers. The workers of
a round meet in a store that the agent of group rank 0 serves. Every agent opens a new store before it joins and closes
it after the round: the keys of a round end with the round, and workers of an earlier round, which may still run on a
disconnected node, cannot disturb their successors.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ronde.job_key import JobKey
from ronde.launch.agent.absence_watch import AbsenceWatch
from ronde.launch.agent.completion_watch import CompletionWatch
from ronde.launch.agent.decisions import (
    Agent,
    AgentEnd,
    AgentNotice,
    AgentTimer,
    Effect,
    EndContinuing,
    EndJob,
    Event,
    Failing,
    InterruptAgent,
    JoinRound,
    LeaveJob,
    NotifyWorkers,
    ReportFailure,
    ReportSuccess,
    RequestChange,
    SetAgentTimer,
    StartWorkers,
    StopWorkers,
    UpdateNode,
    WorkersContinue,
    WorkersEnded,
    WorkersSettled,
    WorldLeft,
)
from ronde.launch.agent.failure_report import describe_recovery, report, report_elsewhere, tracebacks
from ronde.launch.agent.living_worker import LivingWorker
from ronde.launch.agent.node_offer import (
    RoundStore,
    describe_node,
    given_master,
    has_insecure_key,
    job_key,
    own_address,
    require_free_master_port,
)
from ronde.launch.agent.reserve_shell import ReserveShell
from ronde.launch.agent.starter import Starter
from ronde.launch.agent.worker_group import HASTY, Absent, GroupEnd, Policy, describe_interrupt
from ronde.launch.agent.worker_group_shell import GroupListener, WorkerGroupShell
from ronde.launch.config import LaunchConfig
from ronde.launch.launch_plan import JOB_KEY, LaunchPlan, WorkerPlan, assign_places, plan_workers
from ronde.launch.loop import Loop, Order
from ronde.launch.screen import Screen, claim_standard_streams
from ronde.net.host import host_name
from ronde.net.job_keys import INSECURE, key_in_memory
from ronde.process.disk import Disk
from ronde.process.exceptions import ERROR_FILE, hand_up
from ronde.process.membership_channel import ChangeWanted, RoundLost
from ronde.process.resources import shortage, usable_cores
from ronde.process.signals import SignalInbox
from ronde.rendezvous.membership import Budget, Failure, Node, RendezvousBroken, Round
from ronde.rendezvous.rendezvous import Rendezvous, create

__all__ = ["RunResult", "plan_here", "run_agent"]

SIGPIPE = 13
LATE_LOGS_NS = 2 * 10**9
LATER_TRAINING = "the workers are past the first training of the program, so no new process can take part"


@dataclass(frozen=True)
class RunResult:
    """How the job ended, as this node knows it.

    `exit_code`: 0 if all workers of all nodes succeeded. `failures`: the failures by rank: the first one of the job, on
    any node, and those of this node's workers in the last round that the launcher did not end. `returncodes`: of this
    node's workers in the last round, by rank; minus the signal for a killed worker. `restarts`, `changes`: how many
    rounds ended by a failed worker, and by a lost or new node. `gave_way`: the job may go on without this node.
    `is_closed`: the job has been closed for all nodes, for another reason than a failure. `is_surplus`: the job has
    completed without this node, because it was full.
    """

    exit_code: int
    reason: str
    failures: Mapping[int, Failure] = field(default_factory=dict)
    returncodes: Mapping[int, int] = field(default_factory=dict)
    restarts: int = 0
    changes: int = 0
    gave_way: bool = False
    is_closed: bool = False
    is_surplus: bool = False


def run_agent(
    config: LaunchConfig,
    environment: Mapping[str, str],
    *,
    keep: Sequence[int] = (),
    report: bool = True,
    reads: bool = False,
    meaning: Callable[[int], int] = int,
) -> RunResult:
    """Run this node's part of the job, and show the workers' output, until the job ends or a signal ends this agent.

    `environment`: the whole environment of the launcher. `keep`: descriptors that all workers inherit. `reads`: local
    rank 0 inherits standard input. `report`: print a report of a failure; the result has it in any case. `meaning`:
    returns the signal for which a received signal stands; only the main thread receives signals. Raises UsageError if
    the configuration is invalid or the rendezvous cannot be reached.
    """
    claim_standard_streams()
    with ExitStack() as stack:
        shell = AgentShell(config, environment, stack, keep, reads, meaning, report)
        return shell.run()


def plan_here(config: LaunchConfig, environment: Mapping[str, str]) -> LaunchPlan:
    """Return the plan for this machine as the only node, with a made-up store and key."""
    address = own_address(config)
    node = describe_node(config, environment, address, "unix:@ronde", "")
    some_fd = 3 if config.worker.key_by_descriptor else None
    return _plan(config, Round(0, (node,), 0), environment, JobKey.generate(), some_fd, _run_id(config))


def _plan(
    config: LaunchConfig,
    round: Round,
    environment: Mapping[str, str],
    key: JobKey,
    key_fd: int | None,
    run_id: str,
) -> LaunchPlan:
    return plan_workers(
        config.worker,
        round,
        environment=environment,
        cores=usable_cores(),
        job_key=key,
        key_fd=key_fd,
        run_id=run_id,
        master=given_master(config),
        columns=_terminal_columns(),
        host=_prefixed_host(config),
    )


def _terminal_columns() -> int | None:
    """Return the width of the terminal on stderr; None if there is none or its width is unknown."""
    return (os.get_terminal_size(2).columns or None) if os.isatty(2) else None


def _prefixed_host(config: LaunchConfig) -> str:
    """Return the host in the prefix of output lines; empty in a job of one node."""
    return host_name() if config.rendezvous.max_nodes > 1 else ""


def _run_id(config: LaunchConfig) -> str:
    return config.rendezvous.run_id or os.urandom(8).hex()


class AgentShell(GroupListener):
    """The shell around one `Agent`, which listens to the runs of its workers; what it opens belongs to the stack."""

    def __init__(
        self,
        config: LaunchConfig,
        environment: Mapping[str, str],
        stack: ExitStack,
        keep: Sequence[int],
        reads: bool,
        meaning: Callable[[int], int],
        reports: bool,
    ) -> None:
        self._config = config
        self._reports = reports
        self._meaning = meaning
        self._environment = environment
        self._id = os.urandom(8).hex()
        self._run_id = _run_id(config)
        self._key = job_key(config, environment)
        self._key_fd: int | None = None
        if config.worker.key_by_descriptor:
            self._key_fd = key_in_memory(self._key)
            stack.callback(os.close, self._key_fd)
            keep = (*keep, self._key_fd)
            environment = {name: value for name, value in environment.items() if name != JOB_KEY}
        self._address = own_address(config)
        require_free_master_port(config)
        spec = config.worker
        meeting = replace(config.rendezvous, longest_end_ns=spec.longest_end_ns())
        self._budget = Budget(spec.max_restarts, spec.max_changes)
        self._agent = Agent(
            self._budget,
            meeting.exit_barrier_ns,
            meeting.gives_way,
            meeting.supply,
            meeting.min_nodes,
            shortage_ns=2 * meeting.missing_heartbeats * meeting.heartbeat_ns,
        )
        self._events: deque[Event] = deque()
        self._round: Round | None = None
        self._group: WorkerGroupShell | None = None  # the present or last workers
        self._plan_now: LaunchPlan | None = None  # that of the present or last workers
        self._alive = False  # whether workers run
        self._is_joining = self._is_outside = False  # the next round; workers run, but none is in a world
        self._leaving = 0  # the signal after which this node leaves when its workers have left their world
        self._wish = ""  # why this node wants another round than the present one
        self._has_continued = False  # a worker has called `ronde.elastic.run`
        self._has_refused_spares = False
        self._deaths: set[int] = set()  # pids
        self._group_end: GroupEnd | None = None  # how the last workers ended
        self._agent_end: AgentEnd | None = None
        self._leaves_now = False  # a signal came after the end: the agent waits for nothing more
        self._loop = Loop()
        stack.callback(self._loop.close)
        self._store = self._open_store()
        self._earlier_stores: list[tuple[int, RoundStore]] = []  # with the numbers of their rounds
        stack.callback(self._close_stores)
        self._inbox = stack.enter_context(SignalInbox(config.worker.signals))
        self._screen = Screen(self._loop, lambda: self._interrupt(SIGPIPE))
        stack.callback(self._screen.close)
        self._rendezvous: Rendezvous = create(meeting, self._key)
        stack.callback(self._rendezvous.close)
        self._starter = Starter(
            config, environment, self._run_id, self._screen.tell, keep=keep, reads=reads, reports=reports
        )
        stack.callback(self._starter.close)
        self._reserve = ReserveShell(self._loop, self._screen, self._starter, self._inbox, self._want_change)
        stack.callback(self._reserve.close)
        self._absence = AbsenceWatch(self._loop, self._key, self._note_missed)
        stack.callback(self._absence.close)
        self._completion = CompletionWatch(self._loop, self._key, self._note_completed_elsewhere)
        stack.callback(self._completion.close)

    def run(self) -> RunResult:
        """Run the job to its end, report, and return the result."""
        self._loop.watch(self._inbox.fileno(), Order.SIGNALS, self._read_signals)
        self._loop.watch(self._rendezvous.fileno(), Order.NODES, self._read_rendezvous)
        self._loop.watch(self._starter.announcements.fileno(), Order.RAISED, self._read_announcements)
        self._loop.watch(self._starter.logs.fileno(), Order.SINKS, self._starter.logs.settle)
        if has_insecure_key(self._config, self._environment):
            self._screen.tell(INSECURE)
        try:
            self._perform_effects(self._agent.begin())
            while self._agent_end is None:
                self._turn()
            self._await_logs()
            if self._reports:
                self._hand_up(self._agent_end)
                for line in self._report(self._agent_end):
                    self._screen.say(line)
            while (self._screen.waiting or self._starter.logs.waiting) and not self._leaves_now:
                self._turn()
            if self._agent_end.exit_code == 0:
                self._starter.end_successfully()
            return self._result(self._agent_end)
        finally:
            self._reserve.close()
            if self._group:
                self._group.close()

    def _await_logs(self) -> None:
        """Wait for the logs, whose errors precede the report; a hanging disk delays it by `LATE_LOGS_NS` at most."""
        logs, is_late = self._starter.logs, False

        def say() -> None:
            nonlocal is_late
            is_late = True
            self._screen.tell(
                "waiting for the disk of --log-dir to take the rest of the logs; Ctrl-C gives up"
            )

        if logs.waiting:
            self._loop.set_timer(logs, time.monotonic_ns() + LATE_LOGS_NS, say)
        while logs.waiting and not (is_late or self._leaves_now):
            self._turn()
        self._loop.set_timer(logs, None, say)

    def _turn(self) -> None:
        self._screen.balance()
        if self._alive and self._group:
            self._group.balance()
        self._reserve.balance()
        self._loop.turn()

    # What happens

    def _read_signals(self) -> None:
        for signum in self._inbox.read():
            self._interrupt(self._meaning(signum))

    def _interrupt(self, signum: int) -> None:
        self._leaves_now = self._agent_end is not None
        if signum not in HASTY and not self._leaving and self._may_leave():
            self._begin_leaving(signum)
        else:
            self._end_by_signal(signum)

    def _may_leave(self) -> bool:
        """Return whether all workers continue, and others go on without this node."""
        group, round = self._group, self._round
        if not (self._alive and group and round) or self._is_joining:
            return False
        return len(round.nodes) > 1 and 0 < group.survivors == round.nodes[round.group_rank].slots

    def _begin_leaving(self, signum: int) -> None:
        """Let the workers of all nodes come to their next commit before this node leaves."""
        assert self._group
        assert self._round
        self._leaving = signum
        reason = f"{host_name()} leaves: {describe_interrupt(signum)}"
        self._screen.tell(f"{reason}; its workers go on until their next commit")
        self._group.notify_workers(ChangeWanted(self._round.number, reason))
        at_ns = time.monotonic_ns() + self._config.worker.farewell_ns
        self._loop.set_timer(self._leave, at_ns, self._leave)

    def _leave(self) -> None:
        self._loop.set_timer(self._leave, None, self._leave)
        self._end_by_signal(self._leaving)

    def _end_by_signal(self, signum: int) -> None:
        if self._alive and self._group:
            self._group.interrupt_workers(signum)
        self._step_agent(InterruptAgent(signum, describe_interrupt(signum)))

    def _read_rendezvous(self) -> None:
        for event in self._rendezvous.events():
            self._step_agent(event)

    def _read_announcements(self) -> None:
        for announcement in self._starter.announcements.read():
            if self._alive and self._group:
                self._group.note_announcement(announcement)

    def note_awaited_exit(self, is_awaited: bool) -> None:
        """Pass this on to the other nodes."""
        self._rendezvous.note_awaited_exit(is_awaited)

    def note_continuing(self, count: int) -> None:
        """Pass this on to the agent."""
        self._has_continued = self._has_continued or count > 0
        self._step_agent(WorkersContinue(count))

    def note_settled(self) -> None:
        """Go on as the agent decides."""
        self._step_agent(WorkersSettled())

    def note_world_left(self) -> None:
        """Close stores that are not needed any more, and ask for the next round if all workers wait for it."""
        group, round = self._group, self._round
        assert group
        assert round
        self._close_stores(group.oldest_world - 1)  # workers of other nodes may leave later
        if not group.has_left_world:
            return
        if self._leaving:
            self._leave()
        elif self._wish or len(round.nodes) == 1:
            self._send_world_left()
        else:  # another node has lost a worker, which its agent reports
            at_ns = time.monotonic_ns() + self._config.rendezvous.silence_ns
            self._loop.set_timer(self._send_world_left, at_ns, self._send_world_left)
            if training := group.awaited_training:  # or all ranks have finished it
                self._completion.await_completion(round.nodes[0].store, training)

    def note_completed(self, training: int) -> None:
        """Let the nodes know whose workers have lost the others in the last barrier of the training."""
        if self._round and len(self._round.nodes) > 1:
            self._completion.tell(self._round.nodes[0].store, training)

    def _note_completed_elsewhere(self, training: int) -> None:
        if self._alive and self._group:
            self._group.notify_of_completion(training)

    def _send_world_left(self) -> None:
        group, round = self._group, self._round
        if self._alive and group and round and group.has_left_world:
            reason = self._wish or f"all workers have left the world of round {round.number}"
            self._step_agent(WorldLeft(round.number, reason))

    def _want_change(self) -> None:
        """Let the workers come to another round at their next commit, if the node can give more of them."""
        round = self._round
        if not (self._alive and self._group and round) or self._wish:
            return
        if self._is_joining:
            if len(round.nodes) > 1 and self._group.survivors:  # else the workers end after a signal
                self._rendezvous.update_node(self._describe_node())  # with more workers than before
            return
        ready = self._reserve.ready if self._group.takes_newcomers else 0
        if ready and round.nodes[round.group_rank].slots < self._config.worker.slots:
            self._wish = f"{ready} more worker{' is' if ready == 1 else 's are'} ready"
            self._group.notify_workers(ChangeWanted(round.number, self._wish))
            self.note_world_left()

    def note_absent(self, absent: Absent | None) -> None:
        """Watch whether ranks of other nodes wait for this worker."""
        if self._round and len(nodes := self._round.nodes) > 1:
            self._absence.watch_round(nodes[0].store, sum(node.slots for node in nodes), absent)

    def _note_missed(self, rank: int, by: int) -> None:
        if self._group:
            self._group.note_missed(rank, by)

    def _send_timer(self) -> None:
        self._step_agent(AgentTimer(self._rendezvous.serves_others()))

    def note_cause(self, rank: int) -> None:
        """Report the failure at once: other workers may still run."""
        self._step_agent(Failing(self._describe_failure(rank)))

    def note_end(self, end: GroupEnd) -> None:
        """Close the workers, and go on as the agent decides."""
        assert self._group
        failed = end.failed_rank
        failure = None if failed is None else self._describe_failure(failed)
        self._alive, self._group_end = False, end
        self._note_deaths(self._group)
        self._group.close()
        if end.is_late:  # for the other nodes the workers have succeeded
            self._step_agent(WorkersEnded(0, end.reason))
        else:
            self._step_agent(WorkersEnded(end.exit_code, end.reason, failure))

    def _with_late_failure(self, end: AgentEnd) -> AgentEnd:
        """Return the end with the failure of a worker, if one has failed after the training."""
        late = self._group_end
        if end.exit_code or late is None or not late.is_late or late.failed_rank is None:
            return end
        return replace(
            end,
            exit_code=late.exit_code,
            reason=late.reason,
            failure=self._describe_failure(late.failed_rank),
        )

    def _describe_failure(self, rank: int) -> Failure:
        group = self._group
        assert group
        worker = group.workers[rank]
        words = b"\n".join(group.last_output(rank)).decode(errors="surrogateescape")
        return Failure(
            rank=rank,
            local_rank=group.local_rank(rank),
            host=host_name(),
            pid=worker.pid,
            exit_code=worker.exit_code,
            message=worker.describe(),
            details=words,
            blames_peer=worker.blames_peer,
        )

    # What is to be done

    def _step_agent(self, event: Event) -> None:
        """Step the machine by one event after the other, including those that arise while it performs effects."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            self._perform_effects(self._agent.step(time.monotonic_ns(), self._events[0]))
            self._events.popleft()

    def _perform_effects(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case JoinRound(is_outside):
                    self._absence.stop()
                    self._is_outside = is_outside
                    self._join_round()
                case UpdateNode():
                    self._rendezvous.update_node(self._describe_node())
                case StartWorkers():
                    self._start_workers(effect)
                case StopWorkers(reason, at_once, keeps):
                    self._absence.stop()
                    self._is_joining = False
                    if self._alive and self._group:
                        self._group.stop_workers(reason, at_once, keeps)
                case EndContinuing() | NotifyWorkers():
                    self._notify_workers(effect)
                case AgentNotice(text):
                    self._screen.tell(text)
                case SetAgentTimer(at_ns):
                    self._loop.set_timer(self, at_ns, self._send_timer)
                case AgentEnd():
                    self._agent_end = self._with_late_failure(effect)
                case _:
                    self._tell_nodes(effect)

    def _notify_workers(self, effect: EndContinuing | NotifyWorkers) -> None:
        if not (self._alive and self._group):
            return
        match effect:
            case EndContinuing(reason):
                self._group.end_continuing(reason)
            case NotifyWorkers(number, reason, True):
                self._group.notify_workers(RoundLost(number, reason))
            case NotifyWorkers(number, reason, False):
                self._group.notify_workers(ChangeWanted(number, reason))

    def _tell_nodes(self, effect: Effect) -> None:
        match effect:
            case ReportFailure(failure):
                self._rendezvous.fail(failure)
            case ReportSuccess():
                self._rendezvous.succeed()
            case RequestChange(reason):
                self._rendezvous.request_change(reason)
            case EndJob(reason):
                self._rendezvous.end_job(reason)
            case LeaveJob(reason):
                ends_within_ns = self._config.worker.longest_end_ns() if self._alive else 0
                self._rendezvous.leave(reason, ends_within_ns)

    def _join_round(self) -> None:
        if self._round:  # the store belongs to the last round
            self._earlier_stores.append((self._round.number, self._store))
            if not self._alive:
                self._close_stores(self._round.number + 1)
            self._store = self._open_store()
        self._is_joining = True
        self._rendezvous.join(self._describe_node(), self._budget)
        if self._leaving:
            self._leave()
        elif self._alive and self._plan_now and self._config.rendezvous.max_nodes > 1:
            # The round may have to wait for more workers.
            self._fill_reserve(self._plan_now, self._config.worker.slots - self._offered_slots())

    def _describe_node(self) -> Node:
        """Return this node with the workers that it can give the next round."""
        node = describe_node(self._config, self._environment, self._address, self._store.address, self._id)
        has_workers = self._alive and not self._is_outside
        return replace(node, slots=self._offered_slots(), has_workers=has_workers)

    def _fill_reserve(self, plan: LaunchPlan, lacking: int) -> None:
        spec = self._config.worker
        round, group = self._round, self._group
        if round and round.restarts < self._budget.restarts and not spec.virtual_local_rank:
            wanted = spec.spares + lacking if group is None or group.takes_newcomers else 0
            self._reserve.want(wanted, plan, round.number)

    def _offered_slots(self) -> int:
        """Return the number of workers for the next round: without the lost ones, if enough continue."""
        spec = self._config.worker
        group = self._group
        continuing = group.survivors if self._alive and group else 0
        if not (group and continuing):
            return spec.slots
        ready = self._reserve.ready if group.takes_newcomers else 0
        at_once = min(continuing + ready, spec.slots)
        return at_once if at_once >= (spec.min_slots or spec.slots) else spec.slots

    def _note_deaths(self, group: WorkerGroupShell) -> None:
        """Let the reserve know of the workers that have failed."""
        for rank, worker in group.workers.items():
            if worker.failed_by_itself and worker.pid not in self._deaths:
                self._deaths.add(worker.pid)
                self._reserve.note_lost(group.lifetime_ns(rank), group.took_part(rank))

    def _start_workers(self, start: StartWorkers) -> None:
        round, again = start.round, start.again
        survivors: list[LivingWorker] = []
        if self._group:
            if self._alive:
                survivors = self._release_survivors(self._group, start)
                self._note_deaths(self._group)
            for line in tracebacks(
                self._group.left_tracebacks()
            ):  # those of the last round are in the report
                self._screen.say(line)
            if self._alive:
                self._group.close()
        spec = self._config.worker
        self._wish, self._is_joining = "", False
        self._completion.stop_waiting()
        self._loop.set_timer(self._send_world_left, None, self._send_world_left)
        self._round, self._alive, self._group_end = round, True, None
        policy = Policy(
            spec.grace_ns,
            spec.patience_ns,
            again,
            spec.stop_signal,
            spec.farewell_ns,
            self._config.start_timeout_ns,
            self._config.rendezvous.heartbeat_ns // 2,
        )
        plan = _plan(self._config, round, self._environment, self._key, self._key_fd, self._run_id)
        self._plan_now = plan
        self._group = WorkerGroupShell(
            plan,
            round.number,
            policy,
            self._loop,
            self._screen,
            self._starter.announcements,
            self._config.monitor_interval_ns,
            listener=self,
        )
        waiting = self._place_each(self._group, deque(plan.workers), survivors, start)
        if waiting:
            self._starter.await_template(plan.workers[0], self._inbox)
            self._read_signals()
            if not self._alive:
                return  # a signal ended the run
            self._start_each(self._group, waiting, round.number)
        if again or self._may_change:
            self._starter.prepare_template(plan.workers[0])
        if self._alive:
            self._fill_reserve(plan, spec.slots - len(plan.workers))
            self._want_change()

    def _release_survivors(self, group: WorkerGroupShell, start: StartWorkers) -> list[LivingWorker]:
        """Return the workers that go on in the round: none if it needs new processes, which they cannot wait for."""
        if not start.keeps:
            self._screen.tell(f"{start.cause}; the others have gone on meanwhile: all workers start again")
            return []
        lacking = start.round.nodes[start.round.group_rank].slots - group.survivors
        if group.takes_newcomers or lacking <= 0:
            return group.release_survivors()
        self._screen.tell(f"{start.cause}; {LATER_TRAINING}: all workers start again")
        return []

    @property
    def _may_change(self) -> bool:
        """Whether nodes may come and go."""
        return self._config.rendezvous.min_nodes < self._config.rendezvous.max_nodes

    @property
    def _has_channels(self) -> bool:
        """Whether a round may follow another one, so that workers can continue."""
        return self._config.worker.max_restarts > 0 or self._may_change

    def _place_each(
        self,
        group: WorkerGroupShell,
        places: deque[WorkerPlan],
        survivors: list[LivingWorker],
        start: StartWorkers,
    ) -> deque[WorkerPlan]:
        """Give places to workers that continue, then to those of the reserve; return the places that are left."""
        reason, promoted = start.cause or "the job begins", 0
        size = len(places)
        chosen = assign_places([worker.home for worker in survivors], size)
        for worker, place in zip(survivors, chosen):
            group.place_worker(places[place].rank, worker, reason, start.lost)
        places = deque(each for number, each in enumerate(places) if number not in chosen)
        while places and self._may_use_reserve() and (spare := self._reserve.take_ready()):
            group.place_worker(places.popleft().rank, spare, reason, start.lost)
            promoted += 1
        if survivors:
            lacking = self._config.worker.slots - size
            is_first = all(worker.takes_newcomers for worker in survivors)
            replaced = lacking if is_first else 0
            self._screen.tell(describe_recovery(start, len(survivors), promoted, len(places), replaced))
            if lacking > replaced:
                self._screen.tell(f"{LATER_TRAINING}: none is started")
        return places

    def _may_use_reserve(self) -> bool:
        """Return whether workers of the reserve can take part; says once if they cannot."""
        if not (self._has_continued or self._has_refused_spares) and self._reserve.ready:
            self._has_refused_spares = True
            self._screen.tell(
                "no worker has called ronde.elastic.run so far, so spare workers take no part: all workers start "
                "again. A program without ronde.elastic.run has no use for --spares"
            )
        return self._has_continued

    def _start_each(self, group: WorkerGroupShell, waiting: deque[WorkerPlan], attempt: int) -> None:
        """Start these workers, until one cannot start or a signal comes; a start may take long."""
        while waiting and group.takes_workers:
            worker = waiting[0]
            try:
                started = self._starter.start_worker(worker, attempt, self._inbox, self._has_channels)
            except InterruptedError:
                pass  # once the signal has been read, no further worker starts
            except OSError as error:
                group.note_unstarted(worker.rank, shortage(error) or error.strerror or str(error))
            else:
                group.add_worker(worker.rank, started)
                waiting.popleft()
            self._read_signals()

    def _open_store(self) -> RoundStore:
        host = self._address if self._config.rendezvous.max_nodes > 1 else ""
        return RoundStore(
            host, self._key, self._loop, lambda problem: self._step_agent(RendezvousBroken(problem))
        )

    def _close_stores(self, before: int | None = None) -> None:
        """Close the stores of rounds before that number (None: all), which no worker needs any more."""
        kept = []
        for number, store in self._earlier_stores:
            if before is None or number < before:
                store.close()
            else:
                kept.append((number, store))
        self._earlier_stores = kept
        if before is None:
            self._store.close()

    # The end

    def _report(self, end: AgentEnd) -> list[bytes]:
        """Return the report: the first failure, on any node, and at the end the last output of its worker."""
        used = self._round.restarts if self._round else 0
        times = "once" if used == 1 else f"{used} times"
        remark = f"; the workers had been started again {times} before" if used else ""
        left = self._group.left_tracebacks() if self._group else {}
        if end.exit_code == 0:
            return tracebacks(left)
        first = self._first_failure(end)
        if self._is_ours(end) and self._group and self._group_end:
            lines = report(self._group_end, self._group.workers, first, remark)
        else:
            lines = report_elsewhere(end.reason, first, remark)
        return lines + tracebacks(left, first)

    def _first_failure(self, end: AgentEnd) -> Failure | None:
        if self._is_ours(end) and self._group_end:
            failed = self._group_end.failed_rank
            # The failure that `end` carries was reported at once; another may have turned out to be the first.
            return None if failed is None else self._describe_failure(failed)
        return end.failure

    def _failures(self, end: AgentEnd) -> dict[int, Failure]:
        first = self._first_failure(end)
        if first is None:
            return {}
        workers = self._group.workers.values() if self._group and self._is_ours(end) else ()
        others = (worker.rank for worker in workers if worker.failed_by_itself and worker.rank != first.rank)
        return {first.rank: first, **{rank: self._describe_failure(rank) for rank in others}}

    def _hand_up(self, end: AgentEnd) -> None:
        """Write why the job failed into the error file that this agent's own launcher named."""
        path = self._environment.get(ERROR_FILE)
        failure = self._first_failure(end) if path and end.exit_code else None
        if path and failure is not None:
            here = self._is_ours(end) and self._group
            source = here.error_file(failure.rank) if here else ""
            try:
                Disk().ask(lambda: hand_up(path, failure, source))
            except OSError as error:
                self._screen.tell(f"cannot write the error file {path}: {error.strerror or error}")

    def _is_ours(self, end: AgentEnd) -> bool:
        """Return whether the last run of this node's workers ended the job."""
        if self._group_end is None or self._group is None or self._group_end.exit_code != end.exit_code:
            return False
        if end.failure is None:
            return self._group_end.reason == end.reason
        return self._group.has_worker(end.failure.rank, end.failure.pid)

    def _result(self, end: AgentEnd) -> RunResult:
        workers = self._group.workers.values() if self._group else ()
        return RunResult(
            exit_code=end.exit_code,
            reason=end.reason,
            failures=self._failures(end),
            returncodes={
                worker.rank: worker.returncode for worker in workers if worker.returncode is not None
            },
            restarts=self._round.restarts if self._round else 0,
            changes=self._round.changes if self._round else 0,
            gave_way=end.gave_way,
            is_closed=end.is_closed,
            is_surplus=end.is_surplus,
        )
