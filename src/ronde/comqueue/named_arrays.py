"""Several arrays with equally many rows as one object, such as features and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["NamedArrays"]


class NamedArrays:
    """Arrays with equally many rows, as attributes. A slice of it has some rows of each."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        vars(self).update(arrays)

    def __repr__(self) -> str:
        return f"<{', '.join(f'{name}: {array.shape}' for name, array in vars(self).items())}>"

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def __getitem__(self, rows: slice) -> NamedArrays:
        return NamedArrays({name: array[rows] for name, array in vars(self).items()})
