"""Estimators that are sums of decision trees."""
