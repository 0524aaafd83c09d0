"""`ronde trace merge` as a command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ronde.cli import main


def timeline(rank: int) -> str:
    about = {"rank": rank, "size": 3, "host": "a", "steady_ns": 0, "wall_ns": 0}
    records = [
        {"ph": "M", "pid": rank, "name": "ronde_timeline", "args": about},
        {
            "ph": "M",
            "pid": rank,
            "name": "ronde_clock",
            "args": {"steady_ns": 0, "offset_ns": 0, "error_ns": 0},
        },
        {"ph": "X", "pid": rank, "tid": 1, "ts": 1.5, "dur": 2, "name": "operation"},
    ]
    return "[ " + "\n,".join(map(json.dumps, records)) + "\n]"


def test_merges_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/rank-0.json").write_text(timeline(0))
    (tmp_path / "in/rank-2.json").write_text(timeline(2).removesuffix("\n]") + '\n,{"ph":"X","pi')
    assert main(["trace", "merge", str(tmp_path / "in"), "-o", str(tmp_path / "all.json")]) == 0
    told = capsys.readouterr()
    assert "6 records of 2 ranks (without rank 1); all ranks share one clock" in told.out
    assert "rank-2.json: 1 broken lines skipped" in told.err
    assert [each["pid"] for each in json.loads((tmp_path / "all.json").read_text())] == [0] * 3 + [2] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.json", "in"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["mrge", "x"], "did you mean merge?"),
        (["merge", "-o", "x"], "expected timelines and an output file"),
        (["merge", "a.json"], "expected timelines and an output file"),
        (["merge", "absent.json", "-o", "x"], "cannot read absent.json: No such file"),
        (["merge", "a.json", "a.json", "-o", "x"], "a.json and a.json both have rank 0"),
        (["merge", "a.json", "-o", "absent/x"], "cannot write absent/x: No such file"),
        (["merge", ".", "--output", "absent/x"], "cannot write absent/x: No such file"),
    ],
)
def test_a_mistake_names_the_word_or_the_file(
    words: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(timeline(0))
    assert main(["trace", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--help"]) == main(["trace"]) == 0
    assert "ronde trace merge FILE..." in capsys.readouterr().out
