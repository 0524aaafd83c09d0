"""Runs a function as another, unprivileged user, like an attacker on the same machine.

It starts a new process, because a fork of this one, whose threads may hold locks, could hang.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

__all__ = ["NOBODY", "as_nobody", "start_as_nobody"]

NOBODY = 65534
# What is else loaded when it is needed, by a user who may not read the files of this Python.
LATE = ("encodings.idna", "hashlib", "hmac", "ronde.net.authentication")


def as_nobody(do: Callable[..., object], *arguments: object) -> str:
    """Return how `do` ends in a process of another user: the name of its exception and what that says, or "done".

    `do` is found by its module and name in a fresh interpreter; it prints nothing.
    """
    with start_as_nobody(do, *arguments) as process:
        return process.communicate(timeout=120)[0]


def start_as_nobody(do: Callable[..., object], *arguments: object) -> subprocess.Popen[str]:
    """Return a process of another user that calls `do`, with pipes for input and output, and prints how that ends."""
    call = pickle.dumps((do, arguments)).hex()
    return subprocess.Popen(
        [sys.executable, "-m", "tests.other_user", call],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def main() -> None:
    do, arguments = pickle.loads(bytes.fromhex(sys.argv[1]))
    for module in LATE:
        importlib.import_module(module)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    try:
        do(*arguments)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", end="")
    else:
        print("done", end="")


if __name__ == "__main__":
    main()
