"""The types of a state's attributes: since which step each has its own, to name what cannot be sent to the caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ronde.errors import UsageError
from ronde.launch.calls import describe_unsendable_part, pickler

__all__ = ["StateTypes"]

_ALWAYS_SENDABLE = (int, float, complex, str, bytes, np.generic, type(None))


class StateTypes:
    """Which type each attribute has, and since which step."""

    def __init__(self) -> None:
        self._types: dict[str, tuple[type, int]] = {}

    def note(self, state: Mapping[str, Any], step_no: int) -> None:
        """Note the types after a step; 0: before the first one."""
        for name, value in state.items():
            kind = type(value)
            if name not in self._types or self._types[name][0] is not kind:
                self._types[name] = kind, step_no

    def require_sendable(self, state: Mapping[str, Any]) -> None:
        """Raise UsageError for an attribute that cannot be pickled. Buffers of arrays are not copied."""
        pickles = pickler()
        for name, value in state.items():
            if isinstance(value, _ALWAYS_SENDABLE):
                continue
            try:
                pickles.dumps(value, protocol=5, buffer_callback=lambda buffer: None)
            except Exception as error:
                _, step_no = self._types.get(name, (None, 0))
                since = f"step {step_no} gave it its type; " if step_no else ""
                part = describe_unsendable_part(f"attribute {name!r}", value, pickles.dumps)
                raise UsageError(
                    f"attribute {name!r} of the state cannot be sent to the caller: {type(error).__name__}: {error}"
                    f"{part}; {since}keep it in a variable of the step's module, or delete it in `finish`"
                ) from None
