"""`horovod.spark.task`: which GPUs a worker has."""

from __future__ import annotations

from ronde.environment import environment

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """Return the GPUs that Spark has given this worker's task; empty outside a worker, or if Spark gives none.

    The worker sees those of all tasks on its host, in the order of their local ranks.
    """
    variables = environment()
    gpus = [name.strip() for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    rank, size = int(variables.get("LOCAL_RANK", "0")), int(variables.get("LOCAL_WORLD_SIZE", "1"))
    first = rank * len(gpus) // size
    return gpus[first : first + max(1, len(gpus) // size)]  # several tasks may share a GPU
