"""What an import says if an engine is not installed."""

from __future__ import annotations

import sys

import pytest

from ronde.launch.clusters.engine_package import needs_package


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
