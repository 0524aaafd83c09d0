"""Several arrays with the same number of rows as one object, such as features and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["NamedArrays"]


class NamedArrays:
    """Arrays with the same number of rows, as attributes. A slice contains some rows of each array."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        vars(self).update(arrays)

    def __repr__(self) -> str:
        return f"<{', '.join(f'{name}: {array.shape}' for name, array in vars(self).items())}>"

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def __getitem__(self, rows: slice) -> NamedArrays:
        return NamedArrays({name: array[rows] for name, array in vars(self).items()})
