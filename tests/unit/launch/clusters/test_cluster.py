"""Clusters by the names under which packages have registered them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde import UsageError
from ronde.launch.clusters.cluster import registered_cluster


def test_a_package_registers_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_cluster.py").write_text("class Cluster:\n    name = 'theirs'\n")
    metadata = tmp_path / "their_cluster-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-cluster\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[ronde.clusters]\ntheirs = their_cluster:Cluster\nbroken = not_there:C\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert registered_cluster("theirs").name == "theirs"
    with pytest.raises(UsageError, match=r"'broken' cannot be used: No module named 'not_there'; install"):
        registered_cluster("broken")
    with pytest.raises(UsageError, match=r"unknown cluster 'other': the registered ones are: .*theirs"):
        registered_cluster("other")
