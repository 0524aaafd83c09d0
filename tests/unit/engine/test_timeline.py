from __future__ import annotations

import pytest

from ronde.engine.timeline import timeline_path


@pytest.mark.parametrize(
    ("wanted", "size", "is_directory", "path"),
    [
        ("run.json", 1, False, "run.json"),
        ("run.json", 4, False, "run-3.json"),
        ("a.b/run", 4, False, "a.b/run-3"),
        ("/tmp/.hidden", 4, False, "/tmp/.hidden-3"),
        ("traces", 4, True, "traces/rank-3.json"),
        ("traces/", 1, False, "traces/rank-3.json"),
        ("/tmp/{rank}/of-{rank}.json", 1, False, "/tmp/3/of-3.json"),
    ],
)
def test_path_of_a_rank(wanted: str, size: int, is_directory: bool, path: str) -> None:
    assert timeline_path(wanted, 3, size, is_directory) == path
