"""What the words after the options of `ronde run` mean. Each function raises ValueError for nonsense."""

from __future__ import annotations

import os
from typing import Any

__all__ = [
    "at_least",
    "cooldown",
    "count",
    "key_values",
    "megabytes",
    "names",
    "node_range",
    "one_of",
    "port",
    "ranks",
    "seconds",
    "streams",
    "whole",
    "workers",
]

SECOND = 10**9
PLACES = ("auto", "cpu", "gpu")


def whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise ValueError(text)
    return int(text)


def count(text: str) -> int:
    if whole(text) == 0:
        raise ValueError(text)
    return int(text)


def workers(text: str) -> int | str:
    return text if text in PLACES else count(text)


def port(text: str) -> int:
    if not 0 < whole(text) < 65536:
        raise ValueError(text)
    return int(text)


def node_range(text: str) -> tuple[int, int]:
    """`3` or `1:4`; which is larger, the caller checks."""
    least, colon, most = text.partition(":")
    return count(least), count(most if colon else least)


def seconds(text: str) -> int:
    """A number of seconds, in nanoseconds."""
    if not text.isascii() or not text.replace(".", "", 1).isdecimal() or len(text) > 18:
        raise ValueError(text)
    return round(float(text) * SECOND)


def at_least(smallest: str) -> dict[str, Any]:
    """A whole number, 0 or 1 being the smallest."""
    return {"parse": whole if smallest == "0" else count, "right": f"a whole number from {smallest}"}


def one_of(*choices: str) -> dict[str, Any]:
    """One of these words, in lower case."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(text)
        return text.lower()

    return {"parse": parse, "right": f"{', '.join(choices[:-1])} or {choices[-1]}"}


def streams(text: str) -> dict[int, int]:
    """`3`, or `0:1,1:2`: the streams (1 stdout, 2 stderr, 3 both, 0 neither) by local rank, -1 for all others."""
    if text in ("0", "1", "2", "3"):
        return {-1: int(text)}
    found = {}
    for part in text.split(","):
        rank, _, stream = part.partition(":")
        if stream not in ("0", "1", "2", "3"):
            raise ValueError(text)
        found[whole(rank)] = int(stream)
    return found


def ranks(text: str) -> frozenset[int]:
    return frozenset(whole(part.strip()) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    found = tuple(filter(None, (part.strip() for part in text.split(","))))
    if not found:
        raise ValueError(text)
    return found


def key_values(text: str) -> dict[str, str]:
    """`a=1,b=2`."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise ValueError(text)
        found[key] = value
    return found


def cooldown(text: str) -> tuple[int, int]:
    """Two numbers of seconds, in nanoseconds."""
    least, most = text.replace(",", " ").split()
    if seconds(least) > seconds(most):
        raise ValueError(text)
    return seconds(least), seconds(most)


# Of options that become variables of workers: texts again.


def megabytes(text: str) -> str:
    """A number of MiB, as a number of bytes."""
    return str(whole(text) * 2**20)


def plain_seconds(text: str) -> str:
    seconds(text)
    return text


def path(text: str) -> str:
    """An absolute path, because workers may be somewhere else."""
    if not text:
        raise ValueError(text)
    return os.path.abspath(text)


def level(text: str) -> str:
    """A level of Ronde's log; Horovod's names are understood."""
    known = {"trace": "debug", "fatal": "critical"}
    word = known.get(text.lower(), text.lower())
    if word not in ("debug", "info", "warning", "error", "critical"):
        raise ValueError(text)
    return word
