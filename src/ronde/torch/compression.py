"""Fewer bytes on the way: 16-bit floating point between ranks.

A compressor is anything with `compress(tensor) -> (tensor, context)` and `decompress(tensor, context) -> tensor`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Compression", "Compressor"]


class Compressor(Protocol):
    """What `compression=` takes: a class with these two static methods, or an object with such methods."""

    def compress(self, tensor: Any, /) -> tuple[Any, Any]:
        """Return the tensor to send, and whatever `decompress` needs to know."""

    def decompress(self, tensor: Any, context: Any, /) -> Any:
        """Return the received tensor as its user expects it."""


class _None:
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


class _FP16(_Half):
    sent = torch.float16


class _BF16(_Half):
    sent = torch.bfloat16


class Compression:
    """The compressors there are. `bf16` has float32's range and three digits, `fp16` overflows above 65,504."""

    none: Compressor = _None()
    fp16: Compressor = _FP16()
    bf16: Compressor = _BF16()
