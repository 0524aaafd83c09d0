"""Sends parameters, the state of an optimizer, and objects between ranks.

All ranks of `process_set` call these functions, in the same order. `root_rank` is a rank of the world. Objects are
pickled, and travel only between processes that have proved that they know the job key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ronde.comm.world import rank
from ronde.engine import objects
from ronde.engine.objects import ObjectT
from ronde.engine.process import ProcessSet, global_process_set
from ronde.torch.handles import wait_all
from ronde.torch.operations import broadcast_async_
from ronde.torch.outline import fill, outline_of
from ronde.torch.parameters import parameters_of

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
    root_rank: int = 0,
    process_set: ProcessSet | None = global_process_set,
) -> None:
    """Fill tensors with those of rank `root_rank`.

    All ranks of the process set call it.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or tensors in the same order on all ranks.
        root_rank: a rank of the world, also with a process set (default: 0).
        process_set: the ranks that take part (default: all ranks).

    Raises:
        ValueError: `params` is anything else.
        MismatchError: the tensors differ in shape or dtype between ranks.
        PeerLostError: a rank died, left or cannot be reached.
    """
    if isinstance(params, Mapping):
        params = sorted(params.items())
    if not isinstance(params, Iterable) or isinstance(params, torch.Tensor | str):
        advice = "; pass its state_dict()" if hasattr(params, "state_dict") else ""
        raise ValueError(f"expected a state_dict or named parameters, not {type(params).__name__}{advice}")
    named = [each if isinstance(each, tuple) else (None, each) for each in params]
    for name, tensor in named:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{name or 'a parameter'} is a {type(tensor).__name__}; only tensors can be broadcast"
            )
    wait_all(
        [
            broadcast_async_(tensor, root_rank, name, process_set)
            for name, tensor in named
            if tensor is not None
        ]
    )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> None:
    """Copy the state of rank `root_rank`'s optimizer to all ranks: learning rates and other options, moments, steps.

    All ranks of the process set call it. Parameters without a gradient get one of zeros if the optimizer has no state.

    Args:
        optimizer: of the same class and with the same parameters on all ranks. Its own state is overwritten.
        root_rank: a rank of the world, also with a process set (default: 0).
        model: if its embeddings have sparse gradients, the gradients of zeros are sparse, too (None: dense).
        process_set: the ranks that take part (default: all ranks).

    Raises:
        RemoteError: the state of `root_rank` cannot be pickled.
        MismatchError: the optimizers have different parameters.
        PeerLostError: a rank died, left or cannot be reached.
    """
    if not optimizer.state_dict()["state"]:
        _fill_gradients(optimizer, model)
    at_root = rank() == root_rank
    tensors: list[Any] = []
    outline = outline_of(optimizer.state_dict(), tensors) if at_root else None
    outline = broadcast_object(outline, root_rank, "optimizer state", process_set)
    if not at_root:
        fill(outline, lambda place: tensors.append(torch.empty(place.shape, dtype=place.dtype)))
    names = [f"optimizer state.{position}" for position in range(len(tensors))]
    wait_all([broadcast_async_(tensor, root_rank, name, process_set) for tensor, name in zip(tensors, names)])
    if not at_root:
        optimizer.load_state_dict(fill(outline, lambda place: tensors[place.position]))


def broadcast_object(
    obj: ObjectT | None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet | None = global_process_set,
) -> ObjectT:
    """Return the object of rank `root_rank`: on that rank the object itself, elsewhere a copy by pickle.

    All ranks of the process set call it.

    Args:
        obj: any object that pickle or cloudpickle can copy; ranks other than `root_rank` may pass None.
        root_rank: a rank of the world, also with a process set (default: 0).
        name: the same on all ranks; calls with one name must not overlap in time (None: "broadcast_object").
        process_set: the ranks that take part (default: all ranks).

    Raises:
        RemoteError: `root_rank` cannot pickle its object. That rank raises the original error.
        AuthenticationError: the object was altered on its way.
        PeerLostError: a rank died, left or cannot be reached.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: ObjectT, name: str | None = None, process_set: ProcessSet | None = global_process_set
) -> list[ObjectT]:
    """Return the list of all ranks' objects, in rank order, copied by pickle.

    All ranks of the process set call it.

    Args:
        obj: any object that pickle or cloudpickle can copy; it may differ between ranks.
        name: the same on all ranks; calls with one name must not overlap in time (None: "allgather_object").
        process_set: the ranks that take part (default: all ranks).

    Raises:
        RemoteError: another rank cannot pickle its object. That rank raises the original error.
        AuthenticationError: an object was altered on its way.
        PeerLostError: a rank died, left or cannot be reached.
    """
    return objects.allgather_object(obj, name, process_set)


def _fill_gradients(optimizer: Any, model: Any) -> None:
    """Set a gradient of zeros on each trained parameter without a gradient."""
    embeddings = torch.nn.Embedding, torch.nn.EmbeddingBag
    layers = () if model is None else model.modules()
    sparse = {id(layer.weight) for layer in layers if isinstance(layer, embeddings) and layer.sparse}
    for parameter in parameters_of(optimizer).values():
        if parameter.requires_grad and parameter.grad is None:
            zeros = torch.zeros_like(parameter)
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse
            parameter.grad = zeros.to_sparse(1) if is_sparse else zeros
