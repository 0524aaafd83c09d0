"""A program: the agent that `ronde run -H` starts on each host, by SSH or on its own machine.

    python -P -m ronde.launch.driver.agent_main

It says hello, reads its assignment from standard input, finds the job's store at one of the addresses in it, and is
then an agent like any other. Afterwards standard input brings signals, as `signal 2`, and heartbeats, as `beat`. When
it ends or falls silent, because the launcher or the connection is lost, the agent leaves, so no unsupervised process
goes on. The agent leaves its result in the store, because the exit code of an ssh says little.
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
from ronde.launch.driver.driver_messages import (
    AGENT_END_NS,
    JOB_END,
    KEY_LINE,
    Assignment,
    DaemonOrder,
    JobEnd,
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
USAGE_ERROR, INTERRUPTED = 2, 130
_INTERFACES = {"RONDE_INTERFACE", "HOROVOD_GLOO_IFACE"}  # with which a user chooses the workers' addresses
_OPEN_MPI_INTERFACE = "OMPI_MCA_btl_tcp_if_include"  # for workers that use MPI


def main() -> int:
    """Run the agent; return the exit code."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT in its processes and their children
    try:
        return _serve()
    except RondeError as error:
        print(f"ronde: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _serve() -> int:
    sys.stdout.buffer.write(hello())
    sys.stdout.buffer.flush()
    import ronde.launch.agent.agent  # noqa: F401  # slow to load: while the driver waits for other agents

    launcher = _Launcher(0)
    key, order = _read_order(launcher)
    if daemon := DaemonOrder.decode(order):
        from ronde.launch.mpi.daemon import run_daemon  # only for jobs with MPI

        return run_daemon(daemon, key)
    assignment = Assignment.decode(order)
    return _run(replace(assignment, job_key=key or assignment.job_key), launcher)


class _Launcher:
    """Standard input: the assignment, then signals to pass on; its end, or a long silence, ends this agent."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.has_ended = False
        self.why = ""  # why this agent leaves, after a silence
        self._is_unread = False  # whether the launcher's output is broken

    def read_line(self) -> bytes:
        """Return the first line, incomplete if standard input ends."""
        while b"\n" not in self._rest and (data := os.read(self._fd, READ_BYTES)):
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def follow(self, silence_ns: int, patience_ns: int) -> None:
        """Read the rest in a thread. After the end or a silence, this process has `patience_ns` to end."""
        arguments = (silence_ns, patience_ns)
        threading.Thread(target=self._follow, args=arguments, name="ronde-launcher", daemon=True).start()

    def _follow(self, silence_ns: int, patience_ns: int) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while ready := poll.poll(silence_ns / 1e6):
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


def _read_order(launcher: _Launcher) -> tuple[str, bytes]:
    """Return the key that the task which started this agent may give first, and the line that says what to do."""
    first = launcher.read_line()
    if not first.startswith(KEY_LINE):
        return "", first
    return first.removeprefix(KEY_LINE).decode(), launcher.read_line()


def _run(assignment: Assignment, launcher: _Launcher) -> int:
    config = assignment.config
    spec, meeting = config.worker, config.rendezvous
    patience_ns = spec.longest_end_ns() + AGENT_END_NS
    launcher.follow(meeting.heartbeat_ns * meeting.missing_heartbeats, patience_ns)
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
            result = _run_agent(placed, variables, launcher, store if assignment.has_call else None)
        except UsageError as error:
            result = RunResult(USAGE_ERROR, str(error))
        failure = next(iter(result.failures.values()), None)
        end = JobEnd(result.exit_code, result.reason, failure, result.gave_way)
        if not launcher.has_ended:  # it can read the result
            with contextlib.suppress(RondeError):
                store.set(ended_key(assignment.agent), JOB_END.encode(end))
        elif launcher.why:  # a launcher that was only stopped will find this line
            with contextlib.suppress(OSError):
                os.write(2, f"ronde: {launcher.why}\n".encode())
        return result.exit_code
    finally:
        store.close()


def _run_agent(
    config: LaunchConfig, variables: dict[str, str], launcher: _Launcher, store: StoreClient | None
) -> RunResult:
    """Run the agent. `store`: where the call is that the workers make, and where its results go; None: a command."""
    from ronde.launch.agent.agent import run_agent

    run = partial(run_agent, report=False, meaning=launcher.original_signal)
    if store is None:
        return run(config, environment=variables)
    from ronde.launch.calls import CallFiles
    from ronde.launch.driver.job_store import DRIVER_STORE, call_of_job, send_results

    variables = {**variables, DRIVER_STORE: store.address}
    with ExitStack() as stack:
        files = CallFiles(stack, call_of_job(store, config.start_timeout_ns), config.worker.slots)
        worker = replace(config.worker, argv=files.command(sys.executable))
        result = run(replace(config, worker=worker), environment=variables, keep=files.fds)
        if not launcher.has_ended:
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
