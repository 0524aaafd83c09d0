"""A real Slurm on this machine: a controller, and a `slurmd` for each of several nodes.

    with Slurm(["n1", "n2"]) as slurm:
        slurm.run("srun", "-N2", "hostname")

All its files are in one temporary directory, and it uses free ports. The nodes are names of this machine, which only
the /etc/hosts of the jobs resolves.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.ports import free_port

__all__ = ["Slurm", "require"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo", "unshare")
START_S = 60.0
CPUS = 2  # of each node, whatever this machine has

CONFIG = """\
ClusterName=ronde
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=2
"""


@functools.cache
def require() -> str:
    """Return why Slurm cannot run here, or "" if it can."""
    if os.geteuid() != 0:
        return "a Slurm of our own needs root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"a Slurm of our own needs {', '.join(missing)} (Debian: apt install slurm-wlm munge)"
    probe = subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True)
    return "" if probe.returncode == 0 else "this machine permits no mount namespaces"


class Slurm:
    """A cluster of these nodes, for use in a `with` statement."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = list(nodes)
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self.folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="ronde-slurm-")))
            undo.callback(self._stop)
            self._write()
            self._start()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def environ(self) -> dict[str, str]:
        """The environment in which Slurm's commands find this cluster."""
        outer = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return {**outer, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands and return the completed process."""
        return subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
        )

    def logs(self) -> str:
        """Return the logs of the daemons."""
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def _write(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        (folder / "munge").mkdir(mode=0o755)
        (folder / "munge/key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge/key").chmod(0o400)
        (folder / "state").mkdir()
        names = " ".join(self._nodes)
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + f"\n127.0.0.1 {names}\n")
        host = socket.gethostname().partition(".")[0]
        text = CONFIG.format(host=host, port=free_port("127.0.0.1"), folder=folder)
        for node in self._nodes:
            (folder / f"spool-{node}").mkdir()
            text += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port('127.0.0.1')} "
                f"CPUs={CPUS} State=UNKNOWN\n"
            )
        text += f"PartitionName=all Nodes={','.join(self._nodes)} Default=YES MaxTime=10 State=UP\n"
        (folder / "slurm.conf").write_text(text)

    def _start(self) -> None:
        munge = self.folder / "munge"
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        self._daemon(
            "munged", "--foreground", "--force", *(f"--{key}={munge / name}" for key, name in files.items())
        )
        self._wait_for((munge / "socket").exists, "munged")
        self._daemon("slurmctld", "-D", "-i")
        for node in self._nodes:
            with_names = 'mount --bind "$1" /etc/hosts && exec slurmd -D -N "$2"'
            self._daemon("unshare", "-m", "sh", "-c", with_names, "sh", str(self.folder / "hosts"), node)
        self._wait_for(self._is_idle, "slurm")

    def _is_idle(self) -> bool:
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
        return lines == ["idle"] * len(self._nodes)

    def _wait_for(self, condition: object, what: str) -> None:
        assert callable(condition)
        deadline = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                raise RuntimeError(f"{what} does not come up:\n{self.logs()}")
            time.sleep(0.05)

    def _daemon(self, *command: str) -> None:
        self._daemons.append(
            subprocess.Popen(
                command,
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def _stop(self) -> None:
        """End the jobs, then the daemons that run them, and last the one that authenticates both."""
        if len(self._daemons) > 1:
            self.run("scancel", "--user=root")
            deadline = time.monotonic() + START_S
            while self.run("squeue", "--noheader").stdout.strip() and time.monotonic() < deadline:
                time.sleep(0.05)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=START_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
