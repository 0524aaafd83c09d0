"""Functions that tests call in workers. These would import pytest, too, if the functions were in a test file."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ronde
import ronde.elastic


def place(*args: Any, **kwargs: Any) -> tuple[int, int, tuple[Any, ...], dict[str, Any]]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args, kwargs


def speak(word: str) -> None:
    print(word)
    print(f"not {word}", file=sys.stderr)


def parent() -> str:
    """Return the id of the parent process."""
    return f"{os.getppid()} {Path(f'/proc/{os.getppid()}/cmdline').read_text()}"


def together(value: float) -> float:
    import numpy

    ronde.init()
    return float(ronde.world().allreduce(numpy.full(1, value + ronde.rank()))[0])


def sizes(factor: int) -> tuple[int, int, int, float]:
    import numpy

    ronde.init()
    total = ronde.allreduce(numpy.ones(3) * factor, op=ronde.Sum)
    return ronde.rank(), ronde.local_rank(), ronde.local_size(), float(total[0])


def greet() -> None:
    print("rank", os.environ["RANK"], "speaks", os.environ["GREETING"])
    print("rank", os.environ["RANK"], "is done", file=sys.stderr)


def protection() -> str:
    return os.environ["RONDE_PROTECTION"]


def exits(code: int) -> None:
    sys.exit(code)


def module_path() -> tuple[list[str], list[str]]:
    return sys.path, sys.argv


def one_fails() -> None:
    if os.environ["RANK"] == "1":
        print("about to fail")
        raise LookupError("no such thing")
    time.sleep(60)


def fails_again(noted: Path) -> None:
    """Fail on rank 1, and write down how often."""
    if os.environ["RANK"] == "1":
        with noted.open("a") as file:
            file.write("x")
        raise LookupError(f"attempt {len(noted.read_text())}")
    time.sleep(60)


def raises_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError("the cause")


def dies_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def exits_late(code: int) -> None:
    """Exit with the code on rank 1, which leaves rank 0 and then spends seconds in an exit handler."""
    ronde.init()
    if ronde.rank() == 1:
        atexit.register(time.sleep, 12)
        ronde.shutdown()
        sys.exit(code)
    ronde.barrier()


def waits() -> None:
    print("ready", flush=True)
    time.sleep(600)


def leaves() -> None:
    sys.exit(0)


def big(size_bytes: int) -> bytes:
    return bytes([int(os.environ["RANK"])]) * size_bytes


def cannot_be_sent() -> object:
    return (number for number in range(3))


class Unreadable:
    """An object that can be pickled but not unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("nonsense",)


def second_time_lucky(folder: str) -> str:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    Path(folder, f"{attempt}.{os.environ['RANK']}").touch()
    if attempt == 0:
        raise ValueError("not yet")
    return f"attempt {attempt}"


def exit_together(folder: str) -> None:
    """Exit with a code that depends on the rank, once all ranks have arrived."""
    Path(folder, os.environ["RANK"]).touch()
    while len(os.listdir(folder)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    os._exit(10 + int(os.environ["RANK"]))


class Notes:
    """Writes a file when it is deleted, and refers to itself."""

    def __init__(self, path: Path) -> None:
        self.itself, self.path = self, path

    def __del__(self) -> None:
        self.path.write_text("all")


def leave_notes(folder: Path) -> None:
    """Leave garbage: of the call, of a function at exit, and of a thread that ends after the call."""

    def write_later() -> None:
        threading.main_thread().join()
        Notes(folder / "thread")

    Notes(folder / "call")
    atexit.register(lambda: Notes(folder / "exit"))
    threading.Thread(target=write_later).start()


def goes_on(folder: Path) -> tuple[int, int, int]:
    """Train until both ranks are there, after rank 1 has lost its agent; return the rank, the size and the losses."""

    @ronde.elastic.run
    def train(state: ronde.elastic.ObjectState) -> tuple[int, int]:
        killed = folder / "killed"
        while state.step < 20 or ronde.size() < 2:
            if state.step == 10 and ronde.rank() == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getppid(), signal.SIGKILL)
            ronde.allreduce(1.0, name="x")
            state.step += 1
            state.commit()
        return ronde.rank(), ronde.size()

    return *train(ronde.elastic.ObjectState(step=0)), ronde.elastic.goodput().recoveries
