"""Draws timelines as a picture: a row for each tensor of each rank, a colour for each phase.

    RONDE_TIMELINE=traces/ ronde run -n 2 examples/digits_torch.py --steps 40
    ronde trace merge traces/ -o trace.json
    python benchmarks/draw_timeline.py trace.json -o timeline.png --window 900 930 --window 912.1 912.4

Every window (milliseconds) is a panel; without one, it is a step from the middle of the run. A triangle in a rank's
colour stands where the rank has submitted the tensor. docs/timeline.md says what the phases mean.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

Record = dict[str, Any]

COLOURS = {
    "negotiate": "#c9d6e8",
    "queue": "#f2c14e",
    "fuse": "#8fbf88",
    "operation": "#2f6f9f",
    "unfuse": "#4e9a51",
    "negotiation round": "#b07aa1",
}
RANK_COLOURS = ("#d1495b", "#3d348b", "#00798c", "#edae49", "#66a182", "#8d5a97")
ROW_INCHES, WIDTH_INCHES = 0.19, 11.0


def phase_of(name: str) -> str:
    """The phase that a record's name means: some are called by the kind of operation (NEGOTIATE_ALLREDUCE)."""
    if name.startswith("NEGOTIATE_"):
        return "negotiate"
    if name.startswith("MEMCPY_"):
        return "fuse" if "_IN_" in name else "unfuse"
    return "operation" if name.isupper() else name


class Span(NamedTuple):
    """A phase: on which row, what, and from when for how long (milliseconds)."""

    row: tuple[int, int]  # rank, track
    name: str
    begin_ms: float
    length_ms: float


class Tick(NamedTuple):
    row: tuple[int, int]
    name: str
    at_ms: float


def load(path: pathlib.Path) -> list[Record]:
    """The records; also of a file without its closing bracket, after a kill."""
    text = path.read_text(encoding="utf-8").rstrip()
    records: list[Record] = json.loads(text if text.endswith("]") else text.rstrip(",") + "]")
    return records


def spans_of(records: list[Record]) -> Iterator[Span]:
    opened: dict[tuple[int, int], Record] = {}
    for record in records:
        row = (record["pid"], record.get("tid", 0))
        match record["ph"]:
            case "X":
                yield Span(row, phase_of(record["name"]), record["ts"] / 1e3, record["dur"] / 1e3)
            case "B":
                opened[row] = record
            case "E" if row in opened:
                begin_us = opened.pop(row)["ts"]
                yield Span(row, phase_of(record["name"]), begin_us / 1e3, (record["ts"] - begin_us) / 1e3)


def windows_of(spans: list[Span], options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the windows: those asked for, or from one use of a tensor to a later one, in the middle of the run.

    The tensor is the one that is used most often. Not every row has one: that of the engine has operations only.
    """
    if options.window:
        return [(begin, end) for begin, end in options.window]
    uses: dict[tuple[int, int], list[float]] = {}
    for span in spans:
        if span.name == "negotiate":
            uses.setdefault(span.row, []).append(span.begin_ms)
    begins = max(uses.values(), key=len, default=[])
    if len(begins) < 2:
        return [(spans[0].begin_ms, max(span.begin_ms + span.length_ms for span in spans))]
    first = min(len(begins) // 2, len(begins) - 2)
    return [(begins[first], begins[min(first + options.steps, len(begins) - 1)])]


class Panel:
    """One window: the spans, ticks and rows that are in it."""

    def __init__(self, records: list[Record], spans: list[Span], begin: float, end: float) -> None:
        self.begin, self.end = begin, end
        self.spans = [
            span for span in spans if span.begin_ms < end and span.begin_ms + span.length_ms > begin
        ]
        rows = sorted({span.row for span in self.spans})
        # A gap between ranks.
        self.place = {row: i + 0.8 * (row[0] - rows[0][0]) for i, row in enumerate(rows)}
        ticks = [Tick((r["pid"], r["tid"]), r["name"], r["ts"] / 1e3) for r in records if r["ph"] == "i"]
        self.ticks = [tick for tick in ticks if tick.row in self.place and begin <= tick.at_ms <= end]
        self.ranks = {tick.name for tick in self.ticks if tick.name.startswith("rank ")}
        self.height = (max(self.place.values(), default=0) + 1) * ROW_INCHES + 0.9

    def draw(self, axes: Any, names: dict[tuple[int, int], str], processes: dict[int, str]) -> None:
        unit, scale = ("milliseconds", 1.0) if self.end - self.begin > 2 else ("microseconds", 1000.0)
        for name, colour in COLOURS.items():
            for row, at in self.place.items():
                these = [span for span in self.spans if span.row == row and span.name == name]
                bars = [((span.begin_ms - self.begin) * scale, span.length_ms * scale) for span in these]
                axes.broken_barh(bars, (at - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.2)
        for rank in self.ranks:
            ticks = [tick for tick in self.ticks if tick.name == rank]
            x = [(tick.at_ms - self.begin) * scale for tick in ticks]
            y = [self.place[tick.row] - 0.28 for tick in ticks]
            axes.plot(x, y, linestyle="", marker="v", markersize=3, color=colour_of(rank), zorder=3)
        for process, title in processes.items():
            of_rank = [at for row, at in self.place.items() if row[0] == process]
            if of_rank:
                axes.text(0, min(of_rank) - 0.55, title, fontsize=8, fontweight="bold", va="bottom")
        axes.set_yticks(
            list(self.place.values()), [names.get(row, str(row)) for row in self.place], fontsize=7
        )
        axes.set_ylim(max(self.place.values(), default=0) + 0.7, -1.4)
        axes.set_xlim(0, (self.end - self.begin) * scale)
        axes.set_xlabel(f"{unit}, from {self.begin:,.2f} ms on", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", linewidth=0.3)
        axes.set_axisbelow(True)


def draw(records: list[Record], output: pathlib.Path, options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    spans = sorted(spans_of(records), key=lambda span: span.begin_ms)
    if not spans:
        raise SystemExit("the trace has no phases: did the job submit any tensors while it recorded?")
    panels = [Panel(records, spans, *window) for window in windows_of(spans, options)]
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in records if r["name"] == "thread_name"}
    processes = {r["pid"]: r["args"]["name"] for r in records if r["name"] == "process_name"}

    heights = [panel.height for panel in panels]
    size = (WIDTH_INCHES, sum(heights) + 0.4)
    figure, axes = pyplot.subplots(
        len(panels), figsize=size, height_ratios=heights, layout="constrained", squeeze=False
    )
    for panel, its_axes in zip(panels, axes[:, 0]):
        panel.draw(its_axes, names, processes)
    used = {span.name for panel in panels for span in panel.spans}
    legend: list[Any] = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    legend += [
        Line2D([], [], marker="v", linestyle="", markersize=4, color=colour_of(rank), label=f"{rank} submits")
        for rank in sorted(set().union(*(panel.ranks for panel in panels)))
    ]
    figure.legend(handles=legend, loc="outside upper center", ncols=len(legend), fontsize=8, frameon=False)
    figure.savefig(output, dpi=options.dpi)
    for panel in panels:
        print(
            f"{output}: {len(panel.spans)} phases on {len(panel.place)} tracks from {panel.begin:.2f} ms on"
        )


def colour_of(rank: str) -> str:
    return RANK_COLOURS[int(rank.removeprefix("rank ")) % len(RANK_COLOURS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=pathlib.Path, nargs="+", help="a merged trace, or a rank's timeline")
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True, metavar="FILE.png")
    parser.add_argument(
        "--window", type=float, nargs=2, action="append", metavar=("FROM", "TO"), help="what to show, in ms"
    )
    parser.add_argument("--steps", type=int, default=1, help="without a window: so many steps (default: 1)")
    parser.add_argument("--dpi", type=int, default=130, help="(default: 130)")
    options = parser.parse_args()
    draw([record for path in options.traces for record in load(path)], options.output, options)


if __name__ == "__main__":
    main()
