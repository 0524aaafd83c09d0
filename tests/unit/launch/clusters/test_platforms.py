"""What the clusters of the platforms share: a missing package, an unencrypted platform, and partitions."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde import UsageError
from ronde.launch.clusters.platforms import deal_partitions, needs_package, report_unencrypted


@pytest.mark.parametrize(
    ("module", "package"),
    [("spark", "pyspark"), ("ray", "ray"), ("dask", "distributed"), ("flink", "pyflink")],
)
def test_importing_the_module_of_an_engine_says_how_to_install_it(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith((f"ronde.{module}", package))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(package), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'ronde\[{module}\]'") as caught:
        __import__(f"ronde.{module}")
    assert caught.value.name == package


def test_another_missing_module_is_named_as_it_is() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"),
        needs_package("pyspark", "spark"),
    ):
        __import__("no_such_module")


class Missing:
    """Finds no module of a package, before anybody else finds it."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_it_warns_or_refuses(caplog: pytest.LogCaptureFixture) -> None:
    report_unencrypted("Yarn", "encrypt it", is_refused=False)
    assert "Yarn sends its tasks unencrypted" in caplog.text
    with pytest.raises(UsageError, match=r"can join the job: encrypt it$"):
        report_unencrypted("Yarn", "encrypt it", is_refused=True)


def test_slots_get_what_their_workers_hold() -> None:
    assert deal_partitions([["b"], ["a"], ["b"], ["a"]], ["a", "b"]) == [[1, 3], [0, 2]]
    assert deal_partitions([["a"], ["a"], ["b"]], ["a", "a", "b"]) == [[0], [1], [2]]


def test_partitions_move_where_they_would_be_too_many() -> None:
    assert deal_partitions([["a"], ["a"], ["a"], ["a"], ["a"]], ["a", "b"]) == [[0, 1, 2], [3, 4]]
    assert deal_partitions([["gone"], []], ["a", ""]) == [[0], [1]]
    assert deal_partitions([["b"]], ["a", "b", "c"]) == [[0], [], []]


@given(st.lists(st.sets(st.sampled_from("abc")), max_size=20), st.lists(st.sampled_from("abcd"), min_size=1))
def test_each_partition_has_one_slot_and_shares_differ_by_one(
    holders: list[set[str]], places: list[str]
) -> None:
    dealt = deal_partitions(holders, places)
    assert sorted(number for numbers in dealt for number in numbers) == list(range(len(holders)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
