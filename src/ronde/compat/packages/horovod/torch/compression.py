"""Horovod keeps compression here; these are names of `ronde.torch`, and the compressors."""

from __future__ import annotations

from ronde.torch import *  # noqa: F403
from ronde.torch.compression import FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]  # noqa: F405
