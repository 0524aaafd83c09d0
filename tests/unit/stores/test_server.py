"""A served store gives the same answers with a journal and without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.stores.server import StoreServer
from ronde.stores.tcp import StoreClient
from ronde.stores.wire import StoreOperation

KEY = JobKey.generate()
KEYS = ["a", "b", "\u9375", "k" * 1024]
VALUES = [
    b"",
    b"0",
    b"-1",
    b"-0",
    b"007",
    b"+1",
    b"1_0",
    b"-",
    b"9" * 18,
    b"9" * 19,
    b"-" + b"9" * 40,
    b"1" * 42,
]
AMOUNTS = [0, 1, -1, 10**18 - 1, 10**18, -(10**18), 2**63, True, 10**40 - 1, 10**40, 10**41]


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[StoreClient, StoreClient]]:
    """A client of a store without a journal, and one of a store with one."""
    with ExitStack() as stack:
        clients = []
        for journal in (None, tmp_path / "journal"):
            server = stack.enter_context(closing(StoreServer("tcp:127.0.0.1:0", KEY, journal=journal)))
            client = StoreClient(server.address, KEY, 30 * 10**9, patience_ns=0)
            clients.append(stack.enter_context(closing(client)))
        yield clients[0], clients[1]


def ask_something(client: StoreClient, chance: random.Random) -> object:
    key, value = chance.choice(KEYS), chance.choice(VALUES)
    try:
        match chance.randrange(6):
            case 0:
                client.set(key, value)
                return None
            case 1:
                return client.get(key, 0)
            case 2:
                client.wait(chance.choices(KEYS, k=2), 0)
                return None
            case 3:
                return client.add(key, chance.choice(AMOUNTS))
            case 4:
                return client.compare_set(key, chance.choice(VALUES), value)
            case _:
                return client.delete_key(key)
    except (UsageError, TimeoutError) as error:
        return type(error), str(error).replace(client.address, "")


def test_the_answers_are_the_same(both: tuple[StoreClient, StoreClient]) -> None:
    for seed in range(2000):
        answers = [ask_something(client, random.Random(seed)) for client in both]
        assert answers[0] == answers[1]


def test_a_repeated_request_has_no_second_effect(both: tuple[StoreClient, StoreClient]) -> None:
    for client in both:
        for number, total in [(7, b"1"), (7, b"1"), (8, b"2"), (8, b"2")]:
            assert client._ask_once(StoreOperation.ADD, number, 0, b"key", b"1") == (0, total)
        assert client._ask_once(StoreOperation.GET, 0, 0, b"key", b"") == (0, b"2")


def test_an_amount_is_a_whole_number(both: tuple[StoreClient, StoreClient]) -> None:
    for amount in (1.5, "1", b"1", None):
        with pytest.raises(TypeError):
            both[0].add("key", amount)  # type: ignore[arg-type]
    assert both[0].add("key", 1) == 1


def test_an_amount_has_at_most_40_digits(both: tuple[StoreClient, StoreClient]) -> None:
    for client in both:
        for amount in (10**40, -(10**40), 10**41, 10**5000):
            with pytest.raises(UsageError, match="cannot add to 'key': the amount has more than 40 digits"):
                client.add("key", amount)
        assert client.add("key", 1 - 10**40) == 1 - 10**40
        assert client.add("key", 10**40 - 1) == 0
