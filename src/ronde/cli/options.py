"""Parses a command line by a table of options, and prints the table as help.

Unlike argparse: options end at the script, whose own options stay untouched; `-np 4`, `-n4` and `--nproc_per_node=4`
are all valid; and the error for an unknown option names the nearest known one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ronde.errors import UsageError
from ronde.values import ValueKind

__all__ = [
    "Given",
    "Option",
    "describe_options",
    "nearest",
    "parse_options",
    "read_options",
    "read_value",
    "words_of",
]

HELP_COLUMN = 28
WIDTH = 96


class Option(NamedTuple):
    """An option and all its names; a flag unless it has a `metavar`, the placeholder of its value.

    `kind`: reads the value. `words`: how many words the option takes; `kind` gets them joined by spaces. `adds`: the
    option may occur several times, and `kind` gets all its values joined by commas; of other options the last value
    counts. `off`: names that negate a flag. `common`: the short help shows the option. `variable`: the workers'
    variable that gets the value. `place`: its key in a configuration file. `idle`: why the option has no effect.
    `refused`: why it is an error.
    """

    group: str
    names: tuple[str, ...]
    help: str
    metavar: str = ""
    kind: ValueKind = ValueKind("")
    words: int = 1
    adds: bool = False
    off: tuple[str, ...] = ()
    common: bool = False
    variable: str = ""
    place: str = ""
    idle: str = ""
    refused: str = ""

    @property
    def name(self) -> str:
        """The name under which values are kept: the last one."""
        return self.names[-1]


class Given(NamedTuple):
    """A value and its origin as the user wrote it: an option, a variable, or a key of the configuration file.

    `text`: what was read to get the value; empty for a flag.
    """

    value: Any
    origin: str
    text: str = ""


def parse_options(argv: Sequence[str], table: Sequence[Option]) -> tuple[dict[str, Any], list[str]]:
    """Return the values by each option's last name, and the words after the options (and after a `--`).

    Raises UsageError for an unknown option, or a missing or invalid value.
    """
    given, rest = read_options(argv, table)
    return {name: each.value for name, each in given.items()}, rest


def read_options(argv: Sequence[str], table: Iterable[Option]) -> tuple[dict[str, Given], list[str]]:
    """Return the same as `parse_options`, with the origin of each value."""
    by_name = {name: option for option in table for name in option.names + option.off}
    given: dict[str, Given] = {}
    said: dict[str, str] = {}  # of options with several values
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        option, name, text = _find_option(word, by_name)
        if not option.metavar:
            if text is not None:
                raise UsageError(f"{name} takes no value, but was given {text!r}")
            if option.refused:
                raise UsageError(f"{name} is not supported: {option.refused}")
            yes, before = name.replace("_", "-") not in option.off, given.get(option.name)
            if before is not None and before.value is not yes:
                raise UsageError(f"{before.origin} and {name} contradict each other: leave one of them out")
            given[option.name] = Given(yes, name)
            continue
        missing = option.words - (text is not None)
        if len(rest) < missing:
            raise UsageError(f"{name} needs a value: {option.kind.right}")
        texts = ([] if text is None else [text]) + rest[:missing]
        del rest[:missing]
        words = " ".join(texts)
        if option.adds:
            words = said[option.name] = ",".join([*filter(None, [said.get(option.name)]), words])
        given[option.name] = read_value(option, name, words)
    return given, rest


def read_value(option: Option, origin: str, text: str, joint: str = " ") -> Given:
    """Return the value of a text. Raises UsageError, with `joint` between the origin and the text."""
    if option.refused:
        raise UsageError(f"{origin} is not supported: {option.refused}")
    return Given(option.kind.read(text, f"{origin}{joint}{text}"), origin, text)


def words_of(given: Mapping[str, Given], table: Iterable[Option]) -> list[str]:
    """Return the words of a command line that give these options of the table the same values."""
    words: list[str] = []
    for option in table:
        if (each := given.get(option.name)) is None:
            continue
        if option.metavar:
            words += [option.name, *(each.text.split() if option.words > 1 else [each.text])]
        elif each.value:
            words.append(option.name)
        elif option.off:
            words.append(option.off[0])
    return words


def _find_option(word: str, by_name: dict[str, Option]) -> tuple[Option, str, str | None]:
    """Return the option that a word names, the name as the user wrote it, and the value if the word contains it."""
    name, equals, text = word.partition("=")
    known = name if name in by_name else name.replace("_", "-")
    if known in by_name:
        return by_name[known], name, text if equals else None
    short = word[:2]
    if not word.startswith("--") and short in by_name and by_name[short].metavar:
        return by_name[short], short, word[2:]
    raise UsageError(f"unknown option {name}{nearest(known, list(by_name))}")


def nearest(word: str, known: Sequence[str]) -> str:
    """Return "; did you mean ...?" if a known word resembles this one; else an empty text."""
    import difflib  # slow to load, and only mistakes need it

    # A mistyped word may be the beginning of a longer one: --nmu of --num-proc. All options share the dashes, which
    # therefore do not count.
    meant = {form.lstrip("-"): name for name in reversed(known) for form in (name[: len(word)], name)}
    near = difflib.get_close_matches(word.lstrip("-"), meant, n=1)
    return f"; did you mean {meant[near[0]]}?" if near else ""


def describe_options(table: Sequence[Option]) -> str:
    """Return the options for a help text, by group, without refused ones."""
    lines: list[str] = []
    shown = [option for option in table if not option.refused]
    for group in dict.fromkeys(option.group for option in shown):
        lines += ["", f"{group}:"]
        for option in shown:
            if option.group == group:
                lines += _describe_option(option)
    return "\n".join(lines) + "\n"


def _describe_option(option: Option) -> list[str]:
    import textwrap  # only for help

    head = "  " + ", ".join(option.names + option.off) + (f" {option.metavar}" if option.metavar else "")
    text = textwrap.wrap(option.help, WIDTH - HELP_COLUMN)
    if len(head) < HELP_COLUMN - 1:
        head, text = head.ljust(HELP_COLUMN) + text[0], text[1:]
    return [head] + [" " * HELP_COLUMN + line for line in text]
