"""`horovod.torch`: the names of `ronde.torch`, and the modules where Horovod has them."""

from __future__ import annotations

import sys
from typing import NoReturn

from ronde import torch as _ours
from ronde.torch import *  # noqa: F403
from ronde.torch.compression import FP16Compressor, NoneCompressor  # noqa: F401 - for add_modules
from ronde.torch.elastic import sampler as _sampler
from ronde.torch.elastic import state as _state

from . import add_modules, missing
from .common import check_extension

__all__ = _ours.__all__ + ["check_extension"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(missing(f"horovod.torch.{name}", f"does not provide {name}"))


add_modules(
    __name__,
    compression=[*_ours.__all__, "FP16Compressor", "NoneCompressor"],
    functions=_ours.__all__,
    mpi_ops=_ours.__all__,
    optimizer=_ours.__all__,
    sync_batch_norm=_ours.__all__,
)

elastic = _ours.elastic
# For `import horovod.torch.elastic`; its modules have Horovod's names already.
sys.modules[f"{__name__}.elastic"] = elastic
sys.modules[f"{__name__}.elastic.sampler"] = _sampler
sys.modules[f"{__name__}.elastic.state"] = _state
