"""The stacks of this process's forked children: the workers of a DataLoader, for example, for which the rank waits.

A child keeps the signal handler of its parent (`stacks.Dump`), with a file in memory that both share. The parent sends
the signal and reads the stacks that faulthandler writes. Only a child that still runs the parent's program and has the
handler gets the signal; for any other child the report shows the command line.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from ronde.stall.reports import readable_stacks

__all__ = ["describe_children"]

_MOST = 8
_PATIENCE_S = (
    0.15  # for all children together: the answer is due after kInterpretersTime_ns of cpp/waiting/stalls.h
)
_LOOK_S = 0.002


def describe_children(signal: int, file: int) -> list[str]:
    """Return lines with the command and the stacks of each child process. `signal`: 0 if there is no handler."""
    until_s = time.monotonic() + _PATIENCE_S
    lines = []
    children = _children_of(os.getpid())
    for pid in children[:_MOST]:
        stacks = _stacks_of(pid, signal, file, until_s) if signal and _has_our_handler(pid, signal) else ""
        command = " ".join(_command(pid))
        lines.append(f"child process {pid} ({command[:80]}){':' if stacks else ''}")
        lines += [f"  {line}" for line in stacks.splitlines()]
    if len(children) > _MOST:
        lines.append(f"and {len(children) - _MOST} more child processes")
    return lines


def _children_of(pid: int) -> list[int]:
    """Return the direct children of a process; none where the kernel does not list them."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue  # a thread that has ended
    return sorted(found)


def _has_our_handler(pid: int, signal: int) -> bool:
    """Return whether the process runs the program of this one and catches the signal."""
    try:
        if os.readlink(f"/proc/{pid}/exe") != os.readlink("/proc/self/exe"):
            return False
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return _command(pid) == _command(os.getpid()) and bool(int(caught, 16) >> (signal - 1) & 1)


def _command(pid: int) -> list[str]:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode(errors="replace") for word in raw.split(b"\0") if word]


def _stacks_of(pid: int, signal: int, file: int, until_s: float) -> str:
    """Return the stacks that the child's handler writes."""
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)  # parent and child share the position
    try:
        os.kill(pid, signal)
    except OSError:
        return ""
    size = 0
    while time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        before, size = size, os.fstat(file).st_size
        if size and size == before:
            break
    main = threading.main_thread().ident or 0  # also that of a child which the main thread has forked
    stacks = readable_stacks(f"{main:#x}\n" + os.pread(file, size, 0).decode(errors="replace"))
    return stacks.partition("\nthread ")[0]  # the main thread's only
