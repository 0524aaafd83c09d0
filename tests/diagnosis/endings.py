"""Ranks that end too early: by exceptions, exits and signals."""

from __future__ import annotations

import pytest
from tests.diagnosis.failure import VARIATION, Failure

FAILURES = [
    Failure(
        "an exception before anything else",
        """
        if rank == 1:
            raise ValueError("no such file: data.csv")
        world.barrier()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) failed with exit code 1 after ",
            r"ronde: the traceback of rank 1 was:",
            r"line 7, in <module>",
            r"ValueError: no such file: data.csv",
        ),
    ),
    Failure(
        "an exception in a later step",
        """
        for step in range(100):
            world.allreduce(np.ones(1000))
            if step == 40 and rank == 0:
                raise FloatingPointError(f"the loss diverged in step {step}")
        """,
        (
            r"\[1\] ronde.errors.PeerLostError: rank 0 ",
            r"ronde: rank 0 \(pid \d+\) failed with exit code 1 after",
            r"ronde: rank 1 ended with exit code 1 because of that",
            r"FloatingPointError: the loss diverged in step 40",
        ),
        marks=VARIATION,
    ),
    Failure(
        "an exception is shown once, with the program's frames",
        """
        def lose():
            raise ValueError("no such column")
        def meet():
            world.barrier()
        if rank:
            lose()
        meet()
        """,
        (
            r"\A(?=[\s\S]*^\[1\] ValueError: no such column \(the traceback follows in the report\)\n)",
            r"\[0\]     world.barrier\(\)\n\[0\] ronde.errors.PeerLostError: rank 1 ",
            r"ronde: the traceback of rank 1 was:",
            r"line 7, in lose\n        raise ValueError\(\"no such column\"\)\n    ValueError: no such column",
        ),
        never=(r"raise ValueError[\s\S]*raise ValueError", r"/comm/communicator.py"),
    ),
    Failure(
        "all frames of an exception, at the level debug",
        "world.barrier() if rank == 0 else [][rank]",
        (r"\A(?=[\s\S]*^\[1\] Traceback)", r"/comm/communicator.py", r"ronde: the traceback of rank 1 was:"),
        never=("follows in the report",),
        environment={"RONDE_LOG_LEVEL": "debug"},
        marks=VARIATION,
    ),
    Failure(
        "two mistakes at once",
        """
        try:
            if rank == 1:
                raise KeyError("learning_rate")
            raise OSError("the disk is gone")
        finally:
            time.sleep(0.5)
        """,
        (
            r"ronde: the traceback of rank \d was:",
            r"raise (Key|OS)Error",
            r"ronde: the traceback of rank \d was:",
        ),
        never=(r"raise KeyError[\s\S]*raise KeyError", r"raise OSError[\s\S]*raise OSError"),
    ),
    Failure(
        "two mistakes at once, and forty lines after them",
        """
        import atexit
        atexit.register(print, "\\n".join(["saved"] * 50), file=sys.stderr)
        try:
            if rank == 1:
                raise KeyError("learning_rate")
            raise OSError("the disk is gone")
        finally:
            time.sleep(0.5)
        """,
        (r"raise (Key|OS)Error", r"ronde: the traceback of rank \d was:", r"raise (Key|OS)Error"),
        never=(r"raise KeyError[\s\S]*raise KeyError", r"raise OSError[\s\S]*raise OSError"),
        marks=VARIATION,
    ),
    Failure(
        "a mistake with another standard error, before a restart that succeeds",
        """
        if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            raise ValueError("not yet")
        world.barrier()
        """,
        (
            r"starting all workers again",
            r"ronde: the traceback of rank 1 was:",
            r"raise ValueError",
            r"not yet",
        ),
        exit_code=0,
        never=(r"raise ValueError[\s\S]*raise ValueError",),
        options=("-n", "2", "--max-restarts", "1"),
        marks=VARIATION,
    ),
    Failure(
        "a mistake before a restart that succeeds",
        """
        if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("not yet")
        world.barrier()
        """,
        (
            r"starting all workers again",
            r"ronde: the traceback of rank 1 was:",
            r"raise ValueError",
            r"not yet",
        ),
        exit_code=0,
        never=(r"raise ValueError[\s\S]*raise ValueError",),
        options=("-n", "2", "--max-restarts", "1"),
    ),
    Failure(
        "an exception with its traceback in the log of its rank",
        "if rank: raise ValueError('the cause')\nworld.barrier()",
        (r"^Traceback", r"line 6, in <module>", r"^ValueError: the cause\n\Z"),
        exit_code=0,
        options=("-n", "2", "--log-dir", "logs", "--redirects", "3"),
        shell='"$@" > /dev/null 2>&1; cat logs/*/attempt_0/1/stderr.log; exit 0',
        marks=VARIATION,
    ),
    Failure(
        "a message of 10 MB",
        "if rank: raise ValueError('y' * 10_000_000)\nworld.barrier()",
        (
            r"\[1\] ValueError: yyyy.* \(9,999,\d+ characters left out\) .*yyyy",
            r"ronde: the traceback of rank 1 was:",
            r'script.py", line 6, in <module>',
            r"ValueError: yyyy.* characters left out\) .*yyyy",
        ),
        never=(r"y{10000}", "py_callstack"),
    ),
    Failure(
        "a debugger that is left",
        "breakpoint()\nprint('the end')",
        (
            r"BdbQuit: the debugger was left at File \".*script.py\", line \d+, in <module>; it has no standard input",
        ),
        never=("Traceback", r"BdbQuit[\s\S]*BdbQuit"),
        options=("-n", "1"),
    ),
    Failure(
        "an exception, and seconds until the rank has ended",
        """
        if rank == 1:
            import atexit
            atexit.register(time.sleep, 4)
            try:
                raise ValueError("the cause")
            finally:
                ronde.shutdown()
        world.barrier()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) failed with exit code 1 after ",
            r"ronde: rank 0 ended with exit code 1 because of that",
            r"ValueError: the cause",
        ),
        never=("ended by the launcher",),
        marks=(pytest.mark.slow,),
    ),
    Failure(
        "an exit code, and seconds until the rank has ended",
        """
        if rank == 1:
            import atexit
            atexit.register(time.sleep, 5)
            ronde.shutdown()
            sys.exit(3)
        world.barrier()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) failed with exit code 3 after ",
            r"ronde: rank 0 ended with exit code 1 because of that",
        ),
        exit_code=3,
        never=("ended by the launcher",),
        marks=(pytest.mark.slow,),
    ),
    Failure(
        "an exception while another thread lives on",
        """
        if rank == 1:
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise ValueError("the cause")
        world.barrier()
        """,
        (
            r"ronde: still running 3 s after rank 1 raised ValueError: the cause: SIGTERM to ranks 0, 1",
            r"ronde: rank 1 \(pid \d+\) raised ValueError: the cause after ",
            r"ronde: the traceback of rank 1 was:",
            r"ValueError: the cause",
        ),
        options=("-n", "2", "--shutdown-timeout", "1"),
        marks=(pytest.mark.slow,),
    ),
    Failure(
        "an exception in a thread",
        """
        def load():
            raise OSError("the disk is gone")
        if rank == 1:
            loader = threading.Thread(target=load, name="loader")
            loader.start()
            loader.join()
            sys.exit("rank 1 has no data")
        world.barrier()
        """,
        (
            r"Exception in thread loader",
            r"ronde: rank 1 \(pid \d+\) failed with exit code 1",
            r"OSError: the disk is gone",
            r"rank 1 has no data",
        ),
    ),
    Failure(
        "an exception on every rank",
        """
        raise KeyError(f"learning_rate of rank {rank}")
        """,
        (r"ronde: rank \d \(pid \d+\) failed with exit code 1", r"KeyError: 'learning_rate of rank \d'"),
        marks=VARIATION,
    ),
    Failure(
        "an exit with a code of its own",
        """
        if rank == 1:
            sys.exit(3)
        world.barrier()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) failed with exit code 3",
            r"rank 0 ended with exit code 1 because of that",
        ),
        exit_code=3,
        marks=VARIATION,
    ),
    Failure(
        "an exit while another thread lives on",
        """
        if rank == 1:
            threading.Thread(target=time.sleep, args=(600,), name="loader").start()
            sys.exit(3)
        world.barrier()
        """,
        (
            r"begun by rank 0, not by rank 1",
            r"rank 1 on \S+ is here",
            r"threading.py\", line \d+ in _shutdown",
            r"thread loader:",
            r"AbortedError: .*stalled for 2 s .*: waited for rank 1",
        ),
        options=("-n", "2", "--shutdown-timeout", "1"),
        environment={"RONDE_STALL_WARNING": "1", "RONDE_STALL_SHUTDOWN": "2"},
        marks=(pytest.mark.slow,),
    ),
    Failure(
        "an exit after the outputs are closed",
        """
        if rank == 1:
            os.close(1)
            os.close(2)
            sys.exit(3)
        world.barrier()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) failed with exit code 3",
            r"rank 0 ended with exit code 1 because of that",
        ),
        exit_code=3,
        marks=VARIATION,
    ),
    Failure(
        "an exit without Python's cleaning up",
        """
        if rank == 1:
            os._exit(7)
        world.barrier()
        """,
        (
            r"PeerLostError: rank 1 on \S+ was lost: its process ended without shutting down",
            r"ronde: rank 1 \(pid \d+\) failed with exit code 7",
        ),
        exit_code=7,
        marks=VARIATION,
    ),
    Failure(
        "another program in its place",
        """
        if rank == 1:
            os.execv("/bin/sleep", ["sleep", "60"])
        world.barrier()
        """,
        (
            r"ronde: still running 3 s after rank 1 replaced its program: SIGTERM to rank 1",
            r"ronde: rank 1 \(pid \d+\) left the other ranks without ronde.shutdown\(\) after [\d.]+ s: it replaced",
            r"its program by `sleep 60` \(os.exec\*\), or closed its connections",
            r"ronde: rank 0 ended with exit code 1 because of that",
        ),
        marks=(pytest.mark.slow,),
    ),
    Failure(
        "kill -9",
        """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
        """,
        (r"ronde: rank 1 \(pid \d+\) was killed by SIGKILL after [\d.]+ s \(out of memory\?\)",),
        exit_code=137,
    ),
    Failure(
        "no memory for an array",
        """
        if rank == 1:
            np.ones(1 << 57, np.float64)
        world.barrier()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) failed with exit code 1",
            r"_ArrayMemoryError: Unable to allocate 1.00 EiB",
        ),
        marks=VARIATION,
    ),
    Failure(
        "a segmentation fault",
        """
        import ctypes
        def read_nowhere():
            ctypes.string_at(0)
        if rank == 1:
            read_nowhere()
        world.barrier()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) was killed by SIGSEGV after",
            r"Fatal Python error: Segmentation fault",
            r'script.py", line 8 in read_nowhere',
        ),
        never=(r"    Thread 0x", r"    Extension modules"),
        exit_code=139,
    ),
    Failure(
        "a segmentation fault that Python is told not to show",
        """
        import ctypes
        if rank == 1:
            ctypes.string_at(0)
        world.barrier()
        """,
        (r"ronde: rank 1 \(pid \d+\) was killed by SIGSEGV after",),
        exit_code=139,
        never=("Fatal Python error",),
        environment={"PYTHONFAULTHANDLER": ""},
        marks=VARIATION,
    ),
    Failure(
        "an exception in the handling of a lost rank, which ends later",
        """
        if rank == 1:
            ronde.shutdown()
            time.sleep(1)
            sys.exit(7)
        try:
            world.barrier()
        except ronde.PeerLostError:
            raise RuntimeError("cannot save the model")
        """,
        (
            r"\[0\] RuntimeError: cannot save the model",
            r"ronde: rank 1 \(pid \d+\) failed with exit code 7",
            r"ronde: rank 0 ended with exit code 1 because of that",
        ),
        exit_code=7,
        marks=VARIATION,
    ),
    Failure(
        "an abort in a library",
        """
        def give_up():
            os.abort()
        if rank == 1:
            give_up()
        world.barrier()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) was killed by SIGABRT after",
            r"Fatal Python error: Aborted",
            r'script.py", line 7 in give_up',
        ),
        exit_code=134,
        marks=VARIATION,
    ),
    Failure(
        "a file that shrinks while it is mapped",
        """
        import mmap
        if rank == 1:
            with open("data", "wb+") as file:
                file.truncate(mmap.PAGESIZE)
                data = mmap.mmap(file.fileno(), mmap.PAGESIZE)
                file.truncate(0)
                print(data[0])
        world.barrier()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) was killed by SIGBUS after",
            r"Fatal Python error: Bus error",
            r'script.py", line 12 in <module>',
        ),
        exit_code=135,
        marks=VARIATION,
    ),
    Failure(
        "a rank that leaves before the others",
        """
        for _ in range(3 - rank):
            world.allreduce(np.ones(3))
        """,
        (
            r"PeerLostError: rank 1 on \S+ has shut down after 2 collective calls and takes no part in this one",
        ),
    ),
    Failure(
        "a rank that is stopped",
        """
        if rank == 1:
            parent = os.getpid()
            if os.fork() == 0:
                time.sleep(4)
                os.kill(parent, signal.SIGKILL)
                os._exit(0)
            os.kill(parent, signal.SIGSTOP)
        world.barrier()
        """,
        (
            r"ronde: rank 1 \(pid (\d+)\) is stopped by a signal .*, and the job waits for it: kill -CONT \1 ",
            r"ronde: rank 1 \(pid \d+\) was killed by SIGKILL",
        ),
        exit_code=137,
        marks=(pytest.mark.slow,),
    ),
]
