"""Vectors of words."""
