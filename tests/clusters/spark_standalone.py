"""A standalone Spark on hosts that are network namespaces: a master, and two workers with GPUs that are only names.

    with StandaloneSpark() as spark:
        results = spark.drive("program", {"spark.executor.cores": "1"})  # a function of `spark_programs`

Each host has a second interface, `docker0`, whose address is the same on all of them, like that of a bridge for
containers. The workers' hosts reach each other by a third one only, `direct`, which also leads to the master, as
executors fetch from each other, and the master calls workers. Programs run on a host that does not have it, or behind a
NAT, on a host that reaches the others through a router.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from tests.clusters.spark_session import PATIENCE_S, ROOT, until_it_listens
from tests.conformance.cluster_kinds import engine_environment

from ronde.testing.hosts import Hosts

__all__ = ["DIRECT", "GPUS", "PORTS", "WORKERS", "StandaloneSpark"]

MASTER, *WORKERS, ROUTER = range(4)
DIRECT = {0: "10.77.0.3", 1: "10.77.0.1", 2: "10.77.0.2"}  # of the network between workers, by host
GPUS = {1: ("0", "1"), 2: ("4", "5")}  # by the worker's host
CORES = 4  # of each worker
MASTER_PORT = 7077
EVERYWHERE = "172.17.0.1"  # of docker0, on every host
# The addresses of the driver behind the NAT, and of its router there.
INSIDE, OUTSIDE = ("10.88.0.2", "10.88.0.1")
PORTS = (4040, 4041, 4042, 4043)  # which the router forwards
NAT = """
table ip nat {{
  chain prerouting {{ type nat hook prerouting priority dstnat; tcp dport {{ {ports} }} dnat to {inside} ; }}
  chain postrouting {{ type nat hook postrouting priority srcnat; oifname "eth0" masquerade; }}
}}
"""


class StandaloneSpark:
    """The cluster, for use in a `with` statement. `ipv6`: the hosts have no IPv4 addresses on their network."""

    def __init__(self, ipv6: bool = False) -> None:
        import pyspark

        self._home = Path(pyspark.__file__).parent
        self._ipv6, self._stack = ipv6, ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._hosts = stack.enter_context(Hosts(4))
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spark-")))
            for host in range(4):
                self._arrange_interfaces(host)
            if not self._ipv6:
                self._separate_workers()
            stack.enter_context(engine_environment())
            self._start(stack, MASTER, "master.Master", "--port", str(MASTER_PORT))
            until_it_listens(self.address(MASTER).strip("[]"), MASTER_PORT)
            for host in WORKERS:
                size = ("--cores", str(CORES), "--memory", "8g")
                place = ("--work-dir", str(self._folder / f"worker-{host}"))
                self._start(stack, host, "worker.Worker", *size, *place, self.master)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def master(self) -> str:
        """The URL of the master."""
        return f"spark://{self.address(MASTER)}:{MASTER_PORT}"

    def address(self, host: int) -> str:
        """Return the address of a host as Spark writes it."""
        return f"[{self._hosts.ipv6(host)}]" if self._ipv6 else self._hosts.ipv4(host)

    def _listening_address(self, host: int) -> str:
        return DIRECT[host] if host in WORKERS and not self._ipv6 else self.address(host)

    def drive(self, program: str, settings: Mapping[str, str], **arguments: Any) -> Any:
        """Run a function of `spark_programs` on a host, with a session; return its result."""
        given = {"spark.driver.host": self.address(ROUTER), **settings}
        return self._drive(self._hosts.command(ROUTER), program, given, arguments)

    def drive_behind_nat(self, program: str, settings: Mapping[str, str], **arguments: Any) -> Any:
        """Run it on a host behind the router, which forwards PORTS: Spark needs the first two."""
        given = {
            "spark.driver.host": self.address(ROUTER),
            "spark.driver.bindAddress": INSIDE,
            "spark.driver.port": str(PORTS[0]),
            "spark.driver.blockManager.port": str(PORTS[1]),
            **settings,
        }
        with ExitStack() as stack:
            return self._drive(self._behind_nat(stack), program, given, arguments)

    def _drive(
        self,
        command: tuple[str, ...],
        program: str,
        settings: Mapping[str, str],
        arguments: Mapping[str, Any],
    ) -> Any:
        output = self._folder / "result"
        code = f"import tests.clusters.spark_programs as p; p.run_program({str(output)!r})"
        task = {"program": program, "arguments": arguments, "settings": {**self._settings(), **settings}}
        done = subprocess.run(
            [*command, sys.executable, "-c", code],
            input=json.dumps(task),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(output.read_text())

    def _settings(self) -> dict[str, str]:
        return {
            "spark.master": self.master,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.executorEnv.PYTHONPATH": str(ROOT),
            "spark.cores.max": "2",
            "spark.executor.extraJavaOptions": self._java_options(),
            "spark.driver.extraJavaOptions": self._java_options(),
        }

    def _java_options(self) -> str:
        return "-Djava.net.preferIPv6Addresses=true" if self._ipv6 else ""

    def _environment(self) -> dict[str, str]:
        preference = {"SPARK_PREFER_IPV6": "true"} if self._ipv6 else {}
        return {
            **os.environ,
            "SPARK_HOME": str(self._home),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            **preference,
        }

    def _start(self, stack: ExitStack, host: int, name: str, *words: str) -> None:
        """Start a service of Spark on a host, and end it with the stack."""
        options = self._java_options()
        if host in GPUS:
            script = self._folder / f"gpus-{host}"
            script.write_text(
                "#!/bin/sh\necho '" + json.dumps({"name": "gpu", "addresses": GPUS[host]}) + "'\n"
            )
            script.chmod(0o755)
            gpu = "-Dspark.worker.resource.gpu"
            options += f" {gpu}.amount={len(GPUS[host])} {gpu}.discoveryScript={script}"
        command = [str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *words]
        variables = {
            "SPARK_MASTER_OPTS": options,
            "SPARK_WORKER_OPTS": options,
            "SPARK_DAEMON_MEMORY": "256m",
        }
        log = stack.enter_context((self._folder / f"log-{host}").open("wb"))
        service = stack.enter_context(
            subprocess.Popen(
                [
                    *self._hosts.command(host),
                    *command,
                    "--host",
                    self._listening_address(host),
                    "--webui-port",
                    "0",
                ],
                env={**self._environment(), **variables},
                stdout=log,
                stderr=log,
            )
        )
        stack.callback(service.terminate)

    # The network

    def _arrange_interfaces(self, host: int) -> None:
        self._ip(host, "link add docker0 type bridge")
        self._ip(host, f"address add {EVERYWHERE}/16 dev docker0")
        self._ip(host, "link set docker0 up")
        if self._ipv6:
            self._ip(host, "-4 address flush dev eth0")

    def _separate_workers(self) -> None:
        """Lose frames between the hosts of the workers, but on a network that only they and the master have."""
        first, second = WORKERS
        self._hosts.block(first, second)
        self._hosts.block(second, first)
        self._ip(MASTER, "link add direct type bridge")
        for host in WORKERS:
            to_host = f"direct-{host}"
            self._ip(
                MASTER, f"link add {to_host} type veth peer name direct netns {self._hosts.command(host)[-1]}"
            )
            self._ip(MASTER, f"link set {to_host} master direct up")
        for host in (MASTER, *WORKERS):
            self._ip(host, f"address add {DIRECT[host]}/24 dev direct")
            self._ip(host, "link set direct up")

    def _behind_nat(self, stack: ExitStack) -> tuple[str, ...]:
        """Make a host that reaches the others through ROUTER only; return how to run a command there."""
        router = self._hosts.command(ROUTER)
        name = f"{router[-1]}x"
        _run("ip", "netns", "add", name)
        stack.callback(_run, "ip", "netns", "delete", name)
        self._ip(ROUTER, f"link add inside type veth peer name eth0 netns {name}")
        self._ip(ROUTER, f"address add {OUTSIDE}/24 dev inside")
        self._ip(ROUTER, "link set inside up")
        for line in (
            f"address add {INSIDE}/24 dev eth0",
            "link set eth0 up",
            "link set lo up",
            f"route add default via {OUTSIDE}",
        ):
            _run("ip", "-n", name, *line.split())
        _run(*router, "sysctl", "-q", "net.ipv4.ip_forward=1")
        rules = NAT.format(ports=", ".join(map(str, PORTS)), inside=INSIDE)
        _run(*router, "nft", rules)
        return (*router[:-1], name)

    def _ip(self, host: int, words: str) -> None:
        _run(*self._hosts.command(host), "ip", *words.split())


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
