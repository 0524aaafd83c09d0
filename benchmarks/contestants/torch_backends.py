"""torch.distributed with its backends Gloo and "ronde": all operations of its interface, DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ronde.torch.distributed  # noqa: F401, registers the backend
from contestants import Call
from contestants.buffers import ping_pong
from contestants.gloo_steps import GlooSteps
from contestants.model_steps import WARM_UP_STEPS
from contestants.models import Transformer
from contestants.torch_gloo import Gloo, tensor

TOKENS = (1, 16)  # sequences of one rank, and their length
MESH = "ranks"


class GlooBackend(GlooSteps):
    """One rank. Beside the operations of all contestants it has those that only torch.distributed has."""

    allgather = Gloo.allgather

    def allreduce_async(self, count: int) -> Call:
        x = tensor(count)
        return lambda: dist.all_reduce(x, async_op=True).wait()

    def allgather_single(self, count: int) -> Call:
        x, out = tensor(count // self.size), tensor(count)
        return lambda: dist.all_gather_single(out, x)

    def exchange(self, count: int) -> Call:
        """Neighbours send to each other at once."""
        x, out, neighbour = tensor(count), tensor(count), self.rank ^ 1

        def call() -> None:
            operations = [dist.P2POp(dist.isend, x, neighbour), dist.P2POp(dist.irecv, out, neighbour)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return call

    def sendrecv(self, count: int) -> Call:
        # Into another tensor than the one that travels, because Gloo's receive may then find it in the cache, too.
        x, out, neighbour = tensor(count), tensor(count), self.rank ^ 1
        return ping_pong(self.rank, lambda: dist.send(x, neighbour), lambda: dist.recv(out, neighbour))

    def allgather_object(self, count: int) -> Call:
        mine, objects = tensor(count // self.size).numpy(), [None] * self.size
        return lambda: dist.all_gather_object(objects, mine)

    # Steps of a model

    def transformer(self, communicates: bool) -> Call:
        return self._step("transformer", communicates, self._replicated)

    def transformer_fsdp(self, communicates: bool) -> Call:
        return self._step("transformer_fsdp", communicates, self._sharded)

    def _replicated(self) -> tuple[Call, Call]:
        parallelize = torch.nn.parallel.DistributedDataParallel
        model = Transformer()
        together = _backward(parallelize(model), self.rank, WARM_UP_STEPS)
        sums = self.from_all(sum(float(each.grad.double().sum()) for each in model.parameters()))
        if len(set(sums)) != 1:
            raise RuntimeError(f"gradients differ between ranks; their sums: {sums}")
        silent = parallelize(Transformer())
        silent.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
        return together, _backward(silent, self.rank, WARM_UP_STEPS)

    def _sharded(self) -> tuple[Call, Call]:
        together = _backward(_shard(dist.group.WORLD), self.rank, WARM_UP_STEPS)
        return together, _backward(_shard(_fake_group()), self.rank, WARM_UP_STEPS)


class RondeBackend(GlooBackend):
    """The same with the backend "ronde"."""

    backend = "ronde"


def _done(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def _fake_group() -> Any:
    """Return a group of PyTorch's own backend without communication, of as many ranks."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401, registers it

    return dist.new_group(backend="fake")


def _shard(group: Any) -> Any:
    """Return a transformer sharded by FSDP2."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(MESH,))
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _backward(model: Callable[..., Any], rank: int, warm_up_steps: int) -> Call:
    """Return a step: new gradients, without the optimizer's step, which is the same for all."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(Transformer.vocabulary, TOKENS, generator=generator)
    targets = torch.randint(Transformer.vocabulary, TOKENS, generator=generator).flatten()

    def step() -> None:
        model.zero_grad()  # type: ignore[attr-defined]
        scores = model(tokens).flatten(0, 1)
        torch.nn.functional.cross_entropy(scores, targets).backward()

    for _ in range(warm_up_steps):
        step()
    return step
