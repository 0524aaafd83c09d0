"""Reads the values that users write: of settings, options and variables.

A kind of value has a parser, a check and the words for what is expected. A parser turns a text into a value and raises
ValueError for a text that it cannot read; `ValueKind.read` makes the error that the user sees.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ronde.errors import UsageError

__all__ = [
    "ADDRESS", "COMMAND", "COOLDOWN", "CORES", "FILE", "FLAG", "INTERFACE", "JOB_NAME", "KEY_VALUES",
    "LIST_OF_BACKENDS", "LOCAL_RANKS", "LOG_LEVEL", "MEBIBYTES", "MILLISECONDS", "MODULES", "NAMESPACE",
    "NODE_RANGE", "OFF_OR_ALWAYS", "PATH", "PORT", "PORT_OR_ANY", "POSITIVE_SECONDS", "PROTECTION",
    "QUANTITY", "SECONDS", "SHARE", "SIGNALS", "TEXT", "TEXTS", "VARIABLE_NAMES", "WORKER_COUNT", "ValueKind",
    "between", "bytes_up_to", "count_from", "horovods_log_level", "is_cores", "is_text", "milliseconds", "one_of",
    "seconds_from", "seconds_or", "seconds_text", "size", "whole",
]  # fmt: skip

SECOND = 10**9
LONGEST_NAME = 200  # bytes: a file name may have 255, and Ronde adds to the job's name


class ValueKind(NamedTuple):
    """A sort of value: `right` says what is expected, `check` whether a parsed or given value is valid.

    `choices`: all valid texts, if they are few words.
    """

    right: str
    parse: Callable[[str], Any] = str
    check: Callable[[Any], bool] = lambda value: True
    unit: str = ""
    choices: tuple[str, ...] = ()

    def read(self, text: str, shown: str) -> Any:
        """Return the value of a text. Raises UsageError, which begins with `shown`: the text and where it stands."""
        try:
            value = self.parse(text)
            if self.check(value):
                return value
        except ValueError:
            pass
        raise self.error(shown)

    def error(self, shown: str) -> UsageError:
        """Return the error for an invalid value."""
        return UsageError(f"{shown} is invalid: expected {self.right}")


# Numbers


def whole(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        raise ValueError(text)
    return int(text)


def between(least: int, most: int | None = None) -> Callable[[Any], bool]:
    """Return the check of a whole number from `least` to `most`; None: no limit."""
    return lambda value: (
        isinstance(value, int)
        and not isinstance(value, bool)
        and least <= value
        and (most is None or value <= most)
    )


def count_from(least: int, most: int | None = None) -> ValueKind:
    """A whole number from `least` to `most`; None: no limit."""
    limit = "" if most is None else f" to {most}"
    return ValueKind(f"a whole number from {least}{limit}", whole, between(least, most))


def _worker_count(text: str) -> int | str:
    return text if text in ("auto", "cpu", "gpu") else whole(text)


def _node_range(text: str) -> tuple[int, int]:
    """`3` or `1:4`; the caller compares the two."""
    least, colon, most = text.partition(":")
    return whole(least), whole(most if colon else least)


WORKER_COUNT = ValueKind(
    "a whole number above 0, or auto, gpu or cpu",
    _worker_count,
    lambda n: isinstance(n, str) or between(1)(n),
)
NODE_RANGE = ValueKind(
    "a whole number above 0, or two of them like 1:4", _node_range, lambda pair: min(pair) > 0
)
PORT = ValueKind("a port from 1 to 65535", whole, between(1, 65535))
PORT_OR_ANY = ValueKind("a port from 1 to 65535, or 0 for a free one", whole, between(0, 65535))
SHARE = ValueKind("a number from 0 to 1", float, lambda share: 0 <= share <= 1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(whole(part) for part in _parts(text))


def is_cores(value: object) -> bool:
    return isinstance(value, list | tuple) and all(between(0, 2**16 - 1)(core) for core in value)


CORES = ValueKind("the numbers of cores, one for each rank of a host, such as 0,1,2,3", _numbers, is_cores)
LOCAL_RANKS = ValueKind(
    "local ranks with commas between them, like 0,2",
    lambda text: frozenset(_numbers(text)),
    lambda ranks: min(ranks) >= 0,
)


# Times


def seconds(text: str) -> int:
    """Return a number of seconds in nanoseconds."""
    if not re.fullmatch(r"\d{1,9}(\.\d*)?|\.\d+", text, re.ASCII):
        raise ValueError(text)
    return round(float(text) * 1e9)


def seconds_text(ns: int) -> str:
    """Return the text that `seconds` reads as `ns`."""
    return f"{ns / 1e9:.9f}".rstrip("0").rstrip(".")


def milliseconds(text: str) -> int:
    """Return a number of milliseconds in nanoseconds."""
    return round(seconds(text) / 1000)


def seconds_from(right: str, least_ns: int, most_ns: int | None = None) -> ValueKind:
    return ValueKind(right, seconds, between(least_ns, most_ns), "s")


def seconds_or(zero: str) -> ValueKind:
    """A number of seconds; `zero`: what 0 stands for."""
    return seconds_from(f"a number of seconds above 0, or 0 for {zero}", 0)


def _cooldown(text: str) -> tuple[int, int]:
    least, most = text.replace(",", " ").split()
    return seconds(least), seconds(most)


SECONDS = seconds_from("a number of seconds, 0 or more", 0)
POSITIVE_SECONDS = seconds_from("a number of seconds above 0", 1)
MILLISECONDS = ValueKind("a number of milliseconds from 0 to 1000", milliseconds, between(0, SECOND), "s")
COOLDOWN = ValueKind(
    "two numbers of seconds, 0 or more, the smaller one first, like 10 300",
    _cooldown,
    lambda pair: pair[0] <= pair[1],
)


# Sizes

_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmg", 1)
    for unit, base in (("b", 1000), ("ib", 1024))
}


def size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([a-zA-Z]*)", text)
    if not match or match[2].lower() not in _SIZE_UNITS:
        raise ValueError(text)
    return int(match[1]) * int(_SIZE_UNITS[match[2].lower()])


def bytes_up_to(most: str) -> ValueKind:
    """A number of bytes."""
    return ValueKind(f"a size from 0 to {most}, such as 64KiB", size, between(0, size(most)), "bytes")


# In bytes.
MEBIBYTES = ValueKind("a whole number of MiB from 0", lambda text: whole(text) * 2**20, between(0))


# Words

_FLAGS = dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True)
_FLAGS |= dict.fromkeys(("0", "false", "f", "no", "n", "off"), False)


def _flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError(text)
    return _FLAGS[text.lower()]


FLAG = ValueKind("1 or 0, true or false, yes or no, on or off", _flag, lambda value: isinstance(value, bool))
# Horovod's flag for something that Ronde does from a size on: from the first byte, or never.
OFF_OR_ALWAYS = ValueKind("1 or 0", lambda text: 0 if _flag(text) else size("2GiB"))


def one_of(*choices: str, instead: str = "") -> ValueKind:
    """One of these words, in any case; `instead` says what to use if none of them will do."""
    words = " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
    right = f"{words}; {instead}" if instead else words
    return ValueKind(right, str.lower, lambda value: value in choices, choices=choices)


PROTECTION = one_of("messages", "payload", "secret")

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_OTHER_LOG_LEVELS = {"trace": "debug", "warn": "warning", "fatal": "critical"}


def _log_level(text: str) -> str:
    return _OTHER_LOG_LEVELS.get(text.lower(), text.lower())


def horovods_log_level(text: str) -> str:
    """Return a level as Horovod reads it: an unknown word means warning."""
    level = _log_level(text)
    return level if level in _LOG_LEVELS else "warning"


LOG_LEVEL = one_of(*_LOG_LEVELS)._replace(parse=_log_level)


# Texts, and lists of them with commas between


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


TEXT = ValueKind("a text")
ADDRESS = ValueKind("a host name or an address")
FILE = ValueKind("the path of a file", check=is_text)
# Absolute, because workers may have another working directory.
PATH = ValueKind("a path", lambda text: text and os.path.abspath(text), is_text)
COMMAND = ValueKind("the path of a program, or a command", check=lambda text: bool(text.strip()))
JOB_NAME = ValueKind(
    f"a name of at most {LONGEST_NAME} bytes",  # it becomes a part of file names
    check=lambda text: len(text.encode()) <= LONGEST_NAME and "\0" not in text,
)

QUANTITY = ValueKind(
    "a quantity as Kubernetes writes it, like 500m, 8 or 64Gi",
    check=lambda text: bool(re.fullmatch(r"\d{1,12}(\.\d{1,3})?(m|k|[MGTPE]|[KMGTPE]i)?", text, re.ASCII)),
)
NAMESPACE = ValueKind(
    "the name of a namespace: lowercase letters, digits and dashes, at most 63",
    check=lambda text: bool(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", text)),
)

_NAME_LIST = r"\s*\w+\s*(,\s*\w+\s*)*"
_BACKENDS = rf"(\s*\w+\s*=)?{_NAME_LIST}(;(\s*\w+\s*=)?{_NAME_LIST})*;?\s*"
LIST_OF_BACKENDS = ValueKind(
    "names separated by commas, such as mpi,native, or lists like allreduce=mpi,native;broadcast=gloo",
    check=lambda value: isinstance(value, str) and re.fullmatch(_BACKENDS, value, re.ASCII) is not None,
)


def _key_values(text: str) -> dict[str, str]:
    """`a=1,b=2`, also in quotation marks that no shell has removed."""
    found = {}
    for mark in "'\"":
        if len(text) > 1 and text[0] == text[-1] == mark:
            text = text[1:-1]
    for part in filter(None, _parts(text)):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise ValueError(text)
        found[key] = value
    return found


def _texts(text: str) -> tuple[str, ...]:
    """`apple,orange`; two commas stand for a comma in a text."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",") if part)


MODULES = ValueKind(
    "names of modules with commas between them, or none",
    lambda text: tuple(filter(None, _parts(text))),
    bool,
)
VARIABLE_NAMES = ValueKind(
    "names of variables with commas between, like HF_HOME,TOKEN",
    lambda text: tuple(_parts(text)),
    lambda names: all(name and "=" not in name for name in names),
)
INTERFACE = ValueKind(
    "the name of one network interface, like eth0", lambda text: ",".join(dict.fromkeys(_parts(text)))
)
KEY_VALUES = ValueKind("keys and values, like join_timeout=60,last_call_timeout=5", _key_values)
TEXTS = ValueKind("texts with commas between them, like error,loss", _texts)

# Signals that ask a program to end. The others cannot be caught, report an error of the program itself, or inform it
# of something else (SIGWINCH, SIGCHLD, SIGPIPE, SIGTSTP, SIGCONT, ...).
_SIGNALS = {
    "SIGHUP": 1, "SIGINT": 2, "SIGQUIT": 3, "SIGUSR1": 10, "SIGUSR2": 12, "SIGALRM": 14, "SIGTERM": 15, "SIGURG": 23,
    "SIGXCPU": 24, "SIGPWR": 30,
}  # fmt: skip


def _signals(text: str) -> tuple[int | None, ...]:
    """`SIGUSR1,term`: the numbers of signals."""
    names = ["SIG" + name.upper().removeprefix("SIG") for name in _parts(text)]
    return tuple(dict.fromkeys(map(_SIGNALS.get, names)))


SIGNALS = ValueKind(
    f"some of {', '.join(_SIGNALS)}, with commas between them", _signals, lambda found: None not in found
)
