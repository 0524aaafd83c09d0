"""`ronde.torch` has the names of horovod.torch 0.28, its arguments in their order, and their defaults.

What is not there yet stands in a table, which may only shrink.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import ronde

pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")

MISSING = {
    "start_timeline",
    "stop_timeline",
}

NAMES = """
    Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum SyncBatchNorm
    add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_
    alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
    broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built ddl_built elastic
    global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
    grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
    grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled
    mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built shutdown
    size sparse_allreduce_async start_timeline stop_timeline synchronize
"""

SCALED = "prescale_factor=1.0 postscale_factor=1.0"
REDUCED = f"average=None name=None op=None {SCALED} process_set"
COMPRESSED = f"average=None name=None compression=none op=None {SCALED} process_set"
SIGNATURES = {
    "init": "comm=None process_sets=None",
    "join": "device=-1",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "allreduce": f"tensor {COMPRESSED}",
    "allreduce_": f"tensor {REDUCED}",
    "allreduce_async": f"tensor {REDUCED}",
    "allreduce_async_": f"tensor {REDUCED}",
    "grouped_allreduce": f"tensors {COMPRESSED}",
    "grouped_allreduce_": f"tensors {REDUCED}",
    "grouped_allreduce_async": f"tensors {REDUCED}",
    "grouped_allreduce_async_": f"tensors {REDUCED}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name=None process_set",
    "allgather_async": "tensor name=None process_set",
    "grouped_allgather": "tensors name=None process_set",
    "grouped_allgather_async": "tensors name=None process_set",
    "broadcast": "tensor root_rank name=None process_set",
    "broadcast_": "tensor root_rank name=None process_set",
    "broadcast_async": "tensor root_rank name=None process_set",
    "broadcast_async_": "tensor root_rank name=None process_set",
    "alltoall": "tensor splits=None name=None process_set",
    "alltoall_async": "tensor splits=None name=None process_set",
    "reducescatter": f"tensor name=None compression=none op=Average process_set {SCALED}",
    "reducescatter_async": f"tensor name=None op=Average process_set {SCALED}",
    "grouped_reducescatter": f"tensors name=None compression=none op=Average process_set {SCALED}",
    "grouped_reducescatter_async": f"tensors name=None op=Average process_set {SCALED}",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model=None",
    "broadcast_object": "obj root_rank=0 name=None process_set",
    "allgather_object": "obj name=None process_set",
    "DistributedOptimizer": (
        "optimizer named_parameters=None compression=none backward_passes_per_step=1 op=Average "
        "gradient_predivide_factor=1.0 num_groups=0 groups=None sparse_as_dense=False process_set"
    ),
    "SyncBatchNorm": "num_features eps=1e-05 momentum=0.1 affine=True track_running_stats=True process_set",
}


def test_all_names_are_there() -> None:
    there = set(NAMES.split()) & set(hvd.__all__)
    assert set(NAMES.split()) - there <= MISSING


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_their_places_and_defaults(name: str) -> None:
    parameters = list(inspect.signature(getattr(hvd, name)).parameters.values())
    ours = {parameter.name: parameter for parameter in parameters}
    theirs = SIGNATURES[name].split()
    assert [parameter.name for parameter in parameters[: len(theirs)]] == [
        word.partition("=")[0] for word in theirs
    ]
    for word in theirs:
        argument, equals, default = word.partition("=")
        if argument == "process_set" and "process_set" not in name:
            assert ours[argument].default is hvd.global_process_set
        if equals:
            assert _written(ours[argument].default) == default
    for parameter in parameters[len(theirs) :]:  # what is only ours must not be needed
        is_optional = parameter.kind is inspect.Parameter.VAR_KEYWORD
        assert is_optional or parameter.default is not inspect.Parameter.empty


def test_modules_are_there_with_their_names() -> None:
    """Programs ask for `hvd.mpi_ops.Sum` without an import of their own, or import from the module."""
    assert hvd.mpi_ops.Sum is hvd.Sum
    assert hvd.mpi_ops.allreduce_async_ is hvd.allreduce_async_
    assert {*NAMES.split(), "is_homogeneous"} - {*hvd.mpi_ops.__all__, *hvd.functions.__all__} - MISSING == {
        "Compression",
        "DistributedOptimizer",
        "SyncBatchNorm",
        "elastic",
    }
    assert hvd.optimizer.DistributedOptimizer is hvd.DistributedOptimizer
    assert hvd.sync_batch_norm.SyncBatchNorm is hvd.SyncBatchNorm
    assert hvd.compression.NoneCompressor is hvd.Compression.none
    assert hvd.compression.FP16Compressor is hvd.Compression.fp16


def _written(default: Any) -> str:
    if default is hvd.Compression.none:
        return "none"
    return getattr(default, "name", None) or repr(default)


def test_the_error_to_recover_from() -> None:
    assert issubclass(ronde.PeerLostError, hvd.HorovodInternalError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(
        ronde.MismatchError, hvd.HorovodInternalError
    )  # Horovod's `synchronize` raises it for both
    assert not issubclass(ronde.MismatchError, ronde.PeerError)  # to try again would not help
