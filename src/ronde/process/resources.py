"""What this process can get from its machine: processors, a free port, memory; and in one sentence what it is denied.

The machine, a container or a limit may deny a resource.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ronde.errors import UsageError
from ronde.net.addresses import LOOPBACK_REMEDY, is_loopback

__all__ = [
    "available_memory",
    "free_port",
    "shortage",
    "usable_core_numbers",
    "usable_cores",
]


# Processors, ports and memory


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(usable_core_numbers())


def usable_core_numbers() -> set[int]:
    """Return the cores on which this process may run; all cores if the kernel or a container does not tell."""
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set(range(os.cpu_count() or 1))


def free_port(address: str) -> int:
    """Return a TCP port that is free at this numeric address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            hint = f": {LOOPBACK_REMEDY}" if is_loopback(address) else ""
            raise UsageError(f"this machine has no address {address} ({error.strerror}){hint}") from None
        port: int = probe.getsockname()[1]
    return port


def available_memory(root: Path = Path("/")) -> int:
    """Return how many bytes this process can take before the kernel refuses or kills. `root`: of the file system."""
    left = [_left_of_machine(root), *_left_of_groups(root), *_left_of_addresses(root)]
    return max(0, min(left))


def _left_of_machine(root: Path) -> int:
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")


def _left_of_groups(root: Path) -> Iterator[int]:
    """Yield what the control group of this process (version 2), and those above it, leave."""
    top = root / "sys/fs/cgroup"
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            path = line.partition("0::")[2].strip("/")
            for folder in (top / path, *(top / path).parents):
                if folder.is_relative_to(top):
                    with suppress(OSError, ValueError):  # no limit here, which may be the text "max"
                        limit = int((folder / "memory.max").read_text())
                        yield limit - int((folder / "memory.current").read_text()) + _cached(folder)


def _cached(group: Path) -> int:
    """Return how many bytes of files the kernel keeps for a group, and gives up first."""
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return next((int(words[1]) for words in lines if words[0] == "inactive_file"), 0)


def _left_of_addresses(root: Path) -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int((root / "proc/self/statm").read_text().split()[0])
        yield limit - pages * os.sysconf("SC_PAGE_SIZE")


# Shortages, and what helps


_THREADS = "threads: raise the limits of processes (ulimit -u, pids.max of a container) and address space (ulimit -v)"
_MEMORY = "memory: raise the limit of address space (ulimit -v), or give the machine or container more"
_LACKING = {
    errno.EMFILE: "file descriptors: raise the limit (ulimit -n)",
    errno.ENFILE: "open files for the whole machine: raise fs.file-max",
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: _THREADS,
}
# The system calls that Ronde needs, and the first Linux that has all of them.
_CALLS = ("memfd_create", "pidfd_open", "eventfd")
_KERNEL = "5.4"


def shortage(error: BaseException) -> str:
    """Return the sentence; empty for any other error."""
    if isinstance(error, MemoryError):
        return f"this process gets no more {_MEMORY}"
    if isinstance(error, OSError):
        return _of_the_kernel(error)
    if isinstance(error, RuntimeError):
        return _of_the_native_part(str(error))
    return ""


def _of_the_native_part(message: str) -> str:
    """Return the sentence for an error of the native part, which ends with the C library's text, or of a thread."""
    if "can't start new thread" in message:
        return f"this process gets no more {_THREADS}"
    found = [what for number, what in _LACKING.items() if message.endswith(os.strerror(number))]
    return f"this process gets no more {found[0]}" if found else ""


def _of_the_kernel(error: OSError) -> str:
    number = error.errno or 0
    if number in _LACKING:
        return f"this process gets no more {_LACKING[number]}"
    if number == errno.EFBIG:
        return "the limit of file sizes is too low for shared memory, which counts as a file: ulimit -f unlimited"
    call = _failed_call(error)
    if number == errno.ENOSYS or (number == errno.EPERM and call in _CALLS):
        return (
            f"this kernel or container refuses {call or 'a system call that Ronde needs'}: use Linux {_KERNEL} or "
            f"later, and a container whose seccomp profile allows {', '.join(_CALLS)}"
        )
    return ""


def _failed_call(error: OSError) -> str:
    """Return the function of the module os that raised, if the source is available."""
    frames = traceback.extract_tb(error.__traceback__)
    found = re.search(r"\bos\.(\w+)\(", (frames[-1].line or "") if frames else "")
    return found[1] if found else ""
