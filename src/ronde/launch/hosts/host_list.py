"""Lists of hosts as users write them, and which host gets how many workers. Pure.

    on the command line   a:2,b:2,[fd00::1]:4,user@c       (one slot where no number is given)
    in a hostfile         one host on a line: `a slots=2` or `a:2`; # begins a comment
    from a script         one host on a line: `a:2`, or `a` with as many slots as --slots says

A host is a name that `ssh` knows. A slot is room for one worker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ronde.errors import UsageError

__all__ = ["Host", "describe", "parse_discovered", "parse_hostfile", "parse_hosts", "place_workers"]

MAX_SLOTS = 1 << 16

# A name may not begin with a dash: ssh would take it for an option.
_NAME = re.compile(r"(?:[\w.][\w.-]*@)?(?:[A-Za-z0-9_][\w.-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)")


class Host(NamedTuple):
    """A machine: the name that reaches it, and the number of workers for which it has room."""

    name: str
    slots: int

    def __str__(self) -> str:
        """Return the host in the form of an -H entry."""
        user, at, bare = self.name.rpartition("@")
        return f"{user}{at}[{bare}]:{self.slots}" if ":" in bare else f"{self.name}:{self.slots}"


def describe(hosts: Iterable[Host]) -> str:
    """Return the hosts in the form of -H."""
    return ",".join(str(host) for host in hosts)


def parse_hosts(text: str, origin: str = "-H") -> tuple[Host, ...]:
    """Return the hosts of a text like `a:2,b:2`; `origin`: the option that it comes from, for messages.

    Raises UsageError that names the wrong entry and the expected form.
    """
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise UsageError(f"{origin} {text} is invalid: expected hosts separated by commas, like a:2,b:2")
    return _distinct([(_parse_host(entry, f"{origin} {text}", 1), f"{origin} {text}") for entry in entries])


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Return the hosts in the text of a hostfile; `path` is for messages. Raises UsageError that names the line."""
    found = []
    for number, line in enumerate(_lines(text), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"line {number} of {path}"
        host = _parse_host(words[0], where, 1)
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if name in ("slots", "max_slots", "max-slots") and equals:
                if name == "slots":
                    host = host._replace(slots=_parse_slots(value, word, where))
                continue
            raise UsageError(f"{where}: {word!r} is invalid: expected `host slots=4` or `host:4`")
        found.append((host, where))
    if not found:
        raise UsageError(f"there is no host in {path}: write one on each line, like `host slots=4`")
    return _distinct(found)


def parse_discovered(text: str, slots: int | None, script: str) -> tuple[Host, ...]:
    """Return the hosts that a script has printed, possibly none, with `slots` where it gives no number.

    Raises UsageError that names the line.
    """
    found = []
    for number, line in enumerate(_lines(text), 1):
        if entry := line.strip():
            where = f"line {number} of what {script} printed"
            found.append((_parse_host(entry, where, slots), where))
    return _distinct(found)


def place_workers(hosts: Iterable[Host], workers: int | None) -> tuple[Host, ...]:
    """Return the hosts that run workers, each with its number of workers, filled in order; None: all slots.

    Raises UsageError if there are too few slots.
    """
    offered = tuple(hosts)
    if workers is None:
        return offered
    placed, left = [], workers
    for host in offered:
        if left:
            used = min(host.slots, left)
            placed.append(host._replace(slots=used))
            left -= used
    if left:
        room = workers - left
        raise UsageError(
            f"{workers} workers need {workers} slots, but {describe(offered)} has {room}: "
            f"name more hosts or slots, or ask for at most {room} workers"
        )
    return tuple(placed)


def _lines(text: str) -> list[str]:
    """Return the lines of a file, without the byte-order mark that editors under Windows put before the first."""
    return text.removeprefix("\ufeff").splitlines()


def _parse_host(entry: str, where: str, slots: int | None) -> Host:
    """Return the host of `name`, `name:slots`, `[ipv6]` or `[ipv6]:slots`.

    An entry without a number has `slots`. Raises UsageError, also for such an entry if `slots` is None.
    """
    match = re.fullmatch(r"((?:[^\[\]@]*@)?)\[([^\[\]]*)\](:.*)?", entry)
    if match:
        name, number = match[1] + match[2], match[3]
    elif entry.count(":") > 1:
        raise UsageError(
            f"{where}: {entry!r} may be read in two ways: write an IPv6 address in brackets, like [fd00::1]:2"
        )
    else:
        name, colon, rest = entry.partition(":")
        number = colon + rest
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {entry!r} is not a host: write name:slots, like node1:4")
    if number:
        return Host(name, _parse_slots(number[1:], entry, where))
    if slots is None:
        raise UsageError(
            f"{where}: {entry!r} does not say how many slots: write {entry}:4, or give --slots 4"
        )
    return Host(name, slots)


def _parse_slots(text: str, entry: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 7 and 0 < int(text) <= MAX_SLOTS):
        raise UsageError(
            f"{where}: {entry!r} is invalid: expected a whole number of slots from 1 to {MAX_SLOTS}"
        )
    return int(text)


def _distinct(found: list[tuple[Host, str]]) -> tuple[Host, ...]:
    """Return the hosts. Raises UsageError if one is listed twice: to add up or to choose would both be guesses."""
    first: dict[str, str] = {}
    for host, where in found:
        if host.name in first:
            before = first[host.name]
            both = f"{before} and {where}" if before != where else where
            raise UsageError(f"{both}: {host.name} is listed twice: list it once, with all its slots")
        first[host.name] = where
    return tuple(host for host, _ in found)
