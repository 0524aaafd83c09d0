"""Sparse rows in the one form that estimators expect: CSR, with at most one number at each place."""

from __future__ import annotations

from typing import Any

__all__ = ["is_sparse", "without_duplicates"]


def is_sparse(rows: Any) -> bool:
    """Return whether rows are those of a sparse matrix or array."""
    return hasattr(rows, "tocsr")


def without_duplicates(rows: Any) -> Any:
    """Return the rows as CSR, with the sum of the numbers that are stored for one place. Leaves `rows` unchanged.

    SciPy allows such duplicates, but code that squares the stored numbers would get wrong results.
    """
    rows = rows.tocsr()
    if not rows.has_canonical_format:
        rows = rows.copy()
        rows.sum_duplicates()
    return rows
