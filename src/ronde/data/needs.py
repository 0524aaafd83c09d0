"""Imports packages that only some programs need, with an error that says how to install them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ronde.errors import UsageError

__all__ = ["need"]


def need(package: str, module: str = "", extra: str = "data") -> Any:
    """Return a module of a package (default: the package). Raises UsageError if it is not installed."""
    try:
        return import_module(module or package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise UsageError(
            f"{package} is not installed, which Parquet files and tables need: "
            f"run pip install 'ronde[{extra}]' here and on every worker"
        ) from None
