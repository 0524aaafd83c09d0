"""k-means: the estimators, their steps, and points with their nearest centers."""
