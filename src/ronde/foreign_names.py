"""Names from other systems, and from other parts of Ronde, and their equivalents where they are used.

`advice` is for the message of an AttributeError. `other_names` makes a function accept them as keyword arguments.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

__all__ = ["advice", "other_names"]

P = ParamSpec("P")
R = TypeVar("R")

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


def other_names(**parameters: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of functions whose parameters have other names elsewhere: `other_names(np="num_proc")`.

    The function keeps its signature and its help, and accepts the other names as keywords, too.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given: dict[str, Any] = kwargs
            for other in parameters.keys() & given.keys():
                name = parameters[other]
                if name in given:
                    raise TypeError(
                        f"{function.__name__}() got both {name} and {other}, which mean the same: leave {other} out"
                    )
                given[name] = given.pop(other)
            return function(*args, **kwargs)

        return call

    return decorate
