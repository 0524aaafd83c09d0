"""Lists of hosts as Slurm compresses them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.errors import UsageError
from ronde.process.slurm import expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", "login"),
        ("a,b , c", "a b c"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[1,3-4,007]", "n1 n3 n4 n007"),
        ("node[01-02,07],gpu-[1-2]-ib0", "node01 node02 node07 gpu-1-ib0 gpu-2-ib0"),
        ("r[1-2]n[0-1]", "r1n0 r1n1 r2n0 r2n1"),
        ("a.example,b[1].example", "a.example b1.example"),
    ],
)
def test_lists_as_slurm_writes_them(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize(
    "text",
    ["", ",", "n[", "n]", "n[]", "n[1", "n[1-]", "n[2-1]", "n[a-b]", "n[[1]]", "n[1-99999999999]", "n[1-2]]"],
)
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a list of hosts as Slurm writes it"):
        expand_hosts(text)


@given(st.integers(0, 999), st.integers(1, 50), st.integers(1, 5))
def test_ranges(first: int, count: int, width: int) -> None:
    names = [f"n{number:0{width}}" for number in range(first, first + count)]
    assert expand_hosts(f"n[{first:0{width}}-{first + count - 1:0{width}}]") == names


@given(st.text("n[]-,019", max_size=20))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    try:
        assert expand_hosts(text)
    except UsageError:
        pass
