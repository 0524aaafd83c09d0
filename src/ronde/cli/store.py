"""`ronde store`: serves a store in which agents and ranks meet."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ronde.cli import show
from ronde.cli.options import Option, describe_options, parse_options
from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.values import FILE, PORT_OR_ANY, ValueKind

if TYPE_CHECKING:
    from ronde.stores.server import StoreServer

__all__ = ["HELP", "run"]


OPTIONS = (
    Option(
        "store",
        ("-p", "--port"),
        "port to listen on; 0: a free port",
        metavar="N",
        kind=PORT_OR_ANY,
    ),
    Option(
        "store",
        ("--host",),
        "name or address of this machine to listen on (default: all its addresses)",
        metavar="ADDR",
        kind=ValueKind("a name or an address of this machine"),
    ),
    Option(
        "store",
        ("--journal",),
        "write each change to this file, and restore the store from it at the next start",
        metavar="FILE",
        kind=FILE,
    ),
    Option(
        "store",
        ("--seed",),
        "start with the content of this journal of another store; --journal must then name a new file",
        metavar="FILE",
        kind=FILE,
    ),
    Option(
        "store",
        ("--job-key-file",),
        "file with the job key (default: RONDE_JOB_KEY, or the file that RONDE_JOB_KEY_FILE names)",
        metavar="FILE",
        kind=FILE,
    ),
    Option("information", ("-h", "--help"), "print this help"),
)

HELP = f"""\
usage: ronde store --port N [options]

Prints the address of a store and serves the store over TCP until Ctrl-C. The nodes of a job meet in
it. They need the store's job key: 64 hexadecimal digits in a file that only you can read.

    (umask 077; head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \\n' > job.key)
    ronde store --port 29500 --job-key-file job.key --journal /shared/job.journal

With --journal, a store that you start again at the same address restores its content; without it,
the nodes of `ronde run` restore what they know. If the store's machine is lost, start the store on
another machine, best under the same host name: with the same --journal if it is on a shared disk,
or with --seed and a copy of it.
{describe_options(OPTIONS)}"""


def run(argv: Sequence[str]) -> int:
    """Run the words after `ronde store` and return the exit code. Raises UsageError."""
    values, rest = parse_options(argv, OPTIONS)
    if "--help" in values:
        show(HELP)
        return 0
    if rest:
        raise UsageError(
            f"unexpected argument {rest[0]!r}: ronde store takes only options, as in ronde store --port 29500"
        )
    port = values.get("--port")
    if port is None:
        raise UsageError("--port is missing: ronde store --port 29500, or --port 0 for any free one")
    # Imports from here on, because help and mistakes do not need them.
    from ronde.net.addresses import Address, everywhere
    from ronde.net.host import host_name
    from ronde.stores.server import StoreServer

    key = _find_key(str(values.get("--job-key-file", "")))
    host = str(values.get("--host") or everywhere())
    assert isinstance(port, int)
    journal, seed = (
        None if values.get(name) is None else Path(str(values[name])) for name in ("--journal", "--seed")
    )
    # Before the server's thread begins, so that an early signal ends it in order, too.
    endings = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)
    try:
        server = StoreServer(str(Address(host=host.strip("[]"), port=port)), key, journal, seed)
        shown = server.address
        if "--host" not in values:
            shown = str(Address(host=host_name(), port=int(shown.rpartition(":")[2])))
        print(f"the store is at {shown}", flush=True)
        failed = _wait_for_the_end(server, endings)
        server.close()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, endings)
    print("the store has failed" if failed else "the store has ended", file=sys.stderr)
    return 1 if failed else 0


def _wait_for_the_end(server: StoreServer, endings: set[signal.Signals]) -> bool:
    """Wait for a signal or a failure of the server; return whether it failed."""
    has_failed, is_told = threading.Event(), threading.Event()

    def watch() -> None:
        server.wait()
        if not is_told.is_set():
            has_failed.set()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    signal.sigwait(endings)
    is_told.set()
    return has_failed.is_set()


def _find_key(file: str) -> JobKey:
    """Return the key in the file, else that of the environment. Raises UsageError."""
    from ronde.environment import environment
    from ronde.net.job_keys import read_key_file
    from ronde.settings import resolve

    settings = resolve(environment())
    if settings.job_key is not None and not file:
        return settings.job_key
    if not (file or settings.job_key_file):
        raise UsageError(
            "no job key: set RONDE_JOB_KEY to the job's 64 hexadecimal digits, or name a file with --job-key-file"
        )
    return read_key_file(file or settings.job_key_file)
