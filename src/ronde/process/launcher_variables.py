"""Numbers in the variables that a launcher sets for its workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ronde.errors import UsageError

__all__ = ["launcher_number"]


def launcher_number(environ: Mapping[str, str], name: str) -> int:
    """Return a variable's value. Raises UsageError if it is not set or not a whole number from 0."""
    text = environ.get(name)
    if not text:
        raise UsageError(f"{name} is not set, although the launcher's other variables are")
    if not text.isdecimal() or len(text) > 9:
        raise UsageError(f"{name}={text!r} is invalid: expected a whole number from 0")
    return int(text)
