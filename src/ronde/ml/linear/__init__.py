"""The linear models of `ronde.ml`, one a file."""

from __future__ import annotations
