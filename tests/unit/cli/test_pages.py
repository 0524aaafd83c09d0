"""The generated pages are up to date; the table of options and the options of other launchers agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ronde.cli.pages import HOROVODRUN, PAGES, TORCHRUN
from ronde.cli.run_arguments import OPTIONS
from ronde.settings import Settings

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_generated_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run: python -m ronde.cli.pages docs"


def test_options_that_the_page_mentions_exist() -> None:
    names = {name for option in OPTIONS for name in option.names + option.off}
    prose = (DOCS / "launcher.md").read_text(encoding="utf-8")
    mentioned = {name.rstrip("-") for name in re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose)}
    assert mentioned <= names | {"--its", "--own", "--epochs", "--local-rank"}


def test_no_option_of_torchrun_is_missing() -> None:
    run = pytest.importorskip("torch.distributed.run")
    names = {name for option in OPTIONS for name in option.names + option.off}
    theirs = run.get_args_parser()._actions
    assert {name for action in theirs for name in action.option_strings if "_" not in name} <= names
    lasts = {option.name for option in OPTIONS if names_of(theirs) & set(option.names)}
    assert lasts - {"-h"} == TORCHRUN


def names_of(actions: object) -> set[str]:
    return {name for action in actions for name in action.option_strings}  # type: ignore[attr-defined]


def test_horovodruns_options_are_here() -> None:
    assert {option.name for option in OPTIONS} >= HOROVODRUN


def test_defaults_in_the_help_of_settings_are_those_of_the_settings() -> None:
    numbers = {
        "RONDE_CACHE_CAPACITY": Settings().cache_capacity,
        "RONDE_FUSION_BYTES": Settings().fusion_bytes >> 20,
        "RONDE_LINGER": Settings().linger_ns // 10**6,
        "RONDE_STALL_SHUTDOWN": Settings().stall_shutdown_ns // 10**9,
    }
    for option in OPTIONS:
        if option.variable in numbers and (found := re.search(r"\(default: (\d+)\)", option.help)):
            assert int(found[1]) == numbers.pop(option.variable), option.names
    assert numbers == {}
