"""Slurm's compressed lists of hosts: `node[01-03,07],gpu-[1-2]-ib0` means six names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ronde.errors import UsageError

__all__ = ["expand"]

MAX_HOSTS = 1 << 20


def expand(text: str) -> list[str]:
    """Return the host names in order. Raises UsageError for a list that Slurm would not write."""
    hosts: list[str] = []
    for item in _split(text):
        hosts.extend(_names(item))
        if len(hosts) > MAX_HOSTS:
            raise _refusal(text)
    if not hosts:
        raise _refusal(text)
    return hosts


def _split(text: str) -> list[str]:
    """Split at the commas that are not in brackets."""
    if not re.fullmatch(r"(?:[^\[\],]|\[[^\[\]]*\]|,)*", text):
        raise _refusal(text)
    return [item.strip() for item in re.split(r",(?![^\[]*\])", text) if item.strip()]


def _names(item: str) -> list[str]:
    """Expand all brackets of one item, the last one fastest."""
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    inside, _, tail = rest.partition("]")
    tails = _names(tail)
    return [head + number + end for number in _numbers(inside, item) for end in tails]


def _numbers(inside: str, item: str) -> Iterator[str]:
    for part in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise _refusal(item)
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + MAX_HOSTS:
            raise _refusal(item)
        width = len(first) if first.startswith("0") else 0
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{width}}" if width else str(number)


def _refusal(text: str) -> UsageError:
    return UsageError(f"{text[:200]!r} is not a list of hosts as Slurm writes it, like node[01-03,07],login")
