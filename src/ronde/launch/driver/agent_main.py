"""A program: the agent that `ronde run -H` starts on each host, by SSH or on its own machine.

    python -P -m ronde.launch.driver.agent_main [CLAIM_FD IDLE_NS]

It says hello, reads its assignment from standard input, finds the job's store at one of the addresses in it, and is
then an agent like any other. Afterwards standard input brings signals, as `signal 2`, and heartbeats, as `beat`. When
it ends or falls silent, because the launcher or the connection is lost, the agent leaves, so no unsupervised process
goes on. The agent leaves its result in the store, because the exit code of an ssh says little.

With CLAIM_FD, which a task gives it (`kept_agents`), it waits for another assignment after a job that ended well, for
IDLE_NS at most. It keeps the template of its worker, too, so the next job starts no interpreter and imports neither
Ronde nor NumPy.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ronde.environment import environment
from ronde.errors import ProtocolError, RondeError, TimeoutError, UsageError
from ronde.job_key import JobKey
from ronde.launch.config import LaunchConfig
from ronde.launch.driver.assignment import (
    KEY_LINE,
    LAST_WORD,
    Assignment,
    DaemonOrder,
    LastWord,
    ended_key,
    hello,
)
from ronde.net import addresses
from ronde.net.host import host_name
from ronde.stores.tcp import StoreClient

if TYPE_CHECKING:
    from ronde.launch.agent.agent import RunResult

__all__ = ["main"]

READ_BYTES = 64 * 1024
TRY_NS = 2 * 10**9  # per address
PAUSE_S = 0.2  # after a try of all addresses
GOODBYE_NS = 15 * 10**9  # how long the agent may take to end after its workers
TAKEN_NS = 10**9  # until a task that has taken this agent says so; then it looks again
IDLE, BUSY = "ronde-idle", "ronde-agent"  # the names of this process meanwhile, for ps
# What the function's worker and most functions import, and starts no thread.
PRELOADED = (
    "numpy",
    "cloudpickle",
    "ronde",
    "ronde.comm.world",
    "ronde.engine.process",
    "ronde.launch.calls",
)
USAGE_ERROR, INTERRUPTED = 2, 130
_INTERFACES = {"RONDE_INTERFACE", "HOROVOD_GLOO_IFACE"}  # with which a user chooses the workers' addresses
_OPEN_MPI_INTERFACE = "OMPI_MCA_btl_tcp_if_include"  # for workers that use MPI


def main() -> int:
    """Run the agent; return the exit code."""
    signal.pthread_sigmask(
        signal.SIG_SETMASK, ()
    )  # Ray blocks SIGINT in its processes, and children inherit that
    try:
        return _serve(*map(int, sys.argv[1:]))
    except RondeError as error:
        print(f"ronde: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _serve(claim: int | None = None, idle_ns: int = 0) -> int:
    _greet()
    import ronde.launch.agent.agent  # noqa: F401  # slow to load: while the driver waits for other agents

    line = _LifeLine(0)
    key, order = _read_order(line)
    while True:
        if daemon := DaemonOrder.decode(order):
            from ronde.launch.mpi.daemon import run_daemon  # only for jobs with MPI

            return run_daemon(daemon, key)
        code = _follow_assignment(line, key, order, keeps_template=claim is not None)
        if claim is None or code != 0 or not (key := _await_key(line, claim, idle_ns)):
            return code
        _greet()
        order = line.read_line()


def _greet() -> None:
    sys.stdout.buffer.write(hello())
    sys.stdout.buffer.flush()


def _follow_assignment(line: _LifeLine, key: str, order: bytes, keeps_template: bool) -> int:
    """Run the agent of a job; return the exit code."""
    assignment = Assignment.decode(order)
    if keeps_template:
        worker = replace(assignment.config.worker, fork=True, keeps_template=True, preload=PRELOADED)
        assignment = replace(assignment, config=replace(assignment.config, worker=worker))
    return _run(replace(assignment, job_key=key or assignment.job_key), line)


class _LifeLine:
    """Standard input: the assignment, then signals to pass on; its end, or a long silence, ends this agent."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.has_ended = False
        self.why = ""  # why this agent leaves, after a silence
        self._is_unread = False  # whether the launcher's output is broken
        self._thread: threading.Thread | None = None
        self._stops = os.eventfd(0, os.EFD_CLOEXEC)

    def read_line(self) -> bytes:
        """Return the first line, incomplete if standard input ends."""
        while b"\n" not in self._rest and (data := os.read(self._fd, READ_BYTES)):
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def read_key(self, timeout_ns: int) -> str | None:
        """Return the key at the beginning of the next order, empty at the end of standard input.

        Return None if nothing comes in time. What an earlier launcher has still said is left out.
        """
        while select.select([self._fd], [], [], timeout_ns / 1e9)[0]:
            data = os.read(self._fd, READ_BYTES)
            if not data:
                return ""
            self._rest += data
            while b"\n" in self._rest:
                text = self.read_line()
                if text.startswith(KEY_LINE):
                    return text.removeprefix(KEY_LINE).decode()
        return None

    def follow_launcher(self, silence_ns: int, patience_ns: int) -> None:
        """Read the rest in a thread. After the end or a silence, this process has `patience_ns` to end."""
        arguments = (silence_ns, patience_ns)
        self._thread = threading.Thread(
            target=self._follow, args=arguments, name="ronde-launcher", daemon=True
        )
        self._thread.start()

    def stop_following(self) -> None:
        """Read no more, unless the launcher has ended or fallen silent."""
        if self._thread is not None and not self.has_ended:
            os.eventfd_write(self._stops, 1)
            self._thread.join()
            os.eventfd_read(self._stops)

    def _follow(self, silence_ns: int, patience_ns: int) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._stops, select.POLLIN)
        while ready := poll.poll(silence_ns / 1e6):
            if any(fd == self._stops for fd, _ in ready):
                return
            data = os.read(self._fd, READ_BYTES)
            if not data:
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                word, _, number = line.partition(b" ")
                if word == b"signal" and number.isdigit():
                    self._pass_on(int(number))
        if not ready:
            self.why = f"no heartbeat from the launcher for {silence_ns / 1e9:g} s (was it stopped?)"
        self.has_ended = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience_ns / 1e9)
        os.kill(os.getpid(), signal.SIGKILL)  # the workers die with their agent

    def _pass_on(self, signum: int) -> None:
        """Send the signal to this process; SIGPIPE as SIGTERM, because a connection, too, may raise a SIGPIPE."""
        self._is_unread = self._is_unread or signum == signal.SIGPIPE
        os.kill(os.getpid(), signal.SIGTERM if signum == signal.SIGPIPE else signum)

    def original_signal(self, signum: int) -> int:
        """Return the signal of the launcher for which a received signal stands."""
        return signal.SIGPIPE if self._is_unread and signum == signal.SIGTERM else signum


def _await_key(line: _LifeLine, claim: int, idle_ns: int) -> str:
    """Wait for another order; return the key at its beginning, empty if this agent is to end."""
    line.stop_following()
    if line.has_ended:
        return ""
    _call_process(IDLE)
    os.eventfd_write(claim, 1)
    key = line.read_key(idle_ns)
    while key is None:
        try:
            os.eventfd_read(claim)
        except BlockingIOError:  # a task has just taken this agent
            key = line.read_key(TAKEN_NS)
        else:
            return ""
    _call_process(BUSY)
    return key


def _call_process(name: str) -> None:
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def _read_order(line: _LifeLine) -> tuple[str, bytes]:
    """Return the key that the task which started this agent may give first, and the line that says what to do."""
    first = line.read_line() or line.read_line()
    if not first.startswith(KEY_LINE):
        return "", first
    return first.removeprefix(KEY_LINE).decode(), line.read_line()


def _run(assignment: Assignment, line: _LifeLine) -> int:
    config = assignment.config
    spec, meeting = config.worker, config.rendezvous
    patience_ns = spec.longest_end_ns() + GOODBYE_NS
    line.follow_launcher(meeting.heartbeat_ns * meeting.missing_heartbeats, patience_ns)
    here = environment()
    try:
        if assignment.directory:
            os.chdir(assignment.directory)
    except OSError as error:
        raise UsageError(f"cannot work in {assignment.directory}: {error.strerror}") from None
    store = _find_store(assignment, here.get("SSH_CONNECTION", ""), config.start_timeout_ns)
    try:
        from ronde.launch.agent.agent import RunResult

        variables = {**here, **assignment.environment, "RONDE_JOB_KEY": assignment.job_key}
        try:
            own = _own_address(assignment, store)
            if assignment.ring and not variables.keys() & _INTERFACES:
                variables["RONDE_INTERFACE"] = own
                if interface := addresses.interface_of(own):
                    variables.setdefault(_OPEN_MPI_INTERFACE, interface)
            placed = _placed(config, store.address, own)
            result = _run_agent(placed, variables, line, store if assignment.has_call else None)
        except UsageError as error:
            result = RunResult(USAGE_ERROR, str(error))
        failure = next(iter(result.failures.values()), None)
        word = LastWord(result.exit_code, result.reason, failure, result.gave_way)
        if not line.has_ended:  # the launcher can read the result
            with contextlib.suppress(RondeError):
                store.set(ended_key(assignment.agent), LAST_WORD.encode(word))
        elif line.why:  # a launcher that was only stopped will find this line
            with contextlib.suppress(OSError):
                os.write(2, f"ronde: {line.why}\n".encode())
        return result.exit_code
    finally:
        store.close()


def _run_agent(
    config: LaunchConfig, variables: dict[str, str], line: _LifeLine, store: StoreClient | None
) -> RunResult:
    """Run the agent. `store`: where the call is that the workers make, and where its results go; None: a command."""
    from ronde.launch.agent.agent import run_agent

    run = partial(run_agent, report=False, meaning=line.original_signal)
    if store is None:
        return run(config, environment=variables)
    from ronde.launch.calls import CallFiles
    from ronde.launch.driver.transfer import DRIVER_STORE, call_of_job, send_results

    variables = {**variables, DRIVER_STORE: store.address}
    with ExitStack() as stack:
        files = CallFiles(stack, call_of_job(store, config.start_timeout_ns), config.worker.slots)
        worker = replace(config.worker, argv=files.command(sys.executable))
        result = run(replace(config, worker=worker), environment=variables, keep=files.fds)
        if not line.has_ended:
            with contextlib.suppress(RondeError):  # the driver then says that there is no result
                send_results(store, files, result)
        return result


def _find_store(assignment: Assignment, ssh_connection: str, timeout_ns: int) -> StoreClient:
    """Return the store at the first address that answers and knows the key; tries the address of the ssh client first.

    On this host, an address of the launcher may belong to another machine, which refuses the connection or never
    answers.
    """
    candidates = sorted(
        assignment.stores,
        key=lambda text: addresses.parse_address(text).host not in ssh_connection.split()[:1],
    )
    key = JobKey.from_hex(assignment.job_key)
    deadline_ns = time.monotonic_ns() + timeout_ns
    reasons: dict[str, str] = {}
    while True:
        for address in candidates:
            try:
                return StoreClient(address, key, min(TRY_NS, timeout_ns), patience_ns=TRY_NS)
            except (ProtocolError, TimeoutError) as error:
                reasons[address] = str(error)
        if time.monotonic_ns() >= deadline_ns:
            raise UsageError(
                "cannot reach the launcher; name the network interface that reaches this host "
                f"(--network-interfaces): {'; '.join(reasons.values())}"
            )
        time.sleep(PAUSE_S)  # all addresses may refuse at once


def _own_address(assignment: Assignment, store: StoreClient) -> str:
    """Return the address by which other hosts reach this one."""
    config = assignment.config
    if assignment.ring:
        from ronde.launch.driver.ring_probe import probe_ring  # only for jobs on several hosts

        timeout_ns = max(config.start_timeout_ns, config.rendezvous.join_timeout_ns)
        return probe_ring(store, JobKey.from_hex(assignment.job_key), assignment.ring, timeout_ns)
    if config.interface:
        return addresses.address_of_interface(config.interface)
    return addresses.address_towards(addresses.parse_address(store.address).host)


def _placed(config: LaunchConfig, store_address: str, own: str) -> LaunchConfig:
    """Return the configuration for the agent on this host, with this store and this address of the host."""
    endpoint = config.rendezvous.endpoint or store_address.removeprefix("tcp:")
    outputs = config.outputs
    if outputs.prefix is None:
        # Also with one host, because others may join.
        outputs = replace(outputs, prefix=f"[{host_name()}:{{rank}}] ")
    rendezvous = replace(config.rendezvous, endpoint=endpoint)
    return replace(config, local_addr=own, rendezvous=rendezvous, outputs=outputs)


if __name__ == "__main__":
    os._exit(main())  # all is written; the interpreter's own end takes long and would add nothing
