"""Describes a resource that the kernel, a container or a limit denies, in one sentence with the remedy."""

from __future__ import annotations

import errno
import os
import re
import traceback

__all__ = ["shortage"]

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
