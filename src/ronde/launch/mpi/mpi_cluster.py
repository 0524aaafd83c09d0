"""Slots of another cluster as a cluster in which MPI starts the tasks: the job of Ronde runs inside a job of Open MPI.

    the driver --- mpirun --- remote shell, one for each host
        |                          : (its command, through the task)
        |-- MpiJob <-- task 0 (in an executor on a) --- agent --- MPI daemon --- a task for each rank on a
        |          <-- task 1 (in an executor on a) --- agent, which waits
        '-- the job's driver <-- the tasks of all ranks

The other cluster gives the slots. Once all of its tasks have registered, mpirun starts a daemon by the first task of
each host, and the daemons start as many tasks as there are slots. Those register with the driver like tasks of any
cluster, so the driver handles ranks, output, results and failures. The number of a rank in MPI is its slot.

A thread with a loop serves mpirun, the tasks of the other cluster, and the remote shells (`remote_shell`), which are
processes of this machine and user; no other user can connect.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from ronde.environment import environment
from ronde.errors import AuthenticationError
from ronde.job_key import JobKey
from ronde.launch.agent.worker import signal_name
from ronde.launch.clusters.cluster import Capabilities, Capacity, Cluster, SlotEvents, Ticket
from ronde.launch.config import LaunchConfig
from ronde.launch.driver.agent_process import AgentPhase, AgentProcess, EchoFilter
from ronde.launch.driver.driver_messages import DaemonOrder
from ronde.launch.driver.job_store import reachable_by_tasks
from ronde.launch.driver.task_pool import TaskPool, agent_name
from ronde.launch.driver.task_registry import Registry, Task, TaskFailed, TaskLost, gpus_by_host
from ronde.launch.driver.task_server import TaskConnection
from ronde.launch.loop import Loop, Order
from ronde.launch.mpi.daemon import guarded_folder
from ronde.launch.mpi.mpi_commands import (
    check_version,
    daemon_command,
    host_slots,
    mpirun_command,
    mpirun_environment,
)
from ronde.launch.mpi.mpirun import find_mpirun, libraries_of
from ronde.launch.screen import Screen
from ronde.net.addresses import interface_of
from ronde.net.unix_peers import check_user
from ronde.process.process_groups import Process

__all__ = ["MpiCluster"]

SECOND = 10**9
END_NS = 3 * SECOND  # how long mpirun, and then the daemons, may take to end before the next stronger signal
SAID_BYTES = 1000  # of mpirun's last words, in the reason of a failure
_PROGRAM = Path(__file__).with_name("remote_shell.py")
LOST = 255  # the exit code of a remote shell whose command could not be run
READ_BYTES = 64 * 1024


class MpiCluster:
    """The slots of `cluster`, for one job.

    `config`: of the job. `options`: further ones of mpirun. `first_host`, `driver_address`: as of `RunOptions`.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: LaunchConfig,
        options: Sequence[str] = (),
        first_host: str = "",
        driver_address: str = "",
    ) -> None:
        self.name = cluster.name
        self.capabilities = Capabilities(elastic=False, gang=True)
        self._cluster, self._config, self._options = cluster, config, options
        self._first_host, self._driver_address = first_host, driver_address
        self._job: MpiJob | None = None

    def capacity(self) -> Capacity | None:
        """Return the slots of the other cluster. Raises UsageError if it does not answer."""
        return self._cluster.capacity()

    def request(self, tickets: Sequence[Ticket], events: SlotEvents) -> None:
        """Request the slots. Raises UsageError if there is no mpirun of Open MPI here."""
        mpirun, version = find_mpirun(environment())
        check_version(version)
        command = (str(mpirun), *self._options)
        job = MpiJob(self._cluster, self._config, command, tickets, events, self._first_host)
        job.start(self._driver_address)
        self._job = job

    def cancel(self, reason: str) -> None:
        """End mpirun, its daemons and all tasks; return when they have ended."""
        if self._job is not None:
            self._job.end()
        self._cluster.cancel(reason)


class MpiJob:
    """Requests the slots of `cluster`, and starts a task for each ticket in them by mpirun. Start it, and end it.

    `command`: mpirun and further options of it. `config`, `first_host`: of the job.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: LaunchConfig,
        command: Sequence[str],
        tickets: Sequence[Ticket],
        events: SlotEvents,
        first_host: str,
    ) -> None:
        self._cluster, self._config, self._command = cluster, config, command
        self._tickets, self._events = tickets, events
        self._registry = Registry(len(tickets), first_host)
        self._agents: dict[str, AgentProcess] = {}
        self._reached: set[str] = set()  # addresses of this machine, by which tasks have come
        # The agent of the daemon, by mpirun's name of the host; empty until mpirun runs.
        self._hosts: dict[str, str] = {}
        self._orders: dict[str, DaemonOrder] = {}  # by the agent's name, until it has greeted
        self._shells: dict[str, RemoteShell] = {}  # by the agent's name
        self._messages = io.StringIO()  # of mpirun's daemons
        self._process: Process | None = None  # mpirun
        self._has_failed = self._is_over = False
        self._thread = threading.Thread(target=self._run, name="ronde-mpi", daemon=True)

    def start(self, driver_address: str) -> None:
        """Request the slots, and return: a thread does the rest. Raises UsageError as `Cluster.request`.

        `driver_address`: an address or a name by which tasks reach this machine first; empty: its own.
        """
        with ExitStack() as stack:
            key = JobKey.from_hex(self._tickets[0].job_key.hex())
            reachable, listening = reachable_by_tasks(self._config, driver_address)
            silence_ns = self._config.rendezvous.silence_ns
            self._pool = TaskPool(
                self._cluster, self._registry.step, key, silence_ns, reachable, listening, stack
            )
            self._pool.request([replace(ticket, addresses=self._pool.addresses) for ticket in self._tickets])
            self._stack = stack.pop_all()
        self._thread.start()

    def end(self) -> None:
        """End everything, and wait for it. A second call does nothing."""
        self._is_over = True
        self._pool.all_ended("")  # which wakes the thread
        self._thread.join()

    # The thread

    def _run(self) -> None:
        with self._stack as stack:
            try:
                self._serve(stack)
            except OSError as error:
                self._fail(f"MPI cannot be started: {error}")

    def _serve(self, stack: ExitStack) -> None:
        self._folder, self._guard = stack.enter_context(guarded_folder())
        self._loop = Loop()
        stack.callback(self._loop.close)
        self._screen = Screen(self._loop, lambda: None, (self._messages, self._messages))
        stack.callback(self._screen.close)
        stack.callback(self._close_agents)
        self._shell_server = ShellServer(self._folder, self._loop, stack, self._start_daemon)
        self._pool.follow(self._loop, self, stack)
        while not self._is_over:
            self._turn()
        self._end_mpirun()
        self._end_agents()

    def _turn(self) -> None:
        self._screen.balance()
        for agent in self._agents.values():
            agent.balance()
        self._loop.turn()

    def _fail(self, reason: str, is_loss: bool = False) -> None:
        """Report once why all tasks end."""
        if not self._has_failed and not self._is_over:
            self._has_failed = True
            self._events.all_ended(reason, is_loss)

    # What the pool reports

    def note_task_end(self, slot: int, reason: str) -> None:
        """Note the end of a task; if it had an agent, the end of the agent says how."""
        if agent_name(slot) not in self._agents:
            self._pool.step(TaskFailed(slot, reason or "its task ended without having registered"))

    def note_all_ended(self, reason: str) -> None:
        """Report that the platform has ended all tasks."""
        self._fail(reason, self._pool.was_loss)

    def miss_tasks(self, reason: str, is_final: bool) -> None:
        """Report that a task has failed."""
        self._fail(reason)

    def accept_task(self, task: Task, connection: TaskConnection) -> None:
        """Start the agent of a task."""
        name = agent_name(task.slot)
        if earlier := self._agents.pop(name, None):
            earlier.close()
        self._reached.add(connection.address)
        self._agents[name] = AgentProcess(
            name,
            self._loop,
            self._screen,
            EchoFilter(),
            self._give_order,
            self._agent_ended,
        )
        self._agents[name].attach_streams(connection.accept())

    def _agent_ended(self, agent: AgentProcess) -> None:
        if self._agents.get(agent.name) is not agent:
            return  # another attempt has taken its place
        del self._agents[agent.name]
        if shell := self._shells.pop(agent.name, None):
            shell.finish(LOST if agent.exit_code is None else agent.exit_code)
        task = self._pool.tasks[agent.name]
        if self._process is not None and select.select([self._process.pidfd], [], [], 0)[0]:
            self._mpirun_ended()  # first: the daemons end with it
        if not self._hosts and agent.exit_code is None:
            self._pool.step(TaskLost(task.id))  # the cluster may start it again
        elif agent.exit_code is None:
            reason = f"{agent.name} on {task.host} was lost: its connection broke, or a process was killed"
            self._fail(reason, is_loss=True)
        elif agent.exit_code:
            self._fail(f"{agent.name} on {task.host}: {agent.why}: {self._last_words()}")

    # mpirun and its daemons

    def begin(self, tasks: Sequence[Task]) -> None:
        """Start mpirun, which starts a daemon on each host."""
        hosts = host_slots(tasks)
        self._hosts = {host: agent_name(there[0].slot) for host, there in hosts.items()}
        interfaces = {interface_of(address) for address in self._reached}
        command = mpirun_command(
            self._command,
            self._shell_server.program,
            {host: len(there) for host, there in hosts.items()},
            interfaces=sorted(interfaces - {""}),
            is_root=os.geteuid() == 0,
        )
        variables = mpirun_environment(environment())
        variables["PRTE_MCA_prte_tmpdir_base"] = str(self._folder)  # Open MPI 5
        variables["OMPI_MCA_orte_tmpdir_base"] = str(self._folder)  # Open MPI 4
        with (self._folder / "said").open("wb") as said:
            self._process = Process(command, variables, stdout=said.fileno(), stderr=said.fileno())
        self._guard.add(self._process.pid)
        self._loop.watch(self._process.pidfd, Order.EXITS, self._mpirun_ended)

    def _start_daemon(self, shell: RemoteShell) -> None:
        """Have the first agent of the host run the command of mpirun."""
        name = self._hosts.get(shell.host, "")
        if name not in self._agents or name in self._shells:
            shell.finish(LOST)
            return
        task = self._pool.tasks[name]
        gpus = gpus_by_host(self._registry.registered())[task.host_id]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        if libraries := libraries_of(Path(self._command[0])):
            variables["MPI4PY_LIBMPI"] = str(min(libraries))
        first = self._tickets[0]
        self._shells[name] = shell
        self._orders[name] = DaemonOrder(
            daemon_command(shell.command), variables, first.addresses, first.start_timeout_ns
        )
        self._give_order(self._agents[name])

    def _give_order(self, agent: AgentProcess) -> None:
        """Give the agent its order, once there is one and it has greeted."""
        if agent.phase is AgentPhase.GREETED and agent.name in self._orders:
            agent.assign(self._orders.pop(agent.name))

    def _mpirun_ended(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return  # its end has been noted already
        self._loop.unwatch(process.pidfd)
        code = process.reap()
        self._guard.discard(process.pid)
        if code:
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            self._fail(f"mpirun (pid {process.pid}) {how}: {self._last_words()}")
        else:  # also after the loss of a daemon, which its agent reports
            for ticket in self._tickets:
                self._events.slot_ended(ticket.slot, "")

    def _last_words(self) -> str:
        """Return the end of what mpirun and its daemons have said, in one line."""
        path = self._folder / "said"
        said = (path.read_text(errors="replace") if path.exists() else "") + self._messages.getvalue()
        return " ".join(re.sub("-{5,}", " ", said).split())[-SAID_BYTES:] or "it has said nothing"

    # The end

    def _end_mpirun(self) -> None:
        """Wait for mpirun, whose tasks have ended; else let it end its daemons; else kill it."""
        for signum in (0, signal.SIGTERM, signal.SIGKILL):
            if self._process is not None and signum:
                self._process.signal_group(signum)
            self._wait_until(lambda: self._process is None)

    def _end_agents(self) -> None:
        for agent in list(self._agents.values()):
            agent.ask_to_leave()
        self._wait_until(lambda: not self._agents)

    def _close_agents(self) -> None:
        for agent in self._agents.values():
            agent.close()

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Serve until the condition holds, for at most `END_NS`."""
        ends_ns = time.monotonic_ns() + END_NS
        self._loop.set_timer(self, ends_ns, lambda: None)
        while not is_done() and time.monotonic_ns() < ends_ns:
            self._turn()


# Remote shells


class RemoteShell:
    """One remote shell: it waits for the exit code of `command` on `host`."""

    def __init__(self, sock: socket.socket, host: str, command: str) -> None:
        self._sock, self.host, self.command = sock, host, command

    def finish(self, exit_code: int) -> None:
        """Let the remote shell end with this exit code."""
        with self._sock, suppress(OSError):  # mpirun may have ended it
            self._sock.sendall(str(exit_code).encode())


class ShellServer:
    """Listens for remote shells. `asked` is called for each, with its command; `finish` it then.

    `folder`: a directory that only this user may enter. `program`: the path of the remote shell, there. The stack
    closes what this opens.
    """

    def __init__(
        self, folder: Path, loop: Loop, stack: ExitStack, asked: Callable[[RemoteShell], None]
    ) -> None:
        self._loop, self._asked = loop, asked
        self._stack = stack
        path = folder / "socket"
        self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(str(path))
        self._listener.listen(128)
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), Order.NODES, self._accept)
        stack.callback(loop.unwatch, self._listener.fileno())
        program = folder / "remote_shell"
        words = [sys.executable, "-I", "-S", str(_PROGRAM), str(path)]
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o700)
        self.program = str(program)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            try:
                check_user(sock)
            except AuthenticationError:
                sock.close()
                return
            sock.setblocking(False)
            self._stack.callback(sock.close)
            self._loop.watch(sock.fileno(), Order.NODES, partial(self._read, sock, bytearray()))

    def _read(self, sock: socket.socket, request: bytearray) -> None:
        data = os.read(sock.fileno(), READ_BYTES)
        request += data
        if data and not request.endswith(b"\n"):
            return
        self._loop.unwatch(sock.fileno())
        if not data:
            sock.close()
            return
        host, command = json.loads(request)
        self._asked(RemoteShell(sock, host, command))
