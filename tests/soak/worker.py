"""A program: a worker of the soak. It works, records facts, and fails on command.

Each worker writes its facts into a file, one per line, with the time of the clock that all processes of a machine
share. It writes a fact after the event, so every recorded fact is true even if the worker then dies. Commands are
files, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["SOAK_FOLDER"])
STEP_S = 0.02
MOST_STEPS = 60_000  # nobody works for ever, whatever happens to who started it
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
Meeting = tuple[Callable[[int, bool], tuple[int, int]], Callable[[], Any]]


class Facts:
    """What this worker says of itself."""

    def __init__(self) -> None:
        # Not a standard stream's number, which the worker may close.
        self._fd = os.open(FOLDER / "facts" / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, what: str, **facts: Any) -> None:
        line = json.dumps({"what": what, "at": time.monotonic_ns(), **facts})
        os.write(self._fd, f"{line}\n".encode())


def alone(facts: Facts) -> Meeting:
    """No communication: everybody is as far as he is."""
    return (lambda count, done: (count * SIZE, SIZE if done else 0)), (lambda: None)


def by_ronde(facts: Facts) -> Meeting:
    import numpy

    import ronde

    ronde.init()

    def reduce(count: int, done: bool) -> tuple[int, int]:
        total = ronde.world().allreduce(numpy.array([count, int(done)], dtype=numpy.int64), op=ronde.Sum)
        return int(total[0]), int(total[1])

    return reduce, ronde.shutdown


def by_gloo(facts: Facts) -> Meeting:
    import torch
    import torch.distributed

    torch.distributed.init_process_group("gloo")

    def reduce(count: int, done: bool) -> tuple[int, int]:
        total = torch.tensor([count, int(done)])
        torch.distributed.all_reduce(total)
        return int(total[0]), int(total[1])

    return reduce, torch.distributed.destroy_process_group


def obey(facts: Facts) -> None:
    """Do what the file of orders says, if there is one."""
    path = FOLDER / "orders" / str(os.getpid())
    with suppress(FileNotFoundError):
        order = path.read_text()
        path.unlink()
        facts.add("obeys", order=order)
        if order == "exit 0":
            os._exit(0)
        if order == "exit 3":
            os._exit(3)
        if order == "raise":
            raise RuntimeError("as ordered")
        if order == "fork":  # it holds the pipes of its parent
            subprocess.Popen(["sleep", "600"])
        if order == "fork and exit 3":
            subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & wait"])
            os._exit(3)
        if order == "flood":
            with suppress(OSError):
                for _ in range(64):
                    os.write(1, (b"x" * 1023 + b"\n") * 64)
        if order == "close":
            os.close(1)
            os.open(os.devnull, os.O_WRONLY)
        if order == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main() -> None:
    facts = Facts()
    names = ("RONDE_STORE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    said_of_us = {name.lower(): os.environ[name] for name in names}
    logs = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
    facts.add("begins", rank=RANK, size=SIZE, agent=os.environ["SOAK_AGENT"], logs=logs, **said_of_us)
    reduce, end = {"alone": alone, "ronde": by_ronde, "gloo": by_gloo}[sys.argv[1]](facts)
    for count in range(MOST_STEPS):
        total, done = reduce(count, (FOLDER / "done").exists())
        if total != count * SIZE:
            facts.add("wrong", total=total, count=count)
        facts.add("acts", count=count)
        with suppress(OSError):  # the disk is full
            os.write(1, f"said {os.getpid()} {count}\n".encode())
            facts.add("said", count=count)
        if done == SIZE:
            break
        obey(facts)
        time.sleep(STEP_S)
    end()
    facts.add("ends")


if __name__ == "__main__":
    main()
