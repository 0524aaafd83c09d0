"""`ronde.torch.distributed`: the backend "ronde" of torch.distributed.

    import torch.distributed as dist
    import ronde.torch.distributed

    dist.init_process_group("ronde")

The import registers the backend. docs/torch-distributed.md has what it can do.
"""

from __future__ import annotations

from ronde.torch.distributed.backend import register
from ronde.torch.distributed.reconfiguration import (
    Options,
    ReconfigureError,
    get_reconfigure_handle,
    reconfigure,
)

__all__ = ["Options", "ReconfigureError", "get_reconfigure_handle", "reconfigure", "register"]

register()
