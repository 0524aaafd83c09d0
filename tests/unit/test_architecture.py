"""What ARCHITECTURE.md states about files, rooms and layers, compared with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/ronde"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
ROOMS = (
    "net|stores|rendezvous|process|stall|comm|data|comqueue|backends|engine|elastic|torch|parquet|spark|ray|dask|flink|ml"
    "|compat|launch|cli|bench|testing"
)
STARTS = (
    "",
    "src/ronde/",
    "cpp/",
    *(f"{path.relative_to(ROOT).as_posix()}/" for path in (ROOT / "cpp").iterdir() if path.is_dir()),
    "tests/conformance/",
    "src/ronde/backends/",
)


def place_of(name: str) -> Path | None:
    """Return the file or folder that the page names without its beginning or `.py`."""
    places = (ROOT / f"{start}{name}{end}" for start in STARTS for end in ("", ".py"))
    return next((place for place in places if place.exists()), None)


def test_the_files_that_it_names_exist() -> None:
    named = re.findall(rf"`((?:{ROOMS})/[\w/]+|[\w/]+\.(?:h|cc|py))`", PAGE)
    assert len(named) > 50
    assert [name for name in named if place_of(name) is None] == []


def test_the_files_contain_the_names_in_parentheses() -> None:
    found = re.findall(r"`([\w/.]+)` \(`([\w:.]+)`\)", PAGE.partition("### Where to look")[2])
    assert len(found) > 8
    for path, name in found:
        place = place_of(path)
        if place is not None and place.is_file():
            last = re.split(r"::|\.", name)[-1]
            assert re.search(rf"\b{last}\b", place.read_text(encoding="utf-8")), f"{path} has no {name}"


def test_the_drawing_has_all_rooms() -> None:
    drawing = PAGE.split("```")[1]
    rooms = [path.parent.relative_to(SOURCES) for path in SOURCES.rglob("__init__.py")]
    # Those are Horovod's names.
    drawn = [room for room in rooms if room.parts and "packages" not in room.parts]
    assert len(drawn) > 20
    assert [room.as_posix() for room in drawn if f" {room.name}/ " not in drawing] == []
    modules = [path.stem for path in SOURCES.glob("*.py") if not path.stem.startswith("__")]
    assert [module for module in modules if not re.search(rf"\b{module}\b", drawing)] == []


def test_the_layers_are_those_that_are_checked() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    drawn = PAGE.partition("Layers, from the top.")[2].split("```")[1].strip().splitlines()
    assert drawn == [re.sub("[()]", "", layer) for layer in layers]
