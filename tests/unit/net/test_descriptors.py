"""The limit of file descriptors is raised as far as it must and may be; else one sentence has the numbers."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from ronde.errors import UsageError
from ronde.net.descriptors import make_room


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield soft, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_as_far_as_needed(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    make_room(10, "a world of size 2")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, limits[1])
    make_room(700, "a world of size 176")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 700 < soft < 1024
    assert hard == limits[1]


def test_a_hard_limit_that_is_too_low_is_named_with_the_numbers(limits: tuple[int, int]) -> None:
    with pytest.raises(UsageError) as caught:
        make_room(limits[1] + 1, "a world of size 176")
    message = str(caught.value)
    assert message.startswith(
        f"a world of size 176 needs {limits[1] + 1} file descriptors in this process, which has "
    )
    assert f"may have {limits[1]}: raise the hard limit (ulimit -Hn)" in message


def test_without_proc_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_mounted(path: str) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(os, "listdir", not_mounted)
    with pytest.raises(UsageError, match=r"^-n 2: cannot read /proc/self/fd .* mount -t proc proc /proc$"):
        make_room(10, "-n 2")
