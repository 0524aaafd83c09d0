"""`ronde.spark.TorchEstimator`: a Spark ML estimator that trains a PyTorch model in workers on the executors."""

from __future__ import annotations

from ronde.data.needs import need

need("torch", extra="spark-estimator")  # with an error that says how to install it
