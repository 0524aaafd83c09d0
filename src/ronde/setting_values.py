"""Parses and checks the values of settings.

A parser raises ValueError; the sentence for the user comes from the field's `right`. A function that returns a dict
describes a whole sort of setting: how it is parsed and checked, and what would be right.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "LOG_LEVELS",
    "PROTECTIONS",
    "backend_lists",
    "bytes_up_to",
    "cores",
    "count_from",
    "flag",
    "from_the_first_byte_or_never",
    "horovods_log_level",
    "is_cores",
    "is_text",
    "log_level",
    "milliseconds",
    "one_of",
    "path",
    "seconds",
    "seconds_or",
    "size",
    "whole",
    "yes_or_no",
]

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}


def size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([a-zA-Z]*)", text)
    if not match or match[2].lower() not in _SIZE_UNITS:
        raise ValueError(text)
    return int(match[1]) * _SIZE_UNITS[match[2].lower()]


def seconds(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}(\.\d*)?|\.\d+", text):
        raise ValueError(text)
    return round(float(text) * 1e9)


def cores(text: str) -> tuple[int, ...]:
    return tuple(int(core) for core in text.split(","))


def is_cores(value: object) -> bool:
    return isinstance(value, list | tuple) and all(whole(core) and 0 <= core < 2**16 for core in value)


LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_OTHER_LOG_LEVELS = {"trace": "debug", "warn": "warning", "fatal": "critical"}


def log_level(text: str) -> str:
    return _OTHER_LOG_LEVELS.get(text.lower(), text.lower())


def horovods_log_level(text: str) -> str:
    """As Horovod reads it, for which a word that it does not know is a warning."""
    level = log_level(text)
    return level if level in LOG_LEVELS else "warning"


def milliseconds(text: str) -> int:
    """In nanoseconds; more than a second counts as a second."""
    return min(round(seconds(text) / 1000), 10**9)


def from_the_first_byte_or_never(text: str) -> int:
    """From which size on something happens that is switched on (from 0) or off (from the most there is)."""
    return 0 if flag(text) else size("2GiB")


def whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def flag(text: str) -> bool:
    answers = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    if text.lower() not in answers:
        raise ValueError(text)
    return answers[text.lower()]


def yes_or_no() -> dict[str, Any]:
    right = "1 or 0, true or false, yes or no, on or off"
    return {"parse": flag, "check": lambda value: isinstance(value, bool), "right": right}


def one_of(*choices: str) -> dict[str, Any]:
    return {
        "parse": str.lower,
        "check": lambda value: value in choices,
        "right": "one of " + ", ".join(choices),
    }


# Light enough for a launcher, which reads this setting without the others.
PROTECTIONS = one_of("messages", "payload", "secret")

_NAME_LIST = r"\s*\w+\s*(,\s*\w+\s*)*"
_BACKENDS = re.compile(rf"(\s*\w+\s*=)?{_NAME_LIST}(;(\s*\w+\s*=)?{_NAME_LIST})*;?\s*", re.ASCII)


def backend_lists() -> dict[str, Any]:
    """Names of backends, for all operations or one by one."""
    return {
        "check": lambda value: isinstance(value, str) and _BACKENDS.fullmatch(value) is not None,
        "right": "names separated by commas, such as mpi,native, or lists like allreduce=mpi,native;broadcast=gloo",
    }


def bytes_up_to(most: str) -> dict[str, Any]:
    """A number of bytes, or None: chosen automatically."""
    limit = size(most)
    return {
        "parse": size,
        "check": lambda value: whole(value) and 0 <= value <= limit,
        "right": f"a size from 0 to {most}, such as 64KiB",
        "unit": "bytes",
    }


def seconds_or(zero: str) -> dict[str, Any]:
    """A number of seconds; `zero`: what 0 stands for."""
    return {
        "parse": seconds,
        "check": lambda value: whole(value) and value >= 0,
        "right": f"a number of seconds, 0 for {zero}",
        "unit": "s",
    }


def count_from(least: int, most: int) -> dict[str, Any]:
    """A whole number from `least` to `most`."""
    return {
        "parse": int,
        "check": lambda value: whole(value) and least <= value <= most,
        "right": f"a whole number from {least} to {most}",
    }


def path() -> dict[str, Any]:
    """The path of a file."""
    return {"check": is_text, "right": "the path of a file"}
