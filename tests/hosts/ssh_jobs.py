"""`ronde run -H` on hosts that are network namespaces, each with an sshd: how tests start it and watch it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.hosts.ssh import SshServers

from ronde.testing.hosts import Hosts

AGENT = "ronde.launch.driver.agent_main"
PATIENCE_S = 120.0  # against hanging only
MARK = "TEST_RUN_OF_RONDE"

# Says who it is, and then does what its first argument says.
PROGRAM = """
import os, signal, socket, sys, time

rank, size, host = os.environ["RANK"], os.environ["WORLD_SIZE"], socket.gethostname()
print(f"rank {rank} of {size} on {host}", flush=True)
what = sys.argv[1] if len(sys.argv) > 1 else ""
if what == "sleep":
    time.sleep(600)
elif what == "fail" and rank == sys.argv[2]:
    raise RuntimeError("it is me")
elif what == "fail":
    time.sleep(600)
elif what == "until":  # there are so many ranks
    while int(size) != int(sys.argv[2]):
        time.sleep(600)
elif what == "reduce" or (what == "leave" and rank != sys.argv[2]):
    import numpy
    import ronde

    ronde.init()
    assert ronde.world().allreduce(numpy.ones(1000)).tolist() == [ronde.size()] * 1000
    print(f"local {ronde.local_rank()} of {ronde.local_size()}, sum {ronde.size()}", flush=True)
    ronde.shutdown()
"""


class World:
    """Hosts, their servers, and a folder with the program."""

    def __init__(self, hosts: Hosts, servers: SshServers, folder: Path) -> None:
        self.hosts, self.servers, self.folder = hosts, servers, folder
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM)

    def name(self, host: int) -> str:
        """The host's name in a list of hosts."""
        return self.hosts.ipv4(host)

    def listed(self, *hosts: int, slots: int = 1) -> str:
        """The list for -H."""
        return ",".join(f"{self.name(host)}:{slots}" for host in hosts)

    def environ(self) -> dict[str, str]:
        path = f"{self.servers.bin}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}

    def start(self, *words: str, host: int | None = None) -> RunningJob:
        """Start `ronde run` with these words, on a host or on this machine."""
        prefix = () if host is None else self.hosts.command(host)
        return RunningJob(
            [*prefix, sys.executable, "-m", "ronde", "run", *words], self.environ(), self.folder
        )

    def run(self, *words: str, host: int | None = None) -> tuple[int, str, str]:
        """Run it to its end: exit code, standard output and standard error."""
        with self.start(*words, host=host) as job:
            return job.end()

    def processes(self, host: int) -> dict[int, str]:
        """The commands of ronde's processes in that namespace, by their ids."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.hosts.command(host)[-1]], check=True, capture_output=True, text=True
        )
        found = {}
        for pid in done.stdout.split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if AGENT in command or str(self.program) in command:
                found[int(pid)] = command
        return found

    def signal_agent(self, host: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the agent of that host, and to nothing else."""
        for pid, command in self.processes(host).items():
            if command.startswith(sys.executable) and AGENT in command:
                os.kill(pid, signum)

    def is_empty(self) -> bool:
        """Whether nothing of ronde's runs on any host."""
        return not any(self.processes(host) for host in range(self.hosts.count))


class RunningJob:
    """A `ronde run` whose output goes into files, for use in a `with` statement."""

    def __init__(self, command: list[str], environ: dict[str, str], folder: Path) -> None:
        self._out = tempfile.NamedTemporaryFile(dir=folder)  # noqa: SIM115  (closed by __exit__)
        self._err = tempfile.NamedTemporaryFile(dir=folder)  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if kind:
            print(f"== stdout\n{self.out()}\n== stderr\n{self.err()}")
        self.last_out, self.last_err = self.out(), self.err()
        self._out.close()
        self._err.close()

    def out(self) -> str:
        return Path(self._out.name).read_text()

    def err(self) -> str:
        return Path(self._err.name).read_text()

    def end(self) -> tuple[int, str, str]:
        code = self.process.wait(timeout=PATIENCE_S)
        return code, self.out(), self.err()

    def says(self, text: str, times: int = 1) -> None:
        """Wait until its standard output has the text so many times."""
        wait_for(lambda: self.out().count(text) >= times or self.process.poll() is not None)
        assert self.out().count(text) >= times, f"no {text!r} in:\n{self.out()}\n{self.err()}"

    def interrupt(self) -> None:
        """As Ctrl-C does: to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@contextmanager
def make_world(count: int, rate: str | None = None) -> Iterator[World]:
    with (
        Hosts(count, rate=rate) as hosts,
        SshServers(hosts, {MARK: os.environ[MARK]}) as servers,
        tempfile.TemporaryDirectory(prefix="ronde-ssh-jobs-") as folder,
    ):
        yield World(hosts, servers, Path(folder))
