"""Elastic training."""
