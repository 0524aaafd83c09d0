"""The stacks of the threads of this process, and of its forked children: where they wait.

`format_stacks` asks a healthy interpreter. `StackDump` is for an interpreter that does not answer: at a certain signal,
faulthandler writes the stacks of all threads into a file in memory. Only the native watch thread sends it, and only to
itself, so it disturbs no thread of the program. The signal is a real-time signal without a handler; if every one has a
handler, reports show no stacks.

A rank may wait for a forked child, such as the worker of a DataLoader. The child keeps the signal handler of its
parent, with a file in memory that both share. The parent sends the signal and reads the stacks that faulthandler writes
(`describe_children`). Only a child that still runs the parent's program and has the handler gets the signal; for any
other child the report shows the command line.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

from ronde import _native
from ronde.net.descriptors import close_own, file_identity
from ronde.stall.reports import MOST_FRAMES, readable_stacks

__all__ = [
    "StackDump",
    "call_site",
    "describe_children",
    "format_stacks",
    "main_thread_id",
    "places_of_waits",
]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MOST_CHILDREN = 8
_CHILDREN_S = (
    0.15  # for all children together: the answer is due after kInterpretersTime_ns of cpp/waiting/stalls.h
)
_LOOK_S = 0.002
_LONGEST_FILE_NAME = 60  # characters of a call site's file


def main_thread_id() -> int:
    """Return the id of the main thread."""
    return threading.main_thread().ident or 0


def format_stacks() -> str:
    """Return the stacks of all threads but Ronde's own, the main thread's first, the innermost call first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main_thread_id()):
        name = names.get(ident, "without a name")
        if name.startswith("ronde-"):
            continue
        lines.append("main thread:" if ident == main_thread_id() else f"thread {name}:")
        for each in reversed(traceback.extract_stack(frame)[-MOST_FRAMES:]):
            lines.append(f"  File {each.filename!r}, line {each.lineno} in {each.name}".replace("'", '"'))
            if each.line:
                lines.append(f"    {each.line}")
    return "\n".join(lines)


def places_of_waits() -> list[str]:
    """Return the lines of the program whose calls of Ronde its threads are in."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    places = []
    for ident, frame in sys._current_frames().items():
        name = "main thread" if ident == main_thread_id() else names.get(ident, "a thread without a name")
        if name.startswith("ronde-") or not _is_ours(frame):
            continue
        caller = _first_of_the_program(frame)
        if caller is not None:
            code = caller.f_code
            places.append(f'File "{code.co_filename}", line {caller.f_lineno} in {code.co_name} ({name})')
    return places


def call_site() -> str:
    """Return the line of the program that calls Ronde in this thread: "train.py:12"; "" if the caller is not Python."""
    caller = _first_of_the_program(sys._getframe())
    if caller is None:
        return ""
    return f"{os.path.basename(caller.f_code.co_filename)[-_LONGEST_FILE_NAME:]}:{caller.f_lineno}"


def _first_of_the_program(frame: FrameType) -> FrameType | None:
    caller: FrameType | None = frame
    while caller is not None and _is_ours(caller):
        caller = caller.f_back
    return caller


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


class StackDump:
    """A file that a signal fills with stacks, and one for forked children. `signal`: 0 if no signal is free."""

    def __init__(self) -> None:
        self.signal, self.file, self.childrens_file = 0, -1, -1
        # Programs that use real-time signals take the first or the last ones.
        free = [
            each
            for each in range(signal.SIGRTMAX - 3, signal.SIGRTMIN + 3, -1)
            if not _native.has_handler(each)
        ]
        if not free:
            return
        self.file = os.memfd_create("ronde-stacks", os.MFD_CLOEXEC)
        self.childrens_file = os.memfd_create("ronde-stacks", os.MFD_CLOEXEC)
        self._identities = {each: file_identity(each) for each in (self.file, self.childrens_file)}
        faulthandler.register(free[0], file=self.file, all_threads=True, chain=False)
        self.signal = free[0]

    def close(self) -> None:
        """Remove the signal handler, and close the files."""
        if self.signal:
            faulthandler.unregister(self.signal)
            self._close(self.file)
            self._close(self.childrens_file)
            self.signal = 0

    def leave_to_parent(self) -> None:
        """In a forked child: write stacks for the parent from now on (`describe_children`)."""
        if self.signal:
            faulthandler.register(self.signal, file=self.childrens_file, all_threads=True, chain=False)
            self._close(self.file)

    def _close(self, descriptor: int) -> None:
        close_own(descriptor, self._identities[descriptor])


# Forked children


def describe_children(signal: int, file: int) -> list[str]:
    """Return lines with the command and the stacks of each child process. `signal`: 0 if there is no handler."""
    until_s = time.monotonic() + _CHILDREN_S
    lines = []
    children = _children_of(os.getpid())
    for pid in children[:_MOST_CHILDREN]:
        stacks = _stacks_of(pid, signal, file, until_s) if signal and _has_our_handler(pid, signal) else ""
        command = " ".join(_command(pid))
        lines.append(f"child process {pid} ({command[:80]}){':' if stacks else ''}")
        lines += [f"  {line}" for line in stacks.splitlines()]
    if len(children) > _MOST_CHILDREN:
        lines.append(f"and {len(children) - _MOST_CHILDREN} more child processes")
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
