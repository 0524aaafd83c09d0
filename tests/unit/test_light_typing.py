"""The light names of `typing` do what the standard ones do, as far as we use them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from ronde import light_typing
from ronde.light_typing import Generic, NamedTuple, TypedDict, TypeVar

Item = TypeVar("Item")


class Point(NamedTuple):
    """A point."""

    x: int
    y: int = 2

    def total(self) -> int:
        return self.x + self.y


class Queue(Generic[Item]):
    items: tuple[Item, ...] = ()


class Wishes(TypedDict):
    size: int


def test_named_tuples() -> None:
    point = Point(1)
    assert point == (1, 2)
    assert point._replace(y=3).total() == 4
    assert pickle.loads(pickle.dumps(point)) == point
    assert (repr(point), Point.__doc__, Point._fields) == ("Point(x=1, y=2)", "A point.", ("x", "y"))
    assert Point.__annotations__ == {"x": "int", "y": "int"}
    assert not hasattr(point, "__dict__")
    with pytest.raises(TypeError):
        Point()  # type: ignore[call-arg]


def test_a_field_without_a_default_precedes_those_with_one() -> None:
    with pytest.raises(TypeError, match="a field of Late without a default follows one with a default"):

        class Late(NamedTuple):
            x: int = 1
            y: int  # type: ignore[misc]


def test_a_named_tuple_has_fields() -> None:
    with pytest.raises(TypeError, match="no fields found in the named tuple Empty: annotate them"):

        class Empty(NamedTuple):
            x = 1  # type: ignore[misc]


def test_bases() -> None:
    assert isinstance(Queue[int](), Queue)
    assert Wishes(size=1) == {"size": 1}


def test_the_names_are_those_of_typing() -> None:
    assert [name for name in light_typing.__all__ if not hasattr(typing, name)] == []


def test_a_launch_loads_no_slow_module(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    program = f"""
import sys
before = set(sys.modules)
from ronde.cli import main
main(["run", "-n", "1", {str(script)!r}])
print(sorted({{"dataclasses", "logging", "shlex", "typing"}} & (set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
