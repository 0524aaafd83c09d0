"""The TCP store between two hosts: what a host held goes when its cable is cut, and is back when it is mended."""

from __future__ import annotations

import os
import subprocess
import sys

from ronde.settings import JobKey
from ronde.testing.hosts import Hosts

PORT = 29_511
LONG_S = 60

SERVE = "import ronde.cli; ronde.cli.main(['store', '--port', '{port}', '--host', '{host}'])"
CONNECT = """
import os
from ronde.stores.tcp import StoreClient
from ronde.settings import JobKey
LONG = {long_s} * 10**9
store = StoreClient("{address}", JobKey.from_hex(os.environ["RONDE_JOB_KEY"]), LONG, patience_ns=LONG)
"""
HOLD = """
store.hold("alive", b"1")
print("held", flush=True)
store.watch({"alive": b"1", "never": None}, LONG)  # the connection breaks, and both are as they were
input()
"""
WATCH = """
print(store.watch({"alive": None}, LONG), flush=True)
print(store.watch({"alive": b"1"}, LONG), flush=True)
print(store.watch({"alive": None}, LONG), flush=True)
"""


def test_a_held_key_goes_when_a_cable_is_cut_and_comes_back_with_it() -> None:
    environ = {**os.environ, "RONDE_JOB_KEY": JobKey.generate().hex()}
    with Hosts(2) as two:

        def start(host: int, program: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [*two.command(host), sys.executable, "-c", program],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

        def said(process: subprocess.Popen[str]) -> str:
            assert process.stdout
            return process.stdout.readline().strip()

        address = f"tcp:{two.ipv4(0)}:{PORT}"
        connect = CONNECT.format(address=address, long_s=LONG_S)
        started: list[subprocess.Popen[str]] = []
        try:
            started.append(start(0, SERVE.format(port=PORT, host=two.ipv4(0))))
            assert said(started[0]) == f"the store is at {address}"
            started.append(start(1, connect + HOLD))
            assert said(started[1]) == "held"
            started.append(start(0, connect + WATCH))
            assert said(started[2]) == "{'alive': b'1'}"
            two.disconnect(1)
            assert said(started[2]) == "{'alive': None}"
            two.reconnect(1)
            assert said(started[2]) == "{'alive': b'1'}"
        finally:
            for process in started:
                with process:
                    process.kill()
