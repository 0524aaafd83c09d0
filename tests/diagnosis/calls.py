"""Ranks whose calls do not fit together."""

from __future__ import annotations

import pytest
from tests.diagnosis.failure import VARIATION, Failure

DIFFERENT = """
import os
os.environ["RONDE_ALLREDUCE_ALGORITHM"] = ["ring", "direct"][int(os.environ["RANK"])]
import ronde
ronde.init()
"""


def mismatch(name: str, program: str, *says: str, marks: tuple[pytest.MarkDecorator, ...] = ()) -> Failure:
    """All ranks get a MismatchError that says this."""
    return Failure(name, program, (r"ronde.errors.MismatchError: ", *says), marks=marks)


FAILURES = [
    mismatch(
        "different shapes",
        "world.allreduce(np.ones(3 + rank))",
        r"rank 0 called allreduce of 3 float64 by sum, but rank 1 called allreduce of 4 float64 by sum",
    ),
    mismatch(
        "different types",
        "world.allreduce(np.ones(3, [np.float32, np.float64][rank]))",
        r"rank 0 called allreduce of 3 float32 by sum, but rank 1 called allreduce of 3 float64 by sum",
        marks=VARIATION,
    ),
    mismatch(
        "different reductions",
        "world.allreduce(np.ones(3), op=[ronde.Sum, ronde.Max][rank])",
        r"rank 0 called allreduce of 3 float64 by sum, but rank 1 called allreduce of 3 float64 by max",
        marks=VARIATION,
    ),
    mismatch(
        "different roots",
        "world.broadcast(np.ones(3), root=rank)",
        r"rank 0 called broadcast of 3 float64 with root 0, but rank 1 called broadcast of 3 float64 with root 1",
        marks=VARIATION,
    ),
    mismatch(
        "different calls",
        "world.allreduce(np.ones(3)) if rank else world.allgather(np.ones(3))",
        r"rank 0 called allgather of .*, but rank 1 called allreduce of 3 float64 by sum",
        marks=VARIATION,
    ),
    mismatch(
        "calls in another order",
        """
        calls = [lambda: world.broadcast(np.ones(2), root=0), lambda: world.allreduce(np.ones(2))]
        for call in calls if rank else calls[::-1]:
            call()
        """,
        r"rank 0 called allreduce of 2 float64 by sum, but rank 1 called broadcast of 2 float64 with root 0",
        marks=VARIATION,
    ),
    Failure(
        "splits that do not add up",
        "world.alltoall(np.ones(6), splits=[3, 3 + rank])",
        (r"UsageError: splits needs 2 numbers >= 0 that add up to 6", r"ronde: rank 1 \(pid \d+\) failed"),
        marks=VARIATION,
    ),
    mismatch(
        "a named tensor of different shapes",
        "ronde.allreduce(np.ones(3 + rank), name='loss')",
        r"tensor 'loss': rank 0 submitted allreduce with shape \(3,\), but rank 1 with shape \(4,\)",
        marks=VARIATION,
    ),
    mismatch(
        "a named tensor of different types",
        "ronde.allreduce(np.ones(3, [np.float32, np.float64][rank]), name='loss')",
        r"tensor 'loss': rank 0 submitted allreduce with dtype float32, but rank 1 with dtype float64",
        marks=VARIATION,
    ),
    mismatch(
        "a name for different operations",
        "ronde.allreduce(np.ones(3), name='x') if rank else ronde.allgather(np.ones(3), name='x')",
        r"tensor 'x': rank 0 submitted allgather, but rank 1 allreduce",
        marks=VARIATION,
    ),
    mismatch(
        "different process sets",
        "ronde.add_process_set([rank])",
        r"the process set to add is \[0\] on rank 0 and \[1\] on rank 1: it must be the same on all ranks",
        marks=VARIATION,
    ),
    Failure(
        "one call more on one rank",
        "for _ in range(2 + rank): ronde.allreduce(np.ones(3))",
        (
            r"PeerLostError: rank 0 on \S+ has shut down .*: it has failed, or submits fewer operations",
            r"ronde: rank 1 \(pid \d+\) failed with exit code 1",
            r"ronde: rank 0 succeeded",
        ),
    ),
    Failure(
        "an all-reduce on one rank only",
        """
        ronde.allreduce(np.ones(3), name="gradient")
        if rank == 0:
            ronde.allreduce(np.ones(1), name="loss")
        """,
        (
            r"PeerLostError: rank 1 on \S+ has shut down .*: it has failed, or submits",
            r"if ranks have different numbers of batches, call join\(\) after the last batch",
            r"ronde: rank 0 \(pid \d+\) failed with exit code 1",
            r"ronde: rank 1 succeeded",
        ),
        marks=VARIATION,
    ),
    Failure(
        "different settings",
        "",
        (
            r"allreduce_algorithm is 'ring' on rank 0 and 'direct' on rank 1: it must be the same on all ranks",
        ),
        beginning=DIFFERENT,
    ),
    Failure(
        "an object that cannot be pickled",
        """
        import threading
        ronde.broadcast_object(threading.Lock() if rank == 0 else None, root=0)
        """,
        (
            r"\[1\] ronde.errors.RemoteError: rank 0 cannot pickle its object: ",
            r"ronde: rank 0 \(pid \d+\) failed with exit code 1",
            r"TypeError: cannot pickle '_thread.lock' object",
        ),
        marks=VARIATION,
    ),
    Failure(
        "the world after shutdown",
        """
        ronde.shutdown()
        ronde.world().barrier()
        """,
        (r"NotInitializedError: Ronde is not initialized in this process: call ronde.init\(\) first",),
        marks=VARIATION,
    ),
    Failure(
        "a communicator after shutdown",
        """
        ronde.shutdown()
        world.barrier()
        """,
        (r"UsageError: this communicator has been shut down",),
        marks=VARIATION,
    ),
    Failure(
        "a call in a forked child",
        """
        child = os.fork()
        if child == 0:
            world.barrier()
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
        """,
        (r"UsageError: this communicator belongs to the parent of this forked process",),
        marks=VARIATION,
    ),
    Failure(
        "no init",
        "ronde.allreduce([1.0])",
        (r"NotInitializedError: .*call ronde.init\(\) first",),
        beginning="import ronde\n",
    ),
    Failure(
        "join in two threads",
        """
        if rank == 0:
            threading.Thread(target=ronde.join, daemon=True).start()
            time.sleep(0.2)
            ronde.join()
        world.barrier()
        """,
        (r"UsageError: .*join",),
        marks=VARIATION,
    ),
    Failure(
        "a broadcast whose root has joined",
        "ronde.join() if rank == 0 else (ronde.broadcast(np.ones(3), root=0), ronde.join())",
        (
            r"MismatchError: tensor '\S+': the root of the broadcast, rank 0, has joined: it has nothing to send",
        ),
        marks=VARIATION,
    ),
    Failure(
        "a list instead of an array",
        "world.allreduce([1, 2, 3])",
        (r"expected an array .* got list; convert it with numpy.asarray",),
        marks=VARIATION,
    ),
    Failure(
        "a dict instead of an array",
        "ronde.broadcast({'weight': np.ones(3)}, 0)",
        (r"expected an array .* got dict; to send other objects, use broadcast_object\(\) or",),
        marks=VARIATION,
    ),
    Failure(
        "an operation in the place of a name",
        "ronde.allreduce(np.ones(3), ronde.Sum)",
        (r"UsageError: the second argument is the name, not the reduction; write op=ronde.Sum",),
    ),
    Failure(
        "unnamed operations in another order",
        """
        first, second = np.ones(3), np.full(3, 10.0)
        if rank == 0:
            ronde.allreduce(first)
            ronde.allreduce(second)
        else:
            ronde.allreduce(second)
            ronde.allreduce(first)
        """,
        (r"WARNING.*unnamed operation .* script.py:8 on rank 0 and at script.py:11 on rank 1",),
        exit_code=0,
        marks=VARIATION,
    ),
    Failure(
        "a number that is none, where it comes from",
        """
        for step in range(3):
            gradient = np.ones((2, 4), np.float32)
            if rank == 1 and step == 2:
                gradient[1, 3] = np.nan
            ronde.allreduce(gradient, name="layer3.weight")
        """,
        (r"tensor 'layer3.weight' has nan at \[1, 3\] on rank 1 on \S+, submitted for the 3rd time",),
        options=("-n", "2", "--check-finite", "raise"),
        marks=VARIATION,
    ),
    Failure(
        "a rank that does not exist",
        "world.send(np.ones(3), dest=2)",
        (
            r"UsageError: cannot send to or receive from rank 2: rank \d has the other ranks of 0 to 1 as peers",
        ),
        marks=VARIATION,
    ),
]
