"""Horovod keeps what ranks tell each other about models and optimizers here; these are all names of `ronde.torch`."""

from __future__ import annotations

from ronde.torch import *  # noqa: F403
