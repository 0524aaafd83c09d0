"""`horovod.spark.common.util`: what programs ask about this machine, their parameters and their columns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NoReturn

from ronde.environment import environment
from ronde.errors import UsageError
from ronde.net.host import host_identity

from ... import missing_from  # noqa: TID252 - type checkers do not know a package horovod

__all__ = ["check_validation", "get_output_cols", "host_hash", "is_databricks", "to_list"]


def is_databricks() -> bool:
    """Return whether this process runs on Databricks."""
    return "DATABRICKS_RUNTIME_VERSION" in environment()


def host_hash(salt: str | None = None) -> str:
    """Return a text that is equal for two processes if and only if they are on the same host, and give one salt."""
    return hashlib.sha256(f"{host_identity('')}\0{salt or ''}".encode()).hexdigest()


def to_list(var: Any, length: int) -> list[Any] | None:
    """Return a list of `length` elements: that list, or a single element repeated. Raises UsageError for others."""
    if var is None:
        return None
    elements = var if isinstance(var, list) else [var]
    if len(elements) not in (1, length):
        raise UsageError(f"{var} has {len(elements)} elements: expected 1 or {length}")
    return elements * length if len(elements) == 1 else elements


def check_validation(validation: float | str | None, df: Any = None) -> None:
    """Raise UsageError unless `validation` is None, a fraction below 1, or the name of a column of the data frame."""
    if isinstance(validation, str):
        if df is not None and validation not in df.columns:
            raise UsageError(
                f"validation={validation!r} is not a column of the data frame: it has {df.columns}"
            )
    elif validation is not None and not 0 <= validation < 1:
        raise UsageError(
            f"validation={validation} is invalid: expected a fraction below 1 or a column's name"
        )


def get_output_cols(input_df_schema: Any, output_cols: Sequence[str]) -> list[str]:
    """Return the names of the columns that a model's `transform` returns for a data frame with this schema."""
    return [*(field.name for field in input_df_schema.fields), *output_cols]


def __getattr__(name: str) -> NoReturn:
    raise missing_from("horovod.spark.common.util", name)
