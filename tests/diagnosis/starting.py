"""Jobs that cannot begin."""

from __future__ import annotations

import sys

import pytest
from tests.diagnosis.failure import VARIATION, Failure

# Listens at a port, and then is `ronde run`.
LISTEN = """
import os, socket, sys
listener = socket.create_server(("0.0.0.0", 24567))
listener.set_inheritable(True)
os.execvp(sys.argv[1], sys.argv[1:])
"""
RANK = "import os, sys, time\nrank = int(os.environ['RANK'])\n"


def refused(name: str, *says: str, options: tuple[str, ...] = ("-n", "2"), **more: object) -> Failure:
    """`ronde run` itself refuses it, in one sentence."""
    return Failure(name, "", says, 2, options=options, never=("Traceback",), within_s=15, **more)  # type: ignore[arg-type]


FAILURES = [
    refused("a script that does not exist", r"script 'missing.py' not found in /", command=("missing.py",)),
    refused(
        "an option that does not exist",
        r"unknown option --nprocs; did you mean --nproc-per-node\?",
        options=("--nprocs", "2"),
    ),
    refused(
        "a number of workers that is none",
        r"-n two .*: expected a whole number above 0",
        options=("-n", "two"),
    ),
    refused("no workers", r"-n 0 .*: expected a whole number above 0", options=("-n", "0")),
    refused("no script", r"no script given: write, for example, ronde run -n 4 train.py", command=()),
    refused(
        "a log directory that cannot be made",
        r"cannot write logs to /proc/logs: .*--log-dir must name a directory that is writable or can be created",
        options=("-n", "2", "--log-dir", "/proc/logs"),
    ),
    refused(
        "a job key that is none",
        r"RONDE_JOB_KEY",
        options=("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:34568"),
        environment={"RONDE_JOB_KEY": "secret"},
    ),
    refused(
        "a port that is taken",
        r"cannot serve at tcp:127.0.0.1:24567: Address already in use; end the process that uses it",
        options=("-n", "2", "--master-port", "24567"),
        shell="set -- " + sys.executable + " -c '" + LISTEN + '\' "$@"',
    ),
    Failure(
        "a module that does not exist",
        "",
        (r"ronde: rank \d \(pid \d+\) failed with exit code 1", r"No module named trainer"),
        options=("-n", "2", "-m"),
        command=("trainer",),
    ),
    Failure(
        "a module that one rank lacks",
        "if rank == 1: import bitsandbites\ntime.sleep(60)",
        (
            r"ronde: still running 3 s after rank 1 failed: SIGTERM to rank 0",
            r"ronde: rank 1 \(pid \d+\) failed with exit code 1",
            r"ModuleNotFoundError: No module named 'bitsandbites'",
        ),
        beginning=RANK,
        marks=(pytest.mark.slow,),
    ),
    Failure(
        "a file that hides a module of Python",
        "import csv\ncsv.reader([])",
        (
            r"ronde: rank \d \(pid \d+\) failed with exit code 1",
            r"AttributeError: module 'csv' has no attribute 'reader'",
            r"^    /.*/csv.py hides Python's module 'csv' from this program: rename it\n",
        ),
        beginning="",
        shell="echo > csv.py",
    ),
    Failure(
        "a file that hides an installed module",
        "",
        (
            r"ronde: rank \d \(pid \d+\) failed with exit code 1",
            r"AttributeError: module 'numpy' has no attribute ",
            r"^    /.*/numpy.py hides the installed module 'numpy' from this program: rename it\n",
        ),
        beginning="import ronde\nronde.init()\n",
        shell="echo > numpy.py",
        marks=VARIATION,
    ),
    Failure(
        "a file that hides a module from the launcher",
        "",
        (
            r"\ATraceback ",
            r"^AttributeError: module 'selectors' has no attribute ",
            r"^/.*/selectors.py hides Python's module 'selectors' from this program: rename it, or",
            r" run the command `ronde` instead of `python -m ronde`\n\Z",
        ),
        shell="echo > selectors.py",
    ),
    Failure(
        "a syntax error",
        "for step in range(10) print(step)",
        (r"ronde: rank \d \(pid \d+\) failed with exit code 1", r"script.py\", line 6", r"SyntaxError: "),
    ),
    Failure(
        "an argument that the script does not know",
        "import argparse; argparse.ArgumentParser().parse_args()",
        (
            r"ronde: rank \d \(pid \d+\) failed with exit code 2",
            r"script.py: error: unrecognized arguments: --epoch 3",
        ),
        exit_code=2,
        beginning="",
        command=("script.py", "--epoch", "3"),
    ),
    Failure(
        "a world of another size",
        "import ronde; ronde.init(rank=rank, size=3)",
        (
            r"UsageError: size=3 contradicts WORLD_SIZE=2 of the environment \(ronde run\); leave size out, or start",
        ),
        beginning=RANK,
        marks=VARIATION,
    ),
    Failure(
        "a rank that never comes",
        "import ronde\nif rank: time.sleep(60)\nronde.init()",
        (
            r"TimeoutError: waited (2|1\.\d+) s for rank 1 of 2 to join at .*; every rank must call ronde.init\(\) w",
        ),
        beginning=RANK,
        options=("-n", "2", "--shutdown-timeout", "1"),
        environment={"RONDE_START_TIMEOUT": "2"},
        marks=(pytest.mark.slow,),
    ),
    Failure(
        "a setting that is none",
        "",
        (r"UsageError: RONDE_TCP_STREAMS='many' .*: expected a whole number from 1 to 64",),
        environment={"RONDE_TCP_STREAMS": "many"},
        marks=VARIATION,
    ),
    Failure(
        "a network interface that does not exist",
        "",
        (
            r"UsageError: there is no network interface 'eth9' here; there are ",
            r"ronde: rank \d \(pid \d+\) failed with exit code 1",
        ),
        options=("-n", "2", "--network-interface", "eth9"),
    ),
    Failure(
        "too few descriptors",
        "world.barrier()",
        (
            r"ronde run: -n 16 needs \d+ file descriptors in this process, .* may have 48: raise the hard limit",
            r"ulimit -Hn\) to \d+ or more, or use fewer ranks",
        ),
        exit_code=2,
        options=("-n", "16"),
        shell="ulimit -n 48",
    ),
    Failure(
        "a function that cannot be pickled",
        "import ronde, threading; ronde.run(print, (threading.Lock(),), np=2)",
        (r"UsageError: print and its arguments cannot be sent to workers: TypeError: cannot pickle",),
        beginning="",
        options=("-n", "1"),
    ),
    Failure(
        "nobody reads the output",
        "for _ in range(100000): print('x' * 1000)",
        (r"\Aronde: the output cannot be written any more",),
        exit_code=141,
        shell='set -o pipefail; "$@" | head -c 10 > /dev/null; exit ${PIPESTATUS[0]}',
    ),
    Failure(
        "a full disk under the logs",
        "print('x' * 1000000)\nworld.barrier()",
        (r"No space left on device",),
        exit_code=0,
        options=("-n", "2", "--log-dir", "full", "--tee", "3"),
        shell="""mkdir full
            exec unshare -m bash -c 'mount -t tmpfs -o size=128k none full && exec "$@"' bash "$@\"""",
        marks=(pytest.mark.root,),
    ),
]
