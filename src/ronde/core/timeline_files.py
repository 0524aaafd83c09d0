"""Names the timeline file of a rank."""

from __future__ import annotations

__all__ = ["path_of"]


def path_of(wanted: str, rank: int, size: int, is_directory: bool) -> str:
    """Return the path of one rank's file; `wanted` is what the user has given, the same on all ranks or not.

    `{rank}` in it stands for the rank. A directory (or what ends in a slash) gets a file `rank-N.json` for each rank.
    Else, if there is more than one rank, its number goes before the suffix: `run.json` becomes `run-0.json`.
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
