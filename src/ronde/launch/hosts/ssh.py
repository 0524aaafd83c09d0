"""Other machines by ssh: the command that starts an agent there, and the variables that travel with it.

The command line carries nothing secret and nothing long: the agent gets its assignment by standard input, which stays
open until the launcher no longer needs it.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
from collections.abc import Mapping

from ronde.errors import UsageError
from ronde.launch.config import LaunchConfig, Ssh
from ronde.launch.driver.driver_messages import agent_command
from ronde.net.addresses import Address, is_ours, resolve_all

__all__ = ["is_here", "settings_that_travel", "ssh_command", "travelling"]

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


def settings_that_travel(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings among the variables that travel: without those that say where programs and modules are."""
    return {name: value for name, value in environment.items() if _is_setting(name)}


def _travels(name: str) -> bool:
    return name in _TRAVELS or _is_setting(name)


def _is_setting(name: str) -> bool:
    return name.startswith(_PREFIXES) and name not in _STAYS and not _SECRET.search(name)


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
