"""The payload of a part as bytes and back, without a pickle where possible."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from ronde.elastic.payloads import digest_items, pack, unpack
from ronde.errors import ProtocolError, UsageError


def there_and_back(payload: object, takes_pickles: bool = False) -> Any:
    packed = pack(payload)
    return unpack(packed.text, memoryview(b"".join(packed.buffers)), takes_pickles)


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def test_trees_of_arrays_need_no_pickle() -> None:
    payload = {
        "step": 12,
        "rate": 0.1,
        "name": "run",
        3: [True, None, (1, 2)],
        "raw": b"bytes",
        "order": OrderedDict(b=1, a=2),
        "weights": np.arange(12, dtype=np.float32).reshape(3, 4),
        "empty": np.empty((0, 5), np.int64),
        "scalar": np.float64(2.5),
        "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "times": np.array(["2026-01-01"], "M8[D]"),
    }
    found = there_and_back(payload)
    assert list(found) == list(payload)
    for key, value in payload.items():
        assert type(found[key]) is type(value)
        np.testing.assert_equal(found[key], value)
    assert list(found["order"]) == ["b", "a"]
    found["weights"][0, 0] = 7  # it is new memory


def test_tensors_of_any_type_keep_their_bits() -> None:
    torch = pytest.importorskip("torch")
    payload = {
        "half": torch.randn(3, 4).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 3),
        "complex": torch.randn(2, dtype=torch.complex64),
        "strided": torch.arange(6).reshape(2, 3).t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    found = there_and_back(payload)
    for key, tensor in payload.items():
        assert found[key].dtype == tensor.dtype
        assert type(found[key]) is type(tensor)
        assert torch.equal(found[key], tensor)


def test_other_objects_need_a_pickle_and_consent() -> None:
    payload = {"custom": Custom(3), "weights": np.ones(2)}
    assert there_and_back(payload, takes_pickles=True)["custom"] == Custom(3)
    with pytest.raises(UsageError, match="only a pickle"):
        there_and_back(payload)
    with pytest.raises(UsageError, match="cannot be pickled"):
        pack({"lambda": lambda: None})


def test_arrays_are_packed_without_a_copy() -> None:
    weights = np.zeros(4)
    (buffer,) = pack({"weights": weights}).buffers
    weights[0] = 1
    assert bytes(buffer) == weights.tobytes()


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        json.dumps({"tree": ["value", 1], "sizes": [4]}),
        json.dumps({"tree": ["array", "<f8", [3], 0], "sizes": [16]}),
        json.dumps({"tree": ["array", "|O", [2], 0], "sizes": [16]}),
        json.dumps({"tree": ["array", "<f8", [2], 5], "sizes": [16]}),
        json.dumps({"tree": ["program"], "sizes": [16]}),
        json.dumps({"tree": ["value", 1], "sizes": [-1, 17]}),
    ],
)
def test_malformed_descriptions_are_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="malformed payload"):
        unpack(text, memoryview(bytes(16)), takes_pickles=True)


def test_digests_compare_what_is_the_same_on_all_ranks() -> None:
    def digest(payload: object) -> bytes:
        return b"".join(digest_items(payload))

    one = {"a": np.ones(3), "b": 1, "custom": Custom(1)}
    assert digest(one) == digest({"custom": Custom(2), "b": 1, "a": np.ones(3)})
    assert digest(one) != digest(one | {"a": np.nextafter(np.ones(3), 2)})
    assert digest(one) != digest(one | {"b": 2})
