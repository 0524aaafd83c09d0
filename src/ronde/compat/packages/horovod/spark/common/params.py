"""`horovod.spark.common.params`: the parameters of estimators and models, those of `ronde.spark`."""

from __future__ import annotations

from ronde.spark.ml_params import EstimatorParams, ModelParams

__all__ = ["EstimatorParams", "ModelParams"]
