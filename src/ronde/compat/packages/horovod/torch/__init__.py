"""`horovod.torch`: the names of `ronde.torch`."""

from __future__ import annotations

from typing import NoReturn

from ronde import torch as _ours
from ronde.torch import *  # noqa: F403

__all__ = _ours.__all__


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"horovod.torch.{name} is not there: Ronde answers for Horovod in this process (ronde.compat), and does not "
        f"have {name} yet"
    )
