"""Names the timeline file of a rank. Pure."""

from __future__ import annotations

__all__ = ["timeline_path"]


def timeline_path(wanted: str, rank: int, size: int, is_directory: bool) -> str:
    """Return the path of one rank's file. `wanted`: the path that the user gave, perhaps different on each rank.

    `{rank}` in it stands for the rank. In a directory (or a path that ends in a slash), the file is `rank-N.json`.
    Otherwise, with more than one rank, the rank goes before the suffix: `run.json` becomes `run-0.json`.
    """
    if "{rank}" in wanted:
        return wanted.replace("{rank}", str(rank))
    if is_directory or wanted.endswith("/"):
        return f"{wanted.rstrip('/')}/rank-{rank}.json"
    if size == 1:
        return wanted
    folder, slash, name = wanted.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    numbered = f"{stem}-{rank}.{suffix}" if dot and stem else f"{name}-{rank}"
    return folder + slash + numbered
