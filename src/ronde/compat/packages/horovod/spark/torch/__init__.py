"""`horovod.spark.torch`: the estimator of `ronde.spark`, and its model."""

from __future__ import annotations

from .estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
