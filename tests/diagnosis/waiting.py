"""Ranks that wait for each other, or for an event that never comes."""

from __future__ import annotations

import pytest
from tests.diagnosis.failure import Failure


def stall(name: str, program: str, *says: str) -> Failure:
    """It is reported after 1 s, and ended after 2."""
    limits = {"RONDE_STALL_WARNING": "1", "RONDE_STALL_SHUTDOWN": "2"}
    return Failure(
        name,
        program,
        says,
        environment=limits,
        options=("-n", "2", "--shutdown-timeout", "1"),
        marks=(pytest.mark.slow,),
    )


FAILURES = [
    stall(
        "a rank that sleeps",
        """
        def load_batch():
            time.sleep(60)
        if rank == 1:
            load_batch()
        world.allreduce(np.ones(3))
        """,
        r"stalled: 1 call has been waiting for 1 s",
        r"call 1 on world: allreduce of 3 float64 by sum",
        r"begun by rank 0, not by rank 1",
        r"this rank waits here: .*script.py\", line 10",
        r"rank 1 on \S+ is here",
        r'script.py", line 7 in load_batch',
        r"AbortedError: .*stalled for 2 s .*: waited for rank 1",
    ),
    stall(
        "a rank that sleeps while others wait for a tensor",
        """
        def load_batch():
            time.sleep(60)
        if rank == 1:
            load_batch()
        ronde.allreduce(np.ones(3), name="loss")
        """,
        r"stalled: 1 tensor has been waiting for 1 s",
        r"'loss' \(allreduce\)",
        r"submitted by rank 0, not by rank 1",
        r"rank 1 on \S+ is here",
        r'script.py", line 7 in load_batch',
        r"AbortedError: .*stalled for 2 s .*: tensor 'loss' \(allreduce\): waited for rank 1",
    ),
    stall(
        "a rank that keeps the interpreter's lock",
        """
        def search():
            import ctypes
            ctypes.pythonapi.sleep(8)
        if rank == 1:
            search()
        world.allreduce(np.ones(3))
        """,
        r"begun by rank 0, not by rank 1",
        r"rank 1 on \S+ is here",
        r'script.py", line 8 in search',
    ),
    stall(
        "ranks that wait for each other's names",
        "ronde.allreduce(np.ones(3), name='a' if rank else 'b')",
        r"rank 0 on \S+ waits for 'b' \(allreduce\)|rank 1 on \S+ waits for 'a' \(allreduce\)",
        r"AbortedError: .*stalled for 2 s .*: tensor '[ab]' \(allreduce\): waited for rank",
    ),
    stall(
        "both ranks receive",
        "world.recv(np.empty(3), source=1 - rank)",
        r"recv from rank \d on world: float64 with tag 0",
        r"AbortedError: .*stalled for 2 s .*: recv from rank \d on world",
    ),
    stall(
        "one all-reduce more than the other rank, which lives",
        """
        for _ in range(3 - rank):
            world.allreduce(np.ones(3))
        def evaluate():
            time.sleep(60)
        evaluate()
        """,
        r"call 3 on world: allreduce of 3 float64 by sum",
        r"begun by rank 0, not by rank 1",
        r"rank 1 on \S+ has made 2 collective calls",
        r'script.py", line 9 in evaluate',
    ),
]
