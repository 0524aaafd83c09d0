"""`ronde.spark.TorchEstimator`: a Spark ML estimator that trains a PyTorch model in workers on the executors."""
