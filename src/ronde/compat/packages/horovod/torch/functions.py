"""Horovod keeps the broadcasts of models, optimizers and objects here; these are all names of `ronde.torch`."""

from __future__ import annotations

from ronde.torch import *  # noqa: F403
