"""A relay without the job key, as a program on a host of its own: nodes take its address for that of the store.

    python -m tests.hosts.relay LISTEN_HOST PORT TARGET_HOST RECORD [ACT...]

It passes on what comes to the same port of the target, and writes all messages into the file RECORD. Of each
connection it changes the third request, by one act each until none is left: flip (a bit), replay (an earlier request),
drop (and hang up). It prints each act.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from pathlib import Path

from tests.conformance.altering_relay import AlteringRelay

CHANGED = 2  # the number of the request that is changed, from 0


class Attack:
    """Changes some requests, and records everything."""

    def __init__(self, record: Path, acts: list[str]) -> None:
        self._record = record.open("ab", buffering=0)
        self._acts = deque(acts)
        self._earlier = b""
        self._lock = threading.Lock()

    def alter(self, to_server: bool, number: int, message: bytes) -> bytes:
        with self._lock:
            self._record.write(message)
            if not to_server or number != CHANGED or not self._acts:
                self._earlier = message if to_server else self._earlier
                return message
            act = self._acts.popleft()
            print(act, flush=True)
            match act:
                case "flip":
                    return bytes([*message[:-1], message[-1] ^ 1])
                case "replay":
                    return self._earlier
                case "drop":
                    raise ConnectionResetError
            raise AssertionError(act)


def main(host: str, port: str, target: str, record: str, *acts: str) -> None:
    attack = Attack(Path(record), list(acts))
    AlteringRelay(lambda: (target, int(port)), attack.alter, at=(host, int(port)))
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
