"""Network namespaces that stand for hosts, each with its address, and real TCP between them.

    reason = hosts.require()            # "" or why it cannot be done here: not root, no `ip`
    with Hosts(2, ranks_per_host=2) as two:
        two.run(program)                # on 4 ranks; ronde.local_size() is 2

Each host is a namespace `ronde-PID-INDEX` with one interface, `eth0`, plugged into the bridge `ronde-PID`, which is
the switch between them and belongs to the machine itself, like the store in which the ranks meet. The end of the `with`
block removes everything; the next process removes the remains of a killed one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

from ronde.errors import UsageError
from ronde.testing.ranks import Job, Place, start

__all__ = ["Hosts", "require"]

MOST_HOSTS = 9  # an interface name has 15 characters
SWITCH = 254  # the bridge's number in the network

Result = TypeVar("Result")


@functools.cache
def require() -> str:
    """Return why this process cannot make hosts, or "" if it can. Raises nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip` (package iproute2)"
    probe = f"ronde-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
    except subprocess.CalledProcessError as error:
        return f"this machine permits no network namespaces: {error.stderr.strip()}"
    _ip("netns", "delete", probe)
    return ""


class Hosts:
    """Hosts that reach each other by IPv4 and IPv6; for use in a `with` statement.

        with Hosts(2, ranks_per_host=2) as two:
            two.run(program)

    Args:
        count: The number of hosts, 1 to 9.
        ranks_per_host: The number of ranks that `start` and `run` put on each host (1).
        rate: The limit of what each host can send, as `tc` reads it: "1gbit" (None: no limit).

    Raises:
        UsageError: A number is out of range, or `require` gives a reason.
    """

    def __init__(self, count: int, ranks_per_host: int = 1, rate: str | None = None) -> None:
        if not 1 <= count <= MOST_HOSTS:
            raise UsageError(f"the number of hosts must be 1 to {MOST_HOSTS}, not {count}")
        if ranks_per_host < 1:
            raise UsageError(f"the number of ranks per host must be at least 1, not {ranks_per_host}")
        if reason := require():
            raise UsageError(reason)
        self.count = count
        self.ranks_per_host = ranks_per_host
        self._rate = rate
        self._switch = f"ronde-{os.getpid()}"
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        _take_down_leftovers()
        with contextlib.ExitStack() as undo:
            undo.callback(_take_down, os.getpid())
            _ip("link", "add", self._switch, "type", "bridge")
            self._address(SWITCH, self._switch, ())
            _ip("link", "set", self._switch, "up")
            for host in range(self.count):
                self._plug_in(host)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def command(self, host: int) -> tuple[str, ...]:
        """Return the beginning of a command line that runs on a host. Raises nothing.

            subprocess.run([*two.command(1), "ping", "-c1", two.ipv4(0)])

        Args:
            host: The number of the host, from 0.
        """
        return ("ip", "netns", "exec", self._name(host))

    def processes(self, host: int) -> list[int]:
        """Return the ids of the processes that run on a host now.

        Args:
            host: The number of the host, from 0.

        Raises:
            subprocess.CalledProcessError: The command `ip` fails, for example outside of the `with` block.
        """
        return [int(pid) for pid in _ip("netns", "pids", self._name(host)).split()]

    def ipv4(self, host: int) -> str:
        """Return the host's IPv4 address. Raises nothing.

        Args:
            host: The number of the host, from 0; `SWITCH` (254) for the machine itself.
        """
        number = os.getpid() % 512  # 198.18.0.0/15 is reserved for tests of networks
        return f"198.{18 + number // 256}.{number % 256}.{host + 1 if host != SWITCH else SWITCH}"

    def ipv6(self, host: int) -> str:
        """Return the host's IPv6 address. Raises nothing.

        Args:
            host: The number of the host, from 0; `SWITCH` (254) for the machine itself.
        """
        return f"fd72:6f6e:6465:{os.getpid() % 65536:x}::{host + 1:x}"

    def store_address(self, ipv6: bool = False) -> str:
        """Return an address, with port 0, at which all hosts reach a store of this process. Raises nothing.

        Args:
            ipv6: Return an IPv6 address (default: IPv4).
        """
        return f"tcp:[{self.ipv6(SWITCH)}]:0" if ipv6 else f"tcp:{self.ipv4(SWITCH)}:0"

    def places(self) -> list[Place]:
        """Return a place for each rank, host by host, for `ranks.start`. Raises nothing."""
        places = []
        for host in range(self.count):
            for local_rank in range(self.ranks_per_host):
                environ = {
                    "LOCAL_RANK": str(local_rank),
                    "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
                    "GROUP_RANK": str(host),
                    "GROUP_WORLD_SIZE": str(self.count),
                }
                places.append(Place(self.command(host), environ))
        return places

    def start(
        self, fn: Callable[..., Any], *args: Any, environ: Mapping[str, str] | None = None, ipv6: bool = False
    ) -> Job:
        """Start `fn(*args)` on all ranks of all hosts and return the job, to be used in a `with` statement.

        Args:
            fn: As of `ranks.run`.
            args: As of `ranks.run`.
            environ: Variables for all ranks, in addition to those of this process (default: none).
            ipv6: Let the ranks meet by IPv6 (default: by IPv4).

        Raises:
            UsageError: The function cannot be imported by other processes, or nothing can listen for the ranks, for
                example outside of the `with` block.
            OSError: A process cannot be started.
        """
        places, address = self.places(), self.store_address(ipv6)
        return start(fn, len(places), *args, environ=environ, places=places, store_address=address)

    def run(
        self,
        fn: Callable[..., Result],
        *args: Any,
        environ: Mapping[str, str] | None = None,
        ipv6: bool = False,
        timeout_s: float = 120.0,
    ) -> list[Result]:
        """Call `fn(*args)` on all ranks of all hosts and return the results in the order of ranks.

        Args:
            fn: As of `ranks.run`.
            args: As of `ranks.run`.
            environ: As of `start`.
            ipv6: As of `start`.
            timeout_s: How long the call waits for the results, in seconds (120).

        Raises:
            RemoteError: A rank failed (`.rank`, `.traceback_text`).
            TimeoutError: A rank was still busy after `timeout_s`. The error has the stacks of such ranks.
            UsageError, OSError: As of `start`.
        """
        with self.start(fn, *args, environ=environ, ipv6=ipv6) as job:
            return job.results(timeout_s)

    def disconnect(self, host: int) -> None:
        """Pull the host's cable: frames are lost without an error.

        Args:
            host: The number of the host, from 0.

        Raises:
            subprocess.CalledProcessError: The command `ip` fails, for example outside of the `with` block.
        """
        _ip("link", "set", self._name(host), "nomaster")

    def reconnect(self, host: int) -> None:
        """Plug the host's cable in again.

        Args:
            host: The number of the host, from 0.

        Raises:
            subprocess.CalledProcessError: The command `ip` fails, for example outside of the `with` block.
        """
        _ip("link", "set", self._name(host), "master", self._switch)

    def block(self, sender: int, receiver: int) -> None:
        """Lose all frames from one host to another without an error; the other direction works.

        Args:
            sender: The number of the host whose frames are lost, from 0; `SWITCH` (254) for the machine itself.
            receiver: The number of the host that does not get them; likewise.

        Raises:
            subprocess.CalledProcessError: The command `ip` fails, for example outside of the `with` block.
        """
        # Frames go to a hardware address that no interface has.
        for address in self._addresses(receiver):
            nowhere = ("lladdr", "02:00:00:00:00:00", "dev", self._interface(sender), "nud", "permanent")
            _ip(*self._inside(sender), "neigh", "replace", address, *nowhere)

    def unblock(self, sender: int, receiver: int) -> None:
        """Let frames from one host reach another again.

        Args:
            sender: As of `block`.
            receiver: As of `block`.

        Raises:
            subprocess.CalledProcessError: This direction is not blocked.
        """
        for address in self._addresses(receiver):
            _ip(*self._inside(sender), "neigh", "delete", address, "dev", self._interface(sender))

    @contextlib.contextmanager
    def delayed(self, host: int, delay_ms: int) -> Iterator[None]:
        """Delay all frames from and to the host, for the length of a `with` block.

        Args:
            host: The number of the host, from 0.
            delay_ms: The delay in each direction, in milliseconds.

        Raises:
            subprocess.CalledProcessError: The command `ip` fails, for example outside of the `with` block.
            RuntimeError: The program that delays the frames has failed.
        """
        name, ends = self._name(host), (f"{self._name(host)}a", f"{self._name(host)}b")
        with contextlib.ExitStack() as undo:
            _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            undo.callback(_ip, "link", "delete", ends[0])
            _ip("link", "set", ends[0], "up")
            _ip("link", "set", ends[1], "master", self._switch, "up")
            self.disconnect(host)
            undo.callback(self.reconnect, host)
            relay = [sys.executable, "-m", "ronde.testing.delay", name, ends[0], str(delay_ms)]
            process = undo.enter_context(subprocess.Popen(relay, stdout=subprocess.PIPE))
            undo.callback(process.kill)
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("the relay that delays packets has failed")
            yield

    def _inside(self, host: int) -> tuple[str, ...]:
        return () if host == SWITCH else ("-n", self._name(host))

    def _interface(self, host: int) -> str:
        return self._switch if host == SWITCH else "eth0"

    def _addresses(self, host: int) -> tuple[str, str]:
        return self.ipv4(host), self.ipv6(host)

    def _name(self, host: int) -> str:
        """Return the name of the host's namespace, and of its port in the switch."""
        return f"{self._switch}-{host}"

    def _plug_in(self, host: int) -> None:
        name = self._name(host)
        inside = ("-n", name)
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", name, "master", self._switch, "up")
        _ip(*inside, "link", "set", "lo", "up")
        self._address(host, "eth0", inside)
        _ip(*inside, "link", "set", "eth0", "up")
        if self._rate:
            limit = ["tbf", "rate", self._rate, "burst", "512kb", "latency", "20ms"]
            _command("tc", *inside, "qdisc", "add", "dev", "eth0", "root", *limit)

    def _address(self, host: int, interface: str, inside: tuple[str, ...]) -> None:
        _ip(*inside, "address", "add", f"{self.ipv4(host)}/24", "dev", interface)
        # nodetect: the address is usable at once instead of after a second
        _ip(*inside, "address", "add", f"{self.ipv6(host)}/64", "dev", interface, "nodad")


def _ip(*arguments: str) -> str:
    return _command("ip", *arguments)


def _command(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _take_down(pid: int) -> None:
    """Remove everything that the process has made, complete or not."""
    for name in _namespaces_of(pid):
        _ip("netns", "delete", name)
        with contextlib.suppress(subprocess.CalledProcessError):  # usually gone together with its other end
            _ip("link", "delete", name)
    if pathlib.Path(f"/sys/class/net/ronde-{pid}").exists():
        _ip("link", "delete", f"ronde-{pid}")


def _namespaces_of(pid: int) -> list[str]:
    return re.findall(rf"^(ronde-{pid}-\w+)", _ip("netns", "list"), flags=re.MULTILINE)


def _take_down_leftovers() -> None:
    links = [path.name for path in pathlib.Path("/sys/class/net").iterdir()]
    for pid in {
        int(found) for found in re.findall(r"\bronde-(\d+)", " ".join([_ip("netns", "list"), *links]))
    }:
        if not pathlib.Path(f"/proc/{pid}").exists():
            _take_down(pid)
