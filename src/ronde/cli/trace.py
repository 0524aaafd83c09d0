"""`ronde trace`: merges the timelines that ranks have recorded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ronde.cli import show
from ronde.cli.options import Option, describe_options, nearest, parse_options
from ronde.cli.trace_merge import CommonClock, Survey, common_clock, retime, survey_timeline
from ronde.errors import UsageError
from ronde.trusted_files import create_anew
from ronde.values import FILE

__all__ = ["HELP", "run"]

OPTIONS = (
    Option("merge", ("-o", "--output"), "file for the merged trace", metavar="FILE", kind=FILE),
    Option("information", ("-h", "--help"), "print this help"),
)

HELP = f"""\
usage: ronde trace merge FILE... -o FILE

Merges the timelines of several ranks (of a directory: all its .json files) into one trace, which
ui.perfetto.dev opens. All times are converted to rank 0's clock, by the clock offsets that the
ranks measured while they recorded. If a rank was killed, its timeline ends at its last record.

    RONDE_TIMELINE=traces/ ronde run -n 4 train.py
    ronde trace merge traces/ -o trace.json
{describe_options(OPTIONS)}"""


def run(argv: Sequence[str]) -> int:
    """Run the words after `ronde trace` and return the exit code. Raises UsageError."""
    values: dict[str, object] = {}
    words: list[str] = []
    rest = list(argv)
    while rest:  # options may come between and after the files
        more, rest = parse_options(rest, OPTIONS)
        values |= more
        if rest:
            words.append(rest.pop(0))
    if "--help" in values or not words:
        show(HELP)
        return 0
    if words[0] != "merge":
        raise UsageError(f"unknown command {words[0]!r}{nearest(words[0], ['merge'])}")
    output = values.get("--output")
    if len(words) == 1 or not isinstance(output, str):
        raise UsageError("expected timelines and an output file: ronde trace merge traces/ -o trace.json")
    merge(list(_files(words[1:])), Path(output))
    return 0


def merge(files: Sequence[Path], output: Path) -> None:
    """Write the merged trace, and print a summary. Raises UsageError."""
    surveys: list[Survey] = []
    for path in files:
        with _open(path) as lines:
            surveys.append(survey_timeline(lines, str(path)))
        for earlier, other in zip(surveys[:-1], files):
            if earlier.rank == surveys[-1].rank:
                raise UsageError(
                    f"{other} and {path} both have rank {earlier.rank}, so they come from two runs"
                )
        if surveys[-1].torn:
            print(f"{path}: {surveys[-1].torn} broken lines skipped", file=sys.stderr)
    common = common_clock(surveys)
    draft = output.with_name(output.name + ".new")
    count = 0
    try:
        with os.fdopen(create_anew(draft), "w", encoding="utf-8") as file:
            for path, mine in zip(files, surveys):
                with _open(path) as lines:
                    for record in retime(lines, mine, surveys, common):
                        file.write("[ " if count == 0 else ",")
                        file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
                        count += 1
            file.write("]\n")
        os.replace(draft, output)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise UsageError(f"cannot write {output}: {error.strerror}") from None
    print(f"{output}: {count} records of {len(files)} ranks{_accuracy(surveys, common)}")


def _accuracy(surveys: Sequence[Survey], common: CommonClock) -> str:
    missing = sorted(set(range(surveys[0].size)) - {each.rank for each in surveys})
    text = f" (without {', '.join(f'rank {rank}' for rank in missing)})" if missing else ""
    if common.by_wall_clock:
        guessed = ", ".join(f"rank {rank}" for rank in common.by_wall_clock)
        return f"{text}; the clock of {guessed} was not measured: its wall clock is trusted"
    error_ns = max(clock.error_ns for each in surveys for clock in each.clocks)
    return (
        f"{text}; clocks agree to {error_ns / 1000:.0f} us"
        if error_ns
        else f"{text}; all ranks share one clock"
    )


def _files(words: Sequence[str]) -> Iterator[Path]:
    for word in words:
        path = Path(word)
        found = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not found:
            raise UsageError(f"there is no timeline in {path}")
        yield from found


def _open(path: Path) -> TextIO:
    try:
        return path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
