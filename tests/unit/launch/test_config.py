"""The values of --redirects and --tee."""

from __future__ import annotations

import pytest

from ronde.launch.config import Std, parse_streams


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("0", {-1: Std.NONE}),
        ("3", {-1: Std.ALL}),
        ("0:1", {0: Std.OUT}),
        ("0:1,12:2,3:0", {0: Std.OUT, 12: Std.ERR, 3: Std.NONE}),
    ],
)
def test_streams_are_for_all_workers_or_by_local_rank(text: str, meaning: dict[int, Std]) -> None:
    assert parse_streams(text) == meaning


@pytest.mark.parametrize("text", ["", "4", "-1", "0:", ":1", "0:4", "0:1,", "-1:3", "a:1", "1,2", "0:1:2"])
def test_other_texts_for_streams_are_errors(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_streams(text)
