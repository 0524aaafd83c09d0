from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ronde.cli.trace_merge import read_records, survey_timeline
from ronde.engine.timeline import Timeline, timeline_path


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


def test_notes_are_ticks_on_their_tracks(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    timeline = Timeline(2, 4, "a")
    timeline.note("elastic", "not recorded", {})
    for texts in (["first", "sec\nond"], []):
        timeline.start(tmp_path, False)
        began_ns = time.monotonic_ns()
        for text in texts:
            timeline.note("elastic", text, {"commit": 7})
        timeline.stop()
        path = tmp_path / "rank-2.json"
        lines = path.read_text().splitlines()
        ticks = [record for record in read_records(lines) if record is not None and record["ph"] == "i"]
        assert [tick["name"] for tick in ticks] == texts
        assert all(tick["args"] == {"commit": 7} and tick["pid"] == 2 for tick in ticks)
        assert json.loads(path.read_text())[0]["name"] == "process_name"
        found = survey_timeline(lines, "run.json")
        assert found.torn == 0
        assert all(0 <= found.steady_ns + tick["ts"] * 1000 - began_ns < 60e9 for tick in ticks)


def test_notes_of_a_file_that_is_gone_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(0, 1, "a")
    timeline.start(tmp_path / "run.json", False)
    timeline.note("elastic", "lost", {})
    (tmp_path / "run.json").unlink()
    timeline.stop()
    assert "run.json ends early" in caplog.text
