"""Runs a command on a kernel that lacks some system calls, which a seccomp filter pretends.

python -m tests.ranks.without_calls memfd_create,pidfd_open ronde run -n 2 script.py
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

NUMBERS = {
    "x86_64": {
        "memfd_create": 319,
        "pidfd_open": 434,
        "eventfd": 290,
        "sched_getaffinity": 204,
        "accept": 43,
        "accept4": 288,
    },
    "aarch64": {
        "memfd_create": 279,
        "pidfd_open": 434,
        "eventfd": 19,
        "sched_getaffinity": 123,
        "accept": 202,
        "accept4": 242,
    },
}
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 22, 38, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000


class Program(ctypes.Structure):
    """As the kernel takes it: struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def refuse(numbers: Sequence[int]) -> None:
    """Let these calls fail with ENOSYS from here on, in this process and all that come from it."""
    steps = [(LOAD_WORD, 0, 0, 0)]
    for index, number in enumerate(numbers):
        steps.append((JUMP_IF_EQUAL, len(numbers) - index, 0, number))
    steps += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERROR | errno.ENOSYS)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = Program(len(steps), ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    of_machine = NUMBERS[platform.machine()]
    refuse([of_machine[name] for name in sys.argv[1].split(",")])
    os.execvp(sys.argv[2], sys.argv[2:])
