"""What the estimators of k-means consist of: metrics, starts, steps, and the native assignment of rows to centers."""
