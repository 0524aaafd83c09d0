"""Names of hosts while a name server answers late, or never."""

from __future__ import annotations

import socket
import threading

import pytest

from ronde.net.name_resolution import Answer, NameResolver

SOON_NS, HANGING_NS = 10**7, 60 * 10**9
HERE: Answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 7))]
ELSEWHERE: Answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 7))]


class Server:
    """Gives one answer after the other, while it is `well`."""

    def __init__(self, *answers: Answer | OSError) -> None:
        self.well = threading.Event()
        self.well.set()
        self.asked = 0
        self._answers = list(answers)

    def ask(self, host: str, port: int) -> Answer:
        self.asked += 1
        self.well.wait(HANGING_NS / 1e9)
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


def test_a_server_that_does_not_answer_is_asked_once_and_blocks_no_caller() -> None:
    server = Server(HERE)
    server.well.clear()
    names = NameResolver(server.ask)
    for _ in range(3):
        with pytest.raises(OSError, match="no name server has answered yet where node0 is"):
            names.find_addresses("node0", 7, SOON_NS)
    server.well.set()
    assert names.find_addresses("node0", 7, HANGING_NS) == HERE
    assert server.asked == 1


@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "away"])
def test_what_was_known_counts_until_there_is_an_answer(is_silent: bool) -> None:
    away = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    server = Server(HERE, ELSEWHERE) if is_silent else Server(HERE, away, ELSEWHERE)
    names = NameResolver(server.ask)
    assert names.find_addresses("node0", 7, HANGING_NS) == HERE
    if is_silent:
        server.well.clear()
    assert names.find_addresses("node0", 7, SOON_NS if is_silent else HANGING_NS) == HERE
    server.well.set()
    assert names.find_addresses("node0", 7, HANGING_NS) == ELSEWHERE


def test_a_name_that_is_no_more_is_not_known() -> None:
    server = Server(HERE, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    names = NameResolver(server.ask)
    assert names.find_addresses("node0", 7, HANGING_NS) == HERE
    with pytest.raises(socket.gaierror, match="Name or service not known"):
        names.find_addresses("node0", 7, HANGING_NS)
