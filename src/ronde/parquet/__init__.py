"""Training from Parquet files, by the ranks of any job; `ronde.spark.TorchEstimator` writes them and starts it."""
