"""`horovod.torch`: the names of `ronde.torch`, and Horovod's submodules."""

from __future__ import annotations

from typing import NoReturn

from ronde import torch as _ours
from ronde.torch import *  # noqa: F403

from .. import missing  # noqa: TID252 - type checkers do not know a package horovod
from ..common.util import check_extension  # noqa: TID252
from . import compression, functions, mpi_ops, optimizer, sync_batch_norm

__all__ = _ours.__all__ + [
    "check_extension",
    "compression",
    "functions",
    "mpi_ops",
    "optimizer",
    "sync_batch_norm",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(missing(f"horovod.torch.{name}", f"does not provide {name}"))
