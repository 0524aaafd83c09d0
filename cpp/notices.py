"""Print the licenses of the libraries compiled into the native module, which must be distributed with it.

    python cpp/notices.py > LICENSE-nanobind

The texts are those of the installed nanobind and of the hash map that it contains.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

HASH_MAP = "nanobind/ext/robin_map/include/tsl/robin_map.h"


def notices() -> str:
    """Return both texts. Raises LookupError if the hash map has no license."""
    files = metadata.files("nanobind") or []
    (license,) = (Path(str(file.locate())) for file in files if file.name == "LICENSE")
    (hash_map,) = (Path(str(file.locate())) for file in files if str(file) == HASH_MAP)
    opening, end, _ = hash_map.read_text(encoding="utf-8").partition("*/")
    if not (end and "Copyright" in opening):
        raise LookupError(f"{hash_map} does not begin with its license")
    lines = [line.removeprefix("/**").removeprefix(" *").removeprefix(" ") for line in opening.splitlines()]
    return (
        f"nanobind {metadata.version('nanobind')}\n\n{license.read_text(encoding='utf-8').strip()}\n\n"
        f"tsl::robin_map, a part of nanobind\n\n{chr(10).join(lines).strip()}\n"
    )


if __name__ == "__main__":
    sys.stdout.write(notices())
