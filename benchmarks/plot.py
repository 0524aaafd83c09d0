"""Draws the tables as pictures."""

from __future__ import annotations

import pathlib

from matplotlib import pyplot
from tables import Row

COLUMNS = 3  # at most


def plot(path: pathlib.Path, rows: list[Row]) -> None:
    """Write a picture with one panel per operation and number of ranks: microseconds over bytes, both logarithmic."""
    panels = list(dict.fromkeys((row.op, row.ranks) for row in rows if row.bytes))
    width = min(COLUMNS, len(panels))
    height = -(-len(panels) // width)
    figure, axes = pyplot.subplots(
        height, width, figsize=(5 * width, 4 * height), layout="constrained", squeeze=False
    )
    for panel, axis in zip(panels, axes.flat):
        mine = [row for row in rows if (row.op, row.ranks) == panel]
        for contestant in dict.fromkeys(row.contestant for row in mine):
            points = [(row.bytes, row.median_us) for row in mine if row.contestant == contestant]
            axis.loglog(
                *zip(*points), marker=".", label=contestant, ls="--" if contestant == "memcpy" else "-"
            )
        axis.set(title=f"{panel[0]}, {panel[1]} ranks", xlabel="bytes", ylabel="microseconds")
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    axes.flat[0].legend()
    figure.savefig(path)
