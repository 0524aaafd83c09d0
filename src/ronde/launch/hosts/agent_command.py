"""The command that starts an agent on another host, and the assignment that the agent gets.

The command line carries nothing secret and nothing long: it starts this Python with
`ronde.launch.hosts.remote_agent`, which says hello and then reads one line, its `Assignment`, from standard input.
Standard input stays open until the launcher no longer needs the agent.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib import metadata

from ronde.core.rendezvous.membership import Failure
from ronde.core.typed_json import TypedJson
from ronde.errors import ProtocolError, UsageError
from ronde.launch.config import LaunchConfig, Ssh
from ronde.light_dataclasses import dataclass, field
from ronde.net.addresses import Address, is_ours, resolve_all
from ronde.net.authentication import PROTOCOL_VERSION

__all__ = [
    "HELLO",
    "LAST_WORD",
    "Assignment",
    "LastWord",
    "agent_command",
    "ended_key",
    "hello",
    "is_here",
    "ssh_command",
    "travelling",
]

HELLO = b"ronde agent "
NAME_NS = 2 * 10**9  # how long a name server may take to resolve a host's name

# The variables that agents on other hosts get. Those that describe this machine or process (devices, addresses) do not
# travel. A prefix is listed only if all variables with it are settings: other programs keep secrets under theirs.
_TRAVELS = frozenset((
    "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH",
    "PYTHONPLATLIBDIR", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE",
    "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONWARNINGS",
    "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONFAULTHANDLER", "PYTHONMALLOC",
    "PYTHONTRACEMALLOC", "PYTHONASYNCIODEBUG", "PYTHONDEVMODE", "PYTHON_GIL",
    "GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT",
    "TORCH_HOME", "TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL",
    "TORCH_SHOW_CPP_STACKTRACES",
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OMP_SCHEDULE", "OMP_DYNAMIC",
    "OMP_WAIT_POLICY", "OMP_STACKSIZE", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS",
    "OMP_DISPLAY_ENV",
    "MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "MKL_DYNAMIC", "MKL_CBWR",
    "MKL_VERBOSE", "MKL_THREADING_LAYER", "MKL_INTERFACE_LAYER",
    "MKL_ENABLE_INSTRUCTIONS", "MKL_SERVICE_FORCE_INTEL",
))  # fmt: skip
_PREFIXES = ("RONDE_", "HOROVOD_", "PET_", "NCCL_", "TORCH_NCCL_")
_STAYS = frozenset(
    ("RONDE_STORE", "RONDE_HOST_ID", "RONDE_JOB_ID", "RONDE_ROUND", "PET_NODE_RANK", "HOROVOD_HOSTNAME")
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(^|_)(API_?KEY|KEY|AUTH)(_|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Assignment:
    """The assignment that an agent gets after its hello.

    `agent`: its name. `stores`: the addresses at which the job's store may be reached, the likely ones first.
    `environment`: variables that override the host's.
    """

    agent: str
    job_key: str = field(repr=False)
    stores: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    config: LaunchConfig

    def encode(self) -> bytes:
        """Return the assignment as one line."""
        return _ASSIGNMENT.encode(self) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Assignment:
        """Return the assignment in a line of `encode`. Raises UsageError, without the line, which has the job key."""
        try:
            return _ASSIGNMENT.decode(line)
        except ProtocolError:
            raise UsageError(
                "an agent is started by `ronde run -H`, which tells it what to do, with the same version of Ronde"
            ) from None


@dataclass(frozen=True)
class LastWord:
    """How the job ended, as an agent leaves it in the job's store.

    `failure`: the job's first one; `gave_way`: the job may go on without the agent's node.
    """

    exit_code: int
    reason: str
    failure: Failure | None
    gave_way: bool


_ASSIGNMENT: TypedJson[Assignment] = TypedJson(Assignment, "assignment of an agent")
LAST_WORD: TypedJson[LastWord] = TypedJson(LastWord, "last word of an agent")


def hello() -> bytes:
    """Return an agent's greeting, with its version of Ronde."""
    try:
        version = metadata.version("ronde")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return HELLO + f"{version} protocol {PROTOCOL_VERSION}\n".encode()


def ended_key(agent: str) -> str:
    """Return the key of an agent's last word in the job's store."""
    return f"agents/{agent}/ended"


def is_here(name: str, own_addresses: list[str]) -> bool:
    """Return whether a host in a list is this machine, by its name, one of its addresses, or as localhost."""
    own_name = socket.gethostname()
    if name in ("localhost", "127.0.0.1", "::1", own_name, *own_addresses):
        return True
    if name.partition(".")[0] != own_name.partition(".")[0]:  # other names need no name server
        return False
    (endpoints,) = resolve_all([Address(host=name, port=9)], NAME_NS)  # with its domain, or without it
    return any(is_ours(endpoint) for endpoint in endpoints)


def travelling(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an agent on another host gets; none that is named like a secret."""
    return {name: value for name, value in environment.items() if _travels(name)}


def _travels(name: str) -> bool:
    if name in _TRAVELS:
        return True
    return name.startswith(_PREFIXES) and name not in _STAYS and not _SECRET.search(name)


def agent_command() -> list[str]:
    """Return the command that starts an agent on this machine.

    -P keeps the directory in which it starts out of its module path.
    """
    return [sys.executable, "-P", "-m", "ronde.launch.hosts.remote_agent"]


def ssh_command(
    name: str, ssh: Ssh, config: LaunchConfig, environment: Mapping[str, str], connect_s: int
) -> list[str]:
    """Return the command that starts an agent on another host. Raises UsageError if there is no `ssh`.

    ssh asks no questions, checks host keys as the user configured it, and ends when the host is silent for longer than
    a node may be. It forwards neither the user's ssh agent (-a) nor the display (-x).
    """
    program = shutil.which("ssh", path=environment.get("PATH"))
    if program is None:
        raise UsageError(
            "there is no `ssh` in PATH, by which other hosts are reached: install openssh-client"
        )
    rendezvous = config.rendezvous
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": connect_s,
        "ServerAliveInterval": max(1, rendezvous.heartbeat_ns // 10**9),
        "ServerAliveCountMax": rendezvous.missing_heartbeats,
    }
    words = [program, "-T", "-a", "-x", *(f"-o{option}={value}" for option, value in options.items())]
    if ssh.port is not None:
        words.append(f"-p{ssh.port}")
    if ssh.identity_file is not None:
        words.append(f"-i{ssh.identity_file}")
    # Before Python runs: only the variables that it needs to find Ronde, in a form that any shell understands.
    python = [f"{key}={environment[key]}" for key in ("PYTHONPATH", "PYTHONHOME") if key in environment]
    return [*words, "--", name, "exec " + shlex.join(["env", *python, *agent_command()])]
