"""A real Flink on this machine, for tests: a JobManager and two TaskManagers of one slot, each a JVM.

One cluster serves all modules of a test run, because its start takes as long as a test.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.cluster_kinds import SLOTS, engine_environment
from tests.ports import free_ports

__all__ = ["Flink", "flink_cluster", "table_environment"]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 480  # against hanging only
JOB_MANAGER = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
TASK_MANAGER = "org.apache.flink.runtime.taskexecutor.TaskManagerRunner"

# Small memory matters here. Flink's scripts would start another JVM to compute these sizes.
CONFIGURATION = """\
jobmanager.rpc.address: 127.0.0.1
jobmanager.bind-host: 127.0.0.1
jobmanager.rpc.port: {rpc}
jobmanager.memory.process.size: 700m
rest.address: 127.0.0.1
rest.bind-address: 127.0.0.1
rest.port: {rest}
taskmanager.host: 127.0.0.1
taskmanager.bind-host: 127.0.0.1
taskmanager.numberOfTaskSlots: 1
taskmanager.cpu.cores: 1.0
taskmanager.memory.task.heap.size: 64m
taskmanager.memory.task.off-heap.size: 0m
taskmanager.memory.framework.heap.size: 64m
taskmanager.memory.framework.off-heap.size: 64m
taskmanager.memory.network.min: 16m
taskmanager.memory.network.max: 16m
taskmanager.memory.managed.size: 32m
taskmanager.memory.jvm-metaspace.size: 128m
taskmanager.memory.jvm-overhead.min: 64m
taskmanager.memory.jvm-overhead.max: 64m
io.tmp.dirs: {folder}
heartbeat.interval: 500
resourcemanager.standalone.start-up-time: 1000
heartbeat.timeout: 20000
"""


class Flink:
    """A running cluster. `settings`: what a program needs to reach it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        rest, rpc = free_ports(2, "127.0.0.1")
        (folder / "config.yaml").write_text(CONFIGURATION.format(rest=rest, rpc=rpc, folder=folder))
        self.settings = {
            "execution.target": "remote",
            "rest.address": "127.0.0.1",
            "rest.port": str(rest),
            "python.executable": sys.executable,
        }
        self._url = f"http://127.0.0.1:{rest}"
        self._folder, self._stack = folder, stack
        self._start(JOB_MANAGER)
        self.task_managers: list[subprocess.Popen[bytes]] = []

    def replace_lost(self) -> None:
        """Start TaskManagers in the place of those that tests have killed, and wait until all slots are free."""
        self.task_managers = [process for process in self.task_managers if process.poll() is None]
        while len(self.task_managers) < SLOTS:
            self.task_managers.append(self._start(TASK_MANAGER))
        self.wait_for_slots(SLOTS)

    def wait_for_slots(self, free: int) -> None:
        """Wait until this number of slots is free."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with suppress(OSError):
                if self.ask("overview")["slots-available"] == free:
                    return
            assert time.monotonic() < deadline, (self._folder / "log").read_text()[-4000:]
            time.sleep(0.1)

    def ask(self, what: str, method: str = "GET") -> Any:
        """Return what the REST interface answers."""
        request = urllib.request.Request(f"{self._url}/{what}", method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())

    def _start(self, program: str) -> subprocess.Popen[bytes]:
        import pyflink

        home = Path(pyflink.__path__[0])
        opened = "--add-opens=java.base/java.nio=ALL-UNNAMED"  # for Arrow, as in the configuration that Flink ships
        options = ("-Xmx160m", opened, f"-Djava.io.tmpdir={self._folder}", "-cp", f"{home}/lib/*")
        command = ("java", *options, program, "--configDir", str(self._folder))
        with (self._folder / "log").open("ab") as log, engine_environment():
            environ = {**os.environ, "PYTHONPATH": str(ROOT)}  # functions of test modules
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
        self._stack.enter_context(process)
        self._stack.callback(_end_session, process)
        return process


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a JVM and its Python workers. Those of a TaskManager that was killed before may hang for ever."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def flink_cluster() -> Iterator[Flink]:
    """Yield the cluster, with all its slots free. The first use starts it, and the JVM by which this process talks."""
    pytest.importorskip("pyflink", reason="PyFlink is not installed here")
    if not shutil.which("java"):
        pytest.skip("needs Java (Debian: apt install default-jre-headless)")
    flink = _cluster_of_this_process()
    flink.replace_lost()
    yield flink


@functools.cache
def _cluster_of_this_process() -> Flink:
    _start_gateway()
    stack = ExitStack()
    atexit.register(stack.close)
    return Flink(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flink-"))), stack)


def table_environment(flink: Flink, **settings: str) -> Any:
    """Return a new environment for tables on the cluster. Keyword arguments: further settings, "__" for each dot."""
    from pyflink.common import Configuration
    from pyflink.datastream import StreamExecutionEnvironment
    from pyflink.java_gateway import get_gateway
    from pyflink.table import StreamTableEnvironment

    java = get_gateway().jvm.org.apache.flink.streaming.api.environment.StreamExecutionEnvironment
    others = {name.replace("__", "."): value for name, value in settings.items()}
    configuration = Configuration.from_dict({**flink.settings, **others})
    return StreamTableEnvironment.create(StreamExecutionEnvironment(java(configuration._j_configuration)))


def _start_gateway() -> None:
    """Start PyFlink's JVM, once. PyFlink would forget its process, with open pipes."""
    from pyflink import java_gateway

    def launch(*args: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = start(*args)
        atexit.register(process.communicate)
        atexit.register(process.kill)
        return process

    start = java_gateway.launch_gateway_server_process
    with pytest.MonkeyPatch.context() as patch, engine_environment():
        patch.setattr(java_gateway, "launch_gateway_server_process", launch)
        gateway = java_gateway.get_gateway()
    atexit.register(
        gateway.shutdown
    )  # else Py4J would print an error for each Java object that Python still has
