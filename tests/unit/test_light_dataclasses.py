"""The quick dataclasses do what the standard ones do, as far as we use them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from ronde import light_dataclasses


def define(dataclass: Callable[..., Any], field: Callable[..., Any]) -> tuple[type, type, type]:
    @dataclass(frozen=True, slots=True)
    class Point:
        """A point."""

        x: int
        y: int = 2
        secret: str = field(default="s", repr=False)
        names: dict[str, int] = field(default_factory=dict)

    @dataclass(slots=True)
    class Counter:
        """Something that changes."""

        count: int = 0

        def __post_init__(self) -> None:
            self.count += 1

    @dataclass(frozen=True)
    class Tagged:
        """Compared by its first field."""

        known: ClassVar[int] = 7
        tag: str
        why: str = field(default="", compare=False)

    return Point, Counter, Tagged


OURS = define(light_dataclasses.dataclass, light_dataclasses.field)
THEIRS = define(dataclasses.dataclass, dataclasses.field)


@pytest.mark.parametrize(("point", "counter", "tagged"), [OURS, THEIRS], ids=["ours", "standard"])
def test_they_are_alike(point: Any, counter: Any, tagged: Any) -> None:
    one = point(1)
    assert (one.x, one.y, one.secret, one.names) == (1, 2, "s", {})
    assert repr(one).endswith("Point(x=1, y=2, names={})")
    assert one == point(1, 2, "s", {}) == point(x=1, names={})
    assert one != point(2)
    assert one != counter()
    assert one.names is not point(1).names
    assert dataclasses.asdict(one) == {"x": 1, "y": 2, "secret": "s", "names": {}}
    assert [each.name for each in dataclasses.fields(point)] == ["x", "y", "secret", "names"]
    assert dataclasses.fields(point)[0].default is dataclasses.MISSING
    assert dataclasses.fields(point)[3].default_factory is dict
    assert dataclasses.replace(one, y=5) == point(1, 5)
    assert copy.deepcopy(one) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.x = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.x
    match one:
        case point(x, y):
            assert (x, y) == (1, 2)
    assert counter(4).count == 5
    assert counter(4) == counter(4)
    with pytest.raises(TypeError):
        hash(counter())
    changing = counter()
    changing.count = 9
    assert repr(changing).endswith("Counter(count=9)")
    assert tagged("a", "x") == tagged("a", "y")
    assert hash(tagged("a", "x")) == hash(tagged("a"))
    assert len({tagged("a"), tagged("b")}) == 2
    assert tagged.known == 7
    assert dataclasses.is_dataclass(one)


@pytest.mark.parametrize(("point", "counter", "tagged"), [OURS, THEIRS], ids=["ours", "standard"])
def test_mistakes_are_type_errors(point: Any, counter: Any, tagged: Any) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    calls = [((), {}), ((1,), {"x": 1}), ((1,), {"z": 1}), ((1, 2, "", {}, 5), {})]
    for args, kwargs in calls:
        with pytest.raises(TypeError):
            point(*args, **kwargs)


@light_dataclasses.dataclass(frozen=True)
class Sent:
    """Something that travels."""

    x: int
    y: str = ""


def test_they_travel() -> None:
    assert pickle.loads(pickle.dumps(Sent(1, "a"))) == Sent(1, "a")
    assert light_dataclasses.replace(Sent(1), x=2) == Sent(2)
