"""The linear models of `ronde.ml`, by the method that fits them."""

from __future__ import annotations
