"""A program ends although a thread of it is in the client of a platform, whose finalizers need a lock of the thread."""

from __future__ import annotations

import subprocess
import sys

import pytest

PATIENCE_S = 300  # against hanging only

# If the interpreter ended meanwhile, the thread would end with the lock, and the finalizer would wait for it.
PROGRAM = """
import atexit, gc, threading, time
from ronde.launch.clusters.client_threads import start_client_thread

gc.disable()
lock = threading.Lock()
is_asking, is_stopped, has_ended = threading.Event(), threading.Event(), threading.Event()
atexit.register(has_ended.set)  # as the package of a platform does when it is imported

class Client:
    def __del__(self, lock=lock):
        with lock:
            pass

client = Client()
client.itself = client  # so the interpreter finalizes it when it collects garbage for the last time
del client

def ask():
    with lock:
        is_asking.set()
        {wait}

start_client_thread(threading.Thread(target=ask, daemon=True){stop})
is_asking.wait()
"""


def run(wait: str, stop: str = "") -> None:
    program = PROGRAM.format(wait=wait, stop=stop)
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=PATIENCE_S, stderr=subprocess.PIPE, text=True
    )
    assert ended.stderr == ""


def test_the_program_waits_for_the_end_of_the_thread_before_the_client_ends() -> None:
    run(wait="time.sleep(0.2); assert not has_ended.is_set()")


def test_the_program_stops_the_thread() -> None:
    run(wait="is_stopped.wait(); time.sleep(0.2)", stop=", is_stopped.set")


@pytest.mark.slow
def test_a_thread_that_does_not_end_does_not_keep_the_program() -> None:
    """Its lock is free here: else the program would hang."""
    run(wait="lock.release(); time.sleep(10**6)")
