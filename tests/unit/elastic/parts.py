"""Parts of a state for tests: some arrays in a dict."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Arrays", "Shard"]


class Arrays:
    """A part that is the same on all ranks. `live` is the state of the program."""

    is_sharded = False

    def __init__(self, **live: Any) -> None:
        self.live: dict[str, Any] = live
        self.copy: dict[str, Any] = {}

    def save(self) -> None:
        for name, array in self.live.items():
            if name in self.copy and isinstance(array, np.ndarray):
                self.copy[name][...] = array
            else:
                self.copy[name] = np.array(array) if isinstance(array, np.ndarray) else array

    def restore(self) -> None:
        self.live = {name: np.array(a) if isinstance(a, np.ndarray) else a for name, a in self.copy.items()}

    def payload(self) -> object:
        return self.copy

    def load(self, payload: Any) -> None:
        self.copy = dict(payload)
        self.restore()


class Shard(Arrays):
    """A part of which each rank has another share."""

    is_sharded = True
