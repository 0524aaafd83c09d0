"""The environment of this process. No other module reads or changes it."""

from __future__ import annotations

import os

__all__ = ["environment", "set_defaults", "set_variable"]


def environment() -> dict[str, str]:
    """Return a copy of the environment of this process."""
    return dict(os.environ)


def set_defaults(**variables: str) -> None:
    """Set variables that the environment of this process lacks, for a library that reads them later."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def set_variable(name: str, value: str | None) -> None:
    """Set a variable of this process, as an option on its command line does; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
