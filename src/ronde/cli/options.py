"""A table of options, parsed and printed as help.

Not argparse: options end at the script, whose own options are none of our business; `-np 4`, `-n4` and
`--nproc_per_node=4` are all right; and an unknown option is answered with the nearest known one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ronde.errors import UsageError

__all__ = ["Option", "describe", "nearest", "parse"]

HELP_COLUMN = 28
WIDTH = 96


@dataclass(frozen=True)
class Option:
    """One option under all its names; a flag unless it has a `metavar`, which is what its value is called.

    `parse` makes the value of a text and raises ValueError if that makes no sense; `right` says what would.
    """

    group: str
    names: tuple[str, ...]
    help: str
    metavar: str = ""
    parse: Callable[[str], object] = str
    right: str = ""


def parse(argv: Sequence[str], table: Sequence[Option]) -> tuple[dict[str, object], list[str]]:
    """Return the values by each option's last name, and what follows the options (after a `--`, if there is one).

    Raises UsageError for an unknown option, or a value that is missing or makes no sense.
    """
    values: dict[str, object] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        option, name, text = _find(word, table)
        if not option.metavar:
            if text is not None:
                raise UsageError(f"{name} takes no value, but was given {text!r}")
            values[option.names[-1]] = True
            continue
        if text is None:
            if not rest:
                raise UsageError(f"{name} needs a value: {option.right}")
            text = rest.pop(0)
        try:
            values[option.names[-1]] = option.parse(text)
        except ValueError:
            raise UsageError(f"{name} {text} makes no sense: it should be {option.right}") from None
    return values, rest


def _find(word: str, table: Sequence[Option]) -> tuple[Option, str, str | None]:
    """Return the option that a word names, the name as it was written, and the value if it is in the same word."""
    by_name = {name: option for option in table for name in option.names}
    name, equals, text = word.partition("=")
    known = name if name in by_name else name.replace("_", "-")
    if known in by_name:
        return by_name[known], name, text if equals else None
    short = word[:2]
    if not word.startswith("--") and short in by_name and by_name[short].metavar:
        return by_name[short], short, word[2:]
    raise UsageError(f"unknown option {name}{nearest(known, list(by_name))}")


def nearest(word: str, known: Sequence[str]) -> str:
    """Return "; did you mean ...?" if something known looks like the word."""
    import difflib  # only after a mistake: it takes longer to load than all the rest

    # A mistyped word may also be the beginning of a longer one: --nmu of --num-proc.
    meant = {form: name for name in known for form in (name[: len(word)], name)}
    near = difflib.get_close_matches(word, meant, n=1)
    return f"; did you mean {meant[near[0]]}?" if near else ""


def describe(table: Sequence[Option]) -> str:
    """Return the options for a help text, by group."""
    lines: list[str] = []
    for group in dict.fromkeys(option.group for option in table):
        lines += ["", f"{group}:"]
        for option in table:
            if option.group == group:
                lines += _describe(option)
    return "\n".join(lines) + "\n"


def _describe(option: Option) -> list[str]:
    head = "  " + ", ".join(option.names) + (f" {option.metavar}" if option.metavar else "")
    text = textwrap.wrap(option.help, WIDTH - HELP_COLUMN)
    if len(head) < HELP_COLUMN - 1:
        head, text = head.ljust(HELP_COLUMN) + text[0], text[1:]
    return [head] + [" " * HELP_COLUMN + line for line in text]
