"""`horovod.spark.common.estimator`: the classes of all estimators and models, which are those for PyTorch."""

from __future__ import annotations

from ronde.spark.torch_estimator import TorchEstimator as HorovodEstimator
from ronde.spark.torch_model import TorchModel as HorovodModel

__all__ = ["HorovodEstimator", "HorovodModel"]
