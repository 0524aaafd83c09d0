"""Names from other systems and their equivalents in Ronde, for the message of an AttributeError."""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["advice"]

# Names of mpi4py, torch.distributed and Horovod as `_plain` gives them. A name that differs from Ronde's only in its
# spelling (`Allreduce`, `all_reduce`) needs no line here.
_EQUIVALENTS = {
    "allgatherv": "allgather",
    "alltoallv": "alltoall",
    "bcast": "broadcast",
    "broadcastobjectlist": "broadcast_object",
    "broadcastoptimizerstate": "torch.broadcast_optimizer_state",
    "broadcastparameters": "torch.broadcast_parameters",
    "commworld": "world()",
    "create": "group",
    "destroyprocessgroup": "shutdown",
    "distributedoptimizer": "torch.DistributedOptimizer",
    "dup": "duplicate",
    "finalize": "shutdown",
    "getlocalrank": "local_rank",
    "getrank": "rank",
    "getsize": "size",
    "getworldsize": "size",
    "initprocessgroup": "init",
    "newgroup": "add_process_set",
    "reducescattertensor": "reducescatter",
    "syncbatchnorm": "torch.SyncBatchNorm",
    "worldsize": "size",
}


def advice(owner: str, name: str, known: Collection[str]) -> str:
    """Return the end of an error that names the equivalent of `owner.name`; "" if none of the `known` names fits."""
    plain = _plain(name)
    spelled = {_plain(each): each for each in known}
    wanted = _EQUIVALENTS.get(plain) or spelled.get(plain, "")
    first_part = re.split(r"\W", wanted)[0]
    return f"; in Ronde it is {owner}.{wanted}" if first_part in known else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
