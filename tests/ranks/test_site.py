"""What a reader of the site relies on beyond the pages themselves; a warning of the build is an error."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
pytest.importorskip("torch", reason="the site has the docstrings of ronde.torch")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(folder / "doctrees")]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(folder / "html")], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_blocks_without_a_language_are_not_coloured_as_python(site: Path) -> None:
    page = (site / "stalls.html").read_text()
    report = page[page.index("stalled: 1 call has been waiting") - 400 :][:400]
    assert "highlight-none" in report


def test_code_has_a_copy_button_and_wraps(site: Path) -> None:
    page = (site / "comqueue.html").read_text()
    assert "copybutton.js" in page
    assert "static/site.css" in page
    assert "pre-wrap" in (site / "_static/site.css").read_text()


@pytest.mark.parametrize(
    ("page", "target"), [("index.html", "architecture.html"), ("index.html", "contributing.html")]
)
def test_pages_of_contributors_are_links(site: Path, page: str, target: str) -> None:
    assert re.search(rf'href="{target}(#[\w-]*)?"', (site / page).read_text())
    assert (site / target).exists()


@pytest.mark.parametrize(
    "words", ["tqdm progress", "lightning", "accelerate", "fsdp2", "tensorboard", "pdb", "debugpy"]
)
def test_searches_find_a_page(site: Path, words: str) -> None:
    """The search wants all words on one page, and knows them by their stems."""
    text = {path.stem: path.read_text().lower() for path in site.glob("*.html")}
    assert [page for page in text if all(word in text[page] for word in words.split())]
