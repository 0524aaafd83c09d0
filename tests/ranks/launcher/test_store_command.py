"""`ronde store` as a process: its options, its end, and its journal after a kill."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ronde.errors import PeerLostError
from ronde.net.addresses import everywhere
from ronde.settings import JobKey
from ronde.stores.tcp import StoreClient

LONG = 30 * 10**9
KEY = JobKey.generate()
COMMAND = (sys.executable, "-c", "import sys, ronde.cli; sys.exit(ronde.cli.main())", "store")


def start(*words: str) -> tuple[subprocess.Popen[str], str]:
    """Start a store on this machine only; return the process and the store's address."""
    process = subprocess.Popen(
        [*COMMAND, "--host", "127.0.0.1", *words],
        env={**os.environ, "RONDE_JOB_KEY": KEY.hex()},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    line = process.stdout.readline()
    assert line.startswith("the store is at tcp:127.0.0.1:"), line
    return process, line.split()[-1]


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process, address = start(*words)
    with process:
        try:
            yield process, address
        finally:
            process.kill()


def test_by_default_it_serves_at_all_addresses() -> None:
    environment = {**os.environ, "RONDE_JOB_KEY": KEY.hex()}
    with subprocess.Popen(
        [*COMMAND, "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            port = process.stdout.readline().rpartition(":")[2].strip()
            for host in ("127.0.0.1", "[::1]" if everywhere() == "::" else "localhost"):
                client = StoreClient(f"tcp:{host}:{port}", KEY, LONG)
                client.set("key", b"value")
                client.close()
        finally:
            process.kill()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(ending: signal.Signals) -> None:
    with serving("--port", "0") as (process, address):
        client = StoreClient(address, KEY, LONG)
        client.set("key", b"value")
        process.send_signal(ending)
        assert process.wait(30) == 0
        client.close()


@pytest.mark.slow
def test_killed_again_and_again_it_loses_and_repeats_nothing(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal")
    process, address = start("--port", "0", "--journal", journal)
    port = address.rpartition(":")[2]
    sums: list[list[int]] = [[], []]

    def count(mine: list[int]) -> None:
        client = StoreClient(address, KEY, LONG, patience_ns=2 * LONG)
        client.hold("alive", b"")
        mine.extend(client.add("count", 1) for _ in range(500))
        client.close()

    threads = [threading.Thread(target=count, args=(mine,)) for mine in sums]
    for thread in threads:
        thread.start()
    for _ in range(3):
        threads[0].join(0.1)  # a moment of work
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()
        process, _ = start("--port", port, "--journal", journal)
    for thread in threads:
        thread.join()
    assert sorted(sums[0] + sums[1]) == list(range(1, 1001))
    with process:
        process.kill()


def test_where_nothing_can_be_written_nothing_is_changed(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with serving("--port", "0", "--journal", str(journal)) as (process, address):
        client, other = StoreClient(address, KEY, LONG), StoreClient(address, KEY, LONG)
        client.set("key", b"old")
        client.queue_push("queue", b"1")
        size = journal.stat().st_size
        before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size + 9, resource.RLIM_INFINITY))
        waiting = threading.Thread(target=lambda: seen.append(other.watch({"key": b"old"}, LONG)))
        seen: list[object] = []
        waiting.start()
        for change in (
            lambda: client.set("key", b"new"),
            lambda: client.add("count", 1),
            lambda: client.queue_pop("queue", 0),
            lambda: client.delete_key("key"),
        ):
            with pytest.raises(PeerLostError, match=r"cannot write its journal, so it changes nothing: "):
                change()
        assert client.get("key", 0) == b"old"
        assert not client.check(["count"])
        assert client.queue_len("queue") == 1
        client.hold("held", b"")  # these are not in the journal
        assert not seen
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
        deadline = threading.Event()
        while True:  # it tries again once a second
            try:
                client.set("key", b"new")
                break
            except PeerLostError:
                deadline.wait(0.1)
        waiting.join()
        assert seen == [{"key": b"new"}]
        assert client.add("count", 1) == 1
        process.kill()
    with serving("--port", address.rpartition(":")[2], "--journal", str(journal)):
        assert client.multi_get(["key", "count"], 0) == [b"new", b"1"]
        assert client.queue_pop("queue", 0) == b"1"
        assert client.check(["held"])  # its client has come back
        client.close()
        other.close()


def test_the_key_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(KEY.hex() + "\n")
    with serving("--port", "0", "--job-key-file", str(tmp_path / "key")) as (_, address):
        client = StoreClient(address, KEY, LONG)
        client.set("key", b"value")
        client.close()
