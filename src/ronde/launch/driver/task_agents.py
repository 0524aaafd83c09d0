"""Agents in the tasks of a cluster: a task registers with the driver and relays the streams of its agent.

    this process --- store of the job: the agents meet in it
        '-- task server <-- task 0 (in an executor on a) --- agent --- its worker
                        <-- task 1 (in an executor on b) --- agent --- its worker

With a fixed number of workers, `launch/driver/task_registry` decides when the job begins: once all tasks have
registered. Otherwise each agent begins when its task has registered, a lost task is requested again, and
`launch/driver/host_health` decides how often. `launch/driver/task_pool` has the tasks.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.launch.clusters.client_threads import start_client_thread
from ronde.launch.clusters.cluster import Capacity, Cluster, Ticket
from ronde.launch.config import LaunchConfig
from ronde.launch.driver import host_health as health
from ronde.launch.driver.agent_process import AgentPhase, AgentProcess
from ronde.launch.driver.driver import Driver
from ronde.launch.driver.driver_messages import Assignment
from ronde.launch.driver.job_store import JobMemory, offer_call, open_store, reachable_by_tasks
from ronde.launch.driver.ring import RingPlan, plan_ring
from ronde.launch.driver.task_pool import TaskPool, agent_name
from ronde.launch.driver.task_registry import (
    Accept,
    Refuse,
    Registry,
    RegistryEffect,
    RegistryEvent,
    StartTimeout,
    Task,
    TaskFailed,
    TaskLost,
    TaskRegistered,
    TasksMissing,
    gpus_by_host,
)
from ronde.launch.driver.task_server import TaskConnection
from ronde.launch.hosts.host_list import Host
from ronde.net.authentication import Protection

if TYPE_CHECKING:
    from ronde.launch.job_options import RunOptions

__all__ = ["TaskAgents"]

SECOND = 10**9
LAST_CALL_NS = SECOND
USAGE_ERROR = 2
SAY_AGAIN_NS = 5 * SECOND  # between messages about missing tasks
LATE_NS = 2 * SECOND  # for the connections of tasks to end, after the cluster has said that the tasks have
CAPACITY_S = 2  # for the cluster to say how many slots are free
COOLDOWN_NS = (SECOND, 60 * SECOND)


class TaskAgents:
    """The placement of a job in tasks of `cluster`, with one worker in each.

    `config`: of all agents, `options`: of the user. `call`: the packed function. `is_secret`: encrypt all connections.
    `memory`: offered to the workers.
    """

    is_given_by_user = False

    def __init__(
        self,
        cluster: Cluster,
        config: LaunchConfig,
        options: RunOptions,
        call: bytes,
        *,
        is_secret: bool = False,
        memory: JobMemory | None = None,
    ) -> None:
        self._cluster, self._options, self._call, self._memory = cluster, options, call, memory
        self._is_secret = is_secret
        self._is_fixed = options.min_num_proc is None
        workers, least = options.num_proc, options.min_num_proc or options.num_proc
        self._start_ns = config.start_timeout_ns
        self.limits = health.Limits(
            min_slots=least,
            cooldown_ns=None if self._is_fixed else COOLDOWN_NS,
            patience_ns=config.rendezvous.join_timeout_ns,
            is_changing=not self._is_fixed,
            noun="",
        )
        self.config = _for_agents(config, workers, least, is_fixed=self._is_fixed)
        self.has_missed_start = False  # whether the job ended because too few tasks came in time
        self._registry = Registry(workers, options.first_host)
        self._key = JobKey.generate()
        self._stack = ExitStack()
        self._begun: dict[str, int] | None = None  # the ranks of nodes by the agent's name, after the barrier
        self._rings: dict[str, RingPlan | None] = {}  # by the agent's name
        self._gpus: dict[str, tuple[str, ...]] = {}  # by the host's id, after the barrier
        self._is_short = False  # whether tasks are missing ...
        self._short_until_ns = 0  # ... and when that ends the job
        self._is_over = False

    # What the driver asks for

    def open(self, driver: Driver) -> None:
        """Serve the store and the tasks, and request all tasks."""
        self._driver = driver
        reachable, listening = reachable_by_tasks(self.config, self._options.driver_address)
        port = self._options.driver_port
        self.store, self._stores = open_store(
            reachable, listening, self._key, self._stack, self._is_secret, port + 1 if port else 0
        )
        offer_call(self.store, self._call)
        self._call = b""
        if self._memory is not None:
            self._memory.offer_to(self.store)
        self._pool = TaskPool(
            self._cluster,
            self._registry.step if self._is_fixed else self._decide,
            self._key,
            self.config.rendezvous.silence_ns,
            reachable,
            listening,
            self._stack,
            is_secret=self._is_secret,
            port=port,
        )
        self._pool.follow(driver.loop, self, self._stack)
        self._watch_for_shortage()
        driver.offer_hosts(tuple(Host(agent_name(slot), 1) for slot in range(self._options.num_proc)))

    def start_agents(self, hosts: Sequence[Host]) -> None:
        """Request a task for each slot."""
        tickets = []
        for host in hosts:
            self._driver.add_agent(host.name)
            tickets.append(
                Ticket(
                    slot=_slot(host.name),
                    addresses=self._pool.addresses,
                    job_key=bytes.fromhex(self._key.hex()),
                    protection=Protection.SECRET if self._is_secret else Protection.SEALED,
                    start_timeout_ns=self._start_ns,
                    python=self._options.executable,
                )
            )
        try:
            self._pool.request(tickets)
        except UsageError as error:
            self._driver.give_up(str(error), USAGE_ERROR)

    def greeted(self, agent: AgentProcess) -> None:
        """Give the agent its assignment, once the job has begun."""
        if self._begun is not None:
            self._assign(agent, self._begun[agent.name])
        elif not self._is_fixed:
            self._assign(agent, -1)

    def is_replaced(self, agent: AgentProcess) -> bool:
        """Return whether another task may come for an agent that has ended."""
        if not self._is_fixed and not self._is_over:
            self._watch_for_shortage()
        if self._begun is not None or self._is_over or not self._is_fixed or agent.exit_code is not None:
            return False
        if task := self._pool.tasks.pop(agent.name, None):
            self._pool.step(TaskLost(task.id))
            self._driver.add_agent(agent.name)
        return task is not None

    def explain_shortage(self, reason: str) -> str:
        """Return the reason; rather that of the cluster, if it has ended all tasks, or has ended itself."""
        if self._pool.why_all_ended:
            return self._pool.why_all_ended
        answer = self._ask_capacity()
        return f"{answer} ({reason})" if isinstance(answer, UsageError) else reason

    @property
    def has_lost_task(self) -> bool:
        """Whether a task was lost while the job ran, if no worker failed; not if its tasks were ended on purpose.

        A platform such as Flink ends all tasks together. The driver sees their connections end before the platform
        reports why, so this waits up to 2 s for the report.
        """
        if self._begun is None:
            return False
        if self._cluster.capabilities.gang:
            self._pool.await_reason(LATE_NS / SECOND)
        return self._pool.was_loss or not self._pool.why_all_ended

    def end(self) -> None:
        """Take no more tasks."""
        self._is_over = True
        self._stop_watching()
        self._pool.end()

    def close(self) -> None:
        """End all tasks, and close store and server."""
        self._cluster.cancel("the job is over")
        self._stack.close()

    # What the pool reports

    def note_task_end(self, slot: int, reason: str) -> None:
        """Note the end of a task, and let what its agent has still said arrive first."""
        agent = self._driver.agent(agent_name(slot))
        if agent is None:
            return
        if agent.phase is AgentPhase.REQUESTED:
            self._give_task_up(agent, slot, reason or "its task ended without having registered")
        elif reason:
            late_ns = time.monotonic_ns() + LATE_NS
            self._driver.loop.set_timer(
                (agent.id, slot), late_ns, lambda: self._give_task_up(agent, slot, reason)
            )

    def _give_task_up(self, agent: AgentProcess, slot: int, reason: str) -> None:
        self._pool.step(TaskFailed(slot, reason))  # before the job has begun, no other task would come
        agent.kill(reason)

    def note_all_ended(self, reason: str) -> None:
        """End the job, after what agents have still said."""

        def give_up() -> None:
            self._driver.give_up(reason)

        late_ns = LATE_NS if self._begun is not None or not self._is_fixed else 0
        self._driver.loop.set_timer((self, "lost"), time.monotonic_ns() + late_ns, give_up)

    def _decide(self, event: RegistryEvent) -> list[RegistryEffect]:
        """Decide about the tasks of an elastic job: a task is accepted if its slot waits for one."""
        match event:
            case TaskRegistered(task):
                agent = self._driver.agent(agent_name(task.slot))
                if agent is not None and agent.phase is AgentPhase.REQUESTED:
                    return [Accept(task)]
                return [Refuse(task.id, f"slot {task.slot} waits for no task")]
            case StartTimeout():
                return [TasksMissing(self._describe_missing(), is_final=False)]
        return []

    def accept_task(self, task: Task, connection: TaskConnection) -> None:
        """Start the agent of a task."""
        name = agent_name(task.slot)
        agent = self._driver.agent(name)
        if agent is not None and agent.phase is not AgentPhase.REQUESTED:  # of an earlier attempt
            agent.close()
            agent = None
        agent = agent or self._driver.add_agent(name)
        agent.attach_streams(connection.accept())

    def miss_tasks(self, reason: str, is_final: bool) -> None:
        """End the job, and say what the cluster says about its slots."""
        self.has_missed_start = not is_final
        self._driver.give_up(f"{reason}{'' if is_final else self._describe_capacity()}")

    def begin(self, tasks: Sequence[Task]) -> None:
        """Let the job begin: the order of the tasks is that of the ranks."""
        self._begun = {agent_name(task.slot): number for number, task in enumerate(tasks)}
        interfaces = self.config.interface.split(",") if self.config.interface else ()
        self._gpus = gpus_by_host(tasks)
        self._rings = dict(zip(self._begun, plan_ring([task.host_id for task in tasks], interfaces)))
        self._stop_watching()
        if self._options.verbose > 0:
            hosts = list(dict.fromkeys(task.host for task in tasks))
            self._driver.say(
                f"{self._cluster.name}: all {len(tasks)} tasks have registered, on {', '.join(hosts)}"
            )
        for name in self._begun:
            agent = self._driver.agent(name)
            if agent is not None and agent.phase is AgentPhase.GREETED:
                self.greeted(agent)

    # Tasks that are missing

    def _watch_for_shortage(self) -> None:
        """End the job, and until then say what is missing, if tasks are missing for as long as a start may take."""
        if not self._is_short:
            self._is_short = True
            self._short_until_ns = time.monotonic_ns() + self._start_ns
            self._driver.loop.set_timer(self, self._short_until_ns, self._end_for_shortage)
            self._say_later_what_is_missing()

    def _stop_watching(self) -> None:
        self._is_short = False
        for owner in (self, (self, "progress")):
            self._driver.loop.set_timer(owner, None, self._stop_watching)

    def _end_for_shortage(self) -> None:
        self._pool.step(StartTimeout())

    def _say_later_what_is_missing(self) -> None:
        if self._options.verbose > 0:
            at_ns = time.monotonic_ns() + SAY_AGAIN_NS
            self._driver.loop.set_timer((self, "progress"), at_ns, self._say_what_is_missing)

    def _say_what_is_missing(self) -> None:
        left_s = max(0, self._short_until_ns - time.monotonic_ns()) // SECOND
        self._driver.say(
            f"{self._cluster.name}: waiting for tasks: {self._describe_missing()}{self._describe_slots()}; "
            f"the job ends if they do not come in {left_s} s"
        )
        self._say_later_what_is_missing()

    def _describe_missing(self) -> str:
        if self._is_fixed:
            return self._registry.describe_missing()
        return f"registered {self._driver.running_slots()} of at least {self.limits.min_slots}"

    def _describe_capacity(self) -> str:
        """Return how long the driver has waited, what the cluster says about its slots, and what to do."""
        return (
            f" within {self._start_ns / SECOND:g} s{self._describe_slots()}: ask for fewer workers, give "
            f"{self._cluster.name} more slots, or raise start_timeout"
        )

    def _describe_slots(self) -> str:
        """Return what the cluster says about its slots, after a semicolon; "" if it does not answer soon."""
        answer = self._ask_capacity()
        if answer is None:
            return ""
        if isinstance(answer, UsageError):
            return f"; {answer}"
        held = len(self._registry.registered()) if self._is_fixed else self._driver.running_slots()
        free = max(0, min(answer.free, answer.total - held))  # the platform may learn of tasks late
        return f"; {self._cluster.name} has {answer.total} slots, {free} of them free"

    def _ask_capacity(self) -> Capacity | UsageError | None:
        """Return the capacity, or the error if the platform is gone; None if it does not answer soon."""
        answers: deque[Capacity | UsageError | None] = deque()

        def ask() -> None:
            try:
                answers.append(self._cluster.capacity())
            except UsageError as error:
                answers.append(error)
            except Exception:  # of a client that has ended meanwhile; the job says what has happened to it
                answers.append(None)

        asking = threading.Thread(target=ask, name="ronde-capacity", daemon=True)
        start_client_thread(asking)  # `close` cancels the cluster, which ends a question that has no answer
        asking.join(CAPACITY_S)
        return answers.popleft() if answers else None

    # Assignments

    def _assign(self, agent: AgentProcess, node_rank: int) -> None:
        task = self._pool.tasks[agent.name]
        environment = dict(self.config.worker.environment)
        if gpus := self._gpus.get(task.host_id, task.gpus):  # an elastic job may lose the other tasks there
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        worker = replace(self.config.worker, environment=environment)
        config = replace(
            self.config,
            worker=worker,
            rendezvous=replace(self.config.rendezvous, node_rank=node_rank),
            shares_hosts=self._is_fixed or not gpus,
        )
        agent.assign(
            Assignment(
                agent=agent.id,
                job_key="",
                stores=self._stores,
                directory="",
                environment={},
                has_call=True,
                ring=self._rings.get(agent.name),
                config=config,
            )
        )
        self._driver.note_assigned()
        if not self._is_fixed and self._driver.running_slots() >= self.limits.min_slots:
            self._stop_watching()


def _slot(name: str) -> int:
    return int(name.removeprefix("task "))


def _for_agents(config: LaunchConfig, workers: int, least: int, *, is_fixed: bool) -> LaunchConfig:
    """Return the configuration of all agents."""
    rendezvous = replace(
        config.rendezvous,
        backend="tcp",
        run_id=config.rendezvous.run_id or secrets.token_hex(8),
        min_nodes=least,
        max_nodes=workers,
        last_call_ns=LAST_CALL_NS,
        supply=workers if is_fixed else None,
        options={"is_host": "false", "rehost": "false"},  # the driver is the host
        start_timeout_ns=config.start_timeout_ns,
    )
    return replace(config, rendezvous=rendezvous, shares_hosts=True)
