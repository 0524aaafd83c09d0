"""Compressors, which send floating point in 16 bits between ranks.

A compressor is any object with `compress(tensor) -> (tensor, context)` and `decompress(tensor, context) -> tensor`. The
classes have Horovod's names; programs pass the classes, not instances.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor(Protocol):
    """What `compression=` takes: a class with these two static methods, or an object with such methods."""

    def compress(self, tensor: torch.Tensor, /) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the context that `decompress` gets.

        Args:
            tensor: as the user passed it.

        Raises no error.
        """

    def decompress(self, tensor: torch.Tensor, context: Any, /) -> torch.Tensor:
        """Return the received tensor in the dtype that the user passed.

        Args:
            tensor: as it was received.
            context: returned by `compress`.

        Raises no error.
        """


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any, /) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any, /) -> Any:
        return tensor


class _Half:
    """Sends floating point in 16 bits; other types as they are. Sums are formed in 32 bits and rounded once."""

    sent: Any

    @classmethod
    def compress(cls, tensor: Any, /) -> tuple[Any, Any]:
        return (tensor.to(cls.sent), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, context: Any, /) -> Any:
        return tensor if context is None else tensor.to(context)


class FP16Compressor(_Half):
    """Sends float16."""

    sent = torch.float16


class BF16Compressor(_Half):
    """Sends bfloat16."""

    sent = torch.bfloat16


class Compression:
    """The compressors there are. `bf16` has float32's range and three digits, `fp16` overflows above 65,504."""

    none: Compressor = NoneCompressor
    fp16: Compressor = FP16Compressor
    bf16: Compressor = BF16Compressor
