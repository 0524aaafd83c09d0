"""Values of any size in a store."""

from __future__ import annotations

import io

import pytest

from ronde.errors import TimeoutError
from ronde.stores.memory import MemoryStore
from ronde.stores.store import VALUE_LIMIT_BYTES, delete_large, get_large, put_large

SECOND = 10**9


@pytest.mark.parametrize("size", [0, 1, VALUE_LIMIT_BYTES, VALUE_LIMIT_BYTES + 1, 18 * VALUE_LIMIT_BYTES])
def test_a_value_of_any_size_comes_back_and_goes(size: int) -> None:
    store = MemoryStore()
    value = bytes(range(256)) * (size // 256) + bytes(size % 256)
    put_large(store, "big", value)
    assert b"".join(get_large(store, "big", SECOND)) == value
    delete_large(store, "big")
    assert store.num_keys() == 0


def test_the_rest_of_a_file_is_a_value() -> None:
    store, file = MemoryStore(), io.BytesIO(b"headrest")
    file.read(4)
    put_large(store, "big", file)
    assert b"".join(get_large(store, "big", SECOND)) == b"rest"


def test_a_value_that_never_comes_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        get_large(MemoryStore(), "big", 1)
