"""Gives the tests of stores each kind of store in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conformance.store_kinds import IN_ONE_PROCESS, KINDS, ONLY_BOOTSTRAP, Open, kind_of_store
from tests.conformance.store_processes import Where

from ronde.stores.store import Store


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def new_store(kind: str) -> Iterator[Open]:
    with kind_of_store(kind) as new:
        yield new


@pytest.fixture
def whole(kind: str) -> None:
    """Skips operations that a store for bootstrap only does not have."""
    if kind in ONLY_BOOTSTRAP:
        pytest.skip("torch's store has nothing like it")


@pytest.fixture
def opened(new_store: Open, tmp_path: Path) -> Iterator[tuple[Callable[[], Store], Where | None]]:
    with new_store(tmp_path) as opened:
        yield opened


@pytest.fixture
def connect(opened: tuple[Callable[[], Store], Where | None]) -> Callable[[], Store]:
    """Return a function that opens the same store once more."""
    return opened[0]


@pytest.fixture
def where(kind: str, opened: tuple[Callable[[], Store], Where | None]) -> Where:
    """Return how another process opens the same store. Of those that are one store otherwise, one must do."""
    if opened[1] is None:
        assert kind in IN_ONE_PROCESS
        pytest.skip("a store of one process")
    if kind == "prefix-tcp":
        pytest.skip("like tcp")
    return opened[1]


@pytest.fixture
def store(connect: Callable[[], Store]) -> Store:
    return connect()
