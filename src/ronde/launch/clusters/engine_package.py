"""Explains that the package of a cluster's engine, such as PySpark, is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs_package"]


@contextmanager
def needs_package(package: str, extra: str) -> Iterator[None]:
    """Let a failure to import the package, inside a `with` block, say how to install it: with this extra of Ronde."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"ronde.{extra} needs {package}, which is not installed: run pip install 'ronde[{extra}]' here and where "
            "the tasks run",
            name=package,
        ) from None
