"""Objects that arrive, without ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ronde.engine import objects
from ronde.errors import AuthenticationError


class Arrived:
    """A handle whose result is known."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self) -> Any:
        return self.result


def test_the_object_of_one_rank_in_the_place_of_anothers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    times = 1
    monkeypatch.setattr(objects, "rank", lambda: 0)
    monkeypatch.setattr(
        objects, "allgather_async", lambda x, name, process_set: Arrived(np.concatenate([x] * times))
    )
    assert objects.allgather_object({"loss": 0.5}) == [{"loss": 0.5}]
    times = 2
    with pytest.raises(AuthenticationError, match=r"arrive as those of ranks \[0, 0\], which do not ascend"):
        objects.allgather_object({"loss": 0.5})
