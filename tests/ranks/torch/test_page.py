"""The PyTorch programs of the pages run, and the names in docs/torch.md exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.pages import PAGES, Run, pages, run_programs

pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")


TRAINS = "the loss after 100 steps"


@pytest.mark.slow  # each rank imports torch anew
@pytest.mark.parametrize(("page", "planned"), pages("torch"))
def test_programs_of_a_page_run_in_its_order(page: str, planned: list[Run], tmp_path: Path) -> None:
    for package in ("accelerate", "lightning", "tensorboard"):
        if package in "".join(run.program for run in planned):
            pytest.importorskip(package)
    for run, output in zip(planned, run_programs(planned, tmp_path)):
        if TRAINS in run.program:
            (ranks,) = re.findall(r"-n (\d+)", run.command)
            found = re.search(rf"{TRAINS}, as a mean over {ranks} ranks: (\S+)", output)
            assert found is not None, output
            assert float(found[1]) < 1e-2


def test_two_pages_train() -> None:
    assert all(TRAINS in PAGES[page] for page in ("docs/torch.md", "docs/getting-started.md"))


def test_all_names_are_there() -> None:
    assert len(hvd.__all__) == len(set(hvd.__all__))
    for name in hvd.__all__:
        assert getattr(hvd, name) is not None
        assert re.search(rf"\b{name}\b", PAGES["docs/api/torch.md"]), name
    for page, text in PAGES.items():
        used = set(re.findall(r"\bhvd\.(\w+)", text)) if page.startswith("docs/") else set()
        assert used <= set(hvd.__all__), page
