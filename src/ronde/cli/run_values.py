"""Parses the values of `ronde run`'s options. Each function raises ValueError for an invalid value."""

from __future__ import annotations

import os
from typing import Any

__all__ = [
    "SIGNALS",
    "at_least",
    "cooldown",
    "count",
    "distinct",
    "key_values",
    "megabytes",
    "milliseconds",
    "names",
    "node_range",
    "one_of",
    "port",
    "port_or_any",
    "program",
    "ranks",
    "run_id",
    "seconds",
    "signals",
    "streams",
    "texts",
    "variable_names",
    "whole",
    "workers",
]

SECOND = 10**9
LONGEST_NAME = 200  # bytes: of the 255 that the name of a file may have, something is added
PLACES = ("auto", "cpu", "gpu")
# Those by which somebody asks a job to end. Others cannot be heeded, are an error of the program itself, or tell a
# terminal's programs what they have to know without ending (SIGWINCH, SIGCHLD, SIGPIPE, SIGTSTP, SIGCONT, ...).
SIGNALS = {
    "SIGHUP": 1, "SIGINT": 2, "SIGQUIT": 3, "SIGUSR1": 10, "SIGUSR2": 12, "SIGALRM": 14, "SIGTERM": 15, "SIGURG": 23,
    "SIGXCPU": 24, "SIGPWR": 30,
}  # fmt: skip


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


def port_or_any(text: str) -> int:
    """A port, or 0 for one that is free."""
    return 0 if text == "0" else port(text)


def milliseconds(text: str) -> str:
    """A number of milliseconds, as a text in seconds."""
    ns = seconds(text) // 1000
    if ns > SECOND:
        raise ValueError(text)
    return f"{ns / SECOND:g}"


def run_id(text: str) -> str:
    """The name of a job, which becomes a part of file names."""
    if len(text.encode()) > LONGEST_NAME or "\0" in text:
        raise ValueError(text)
    return text


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


def one_of(*choices: str, instead: str = "") -> dict[str, Any]:
    """One of these words, in lower case; `instead` says what to use if none of them will do."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(text)
        return text.lower()

    words = " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
    return {"parse": parse, "right": f"{words}; {instead}" if instead else words}


def signals(text: str) -> tuple[int, ...]:
    """`SIGUSR1,SIGTERM`: names of signals, as their numbers."""
    found = []
    for part in text.split(","):
        name = part.strip().upper()
        number = SIGNALS.get(name if name.startswith("SIG") else f"SIG{name}")
        if number is None:
            raise ValueError(text)
        found.append(number)
    return tuple(dict.fromkeys(found))


def streams(text: str) -> Any:
    """`3`, or `0:1,1:2`: streams by local rank."""
    from ronde.launch.config import parse_streams  # only now: help needs none of it

    return parse_streams(text)


def ranks(text: str) -> frozenset[int]:
    return frozenset(whole(part.strip()) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    found = tuple(filter(None, (part.strip() for part in text.split(","))))
    if not found:
        raise ValueError(text)
    return found


def key_values(text: str) -> dict[str, str]:
    """`a=1,b=2`, also with quotation marks around it that no shell has taken away."""
    found = {}
    for mark in "'\"":
        if len(text) > 1 and text[0] == text[-1] == mark:
            text = text[1:-1]
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise ValueError(text)
        found[key] = value
    return found


def texts(text: str) -> tuple[str, ...]:
    """`apple,orange`; two commas stand for one that is meant."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",") if part)


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


def program(text: str) -> str:
    """A file or a command with arguments: who runs it finds out which."""
    if not text.strip():
        raise ValueError(text)
    return text


def level(text: str) -> str:
    """A level of Ronde's log; Horovod's names are understood."""
    known = {"trace": "debug", "fatal": "critical"}
    word = known.get(text.lower(), text.lower())
    if word not in ("debug", "info", "warning", "error", "critical"):
        raise ValueError(text)
    return word


def distinct(text: str) -> str:
    """Names with commas between, each of them once."""
    return ",".join(dict.fromkeys(name.strip() for name in text.split(",")))


def variable_names(text: str) -> tuple[str, ...]:
    """Names of variables, without values."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(name and "=" not in name for name in found):
        raise ValueError(text)
    return found
