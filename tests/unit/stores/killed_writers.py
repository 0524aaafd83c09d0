"""A program: writers of a file store that are killed at any moment, one after the other and several at a time.

    python -m tests.unit.stores.killed_writers PATH SEED KILLS

Each writer says through a pipe which of its changes have been acknowledged. After every kill another client looks
whether all of those are there, and of what was not acknowledged at most the next change.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

from ronde.stores.file import FileStore

WRITERS = 3


def write(path: str, name: str, seed: str, acknowledge: int) -> None:
    """Count in a separate and in a shared key, with values large enough to be cut off in the middle."""
    chance = random.Random(seed)
    store = FileStore(path)
    store.hold(f"alive {name}", b"")
    done = 0
    while True:
        large = bytes(chance.randrange(1 << 18)) if chance.random() < 0.4 else b""
        store.multi_set({f"large {int(name[1:]) % 3}": large, f"count {name}": b"%d" % (done + 1)})
        done += 1
        os.write(acknowledge, b"c")
        store.add("all", 1)
        os.write(acknowledge, b"a")
        store.queue_push("queue", f"{name} {done}".encode())
        os.write(acknowledge, b"q")


def start(path: str, name: str, seed: str) -> tuple[str, int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            write(path, name, seed, writing)
        finally:
            os._exit(1)
    os.close(writing)
    return name, pid, reading


def acknowledged(reading: int) -> bytes:
    parts = []
    while part := os.read(reading, 1 << 16):
        parts.append(part)
    os.close(reading)
    return b"".join(parts)


def main(path: str, seed: str, kills: int) -> None:
    chance = random.Random(seed)
    reader = FileStore(path)
    adds = at_most = 0
    pushed: dict[str, tuple[int, int]] = {}  # by each dead writer: acknowledged, and perhaps
    running = []
    for number in range(kills + WRITERS):
        if number < kills:
            running.append(start(path, f"w{number}", f"{seed}/{number}"))
        if number < WRITERS - 1:
            continue
        time.sleep(chance.uniform(0, 0.008))
        name, pid, reading = running.pop(0) if running else ("", 0, 0)
        if not pid:
            break
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"{name} ended by itself"
        told = acknowledged(reading)
        count = int(reader.get(f"count {name}", 0)) if reader.check([f"count {name}"]) else 0
        assert told.count(b"c") <= count <= told.count(b"c") + 1, (name, told, count)
        assert not reader.check([f"alive {name}"])
        adds += told.count(b"a")
        at_most += told.count(b"a") + 1
        pushed[name] = (told.count(b"q"), told.count(b"q") + 1)
    total = int(reader.get("all", 0))
    assert adds <= total <= at_most, (adds, total, at_most)
    popped: dict[str, list[int]] = {name: [] for name in pushed}
    while reader.queue_len("queue"):
        name, _, count_text = reader.queue_pop("queue", 0).decode().partition(" ")
        popped[name].append(int(count_text))
    for name, numbers in popped.items():
        least, most = pushed[name]
        assert numbers == list(range(1, len(numbers) + 1))
        assert least <= len(numbers) <= most, (name, numbers, least, most)
    print(f"{len(pushed)} killed, {total} added, {os.path.getsize(path)} bytes")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
