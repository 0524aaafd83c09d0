"""Ronde under Horovod's name: `horovod.torch`, `horovod.ray` and `horovod.run`. See ronde.compat."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

__version__ = "0.28.1"  # the Horovod whose names these are, for scripts that check it


def _missing(name: str) -> str:
    return (
        f"{name} is not available: Ronde replaces Horovod in this process (ronde.compat), and provides only "
        "horovod.torch, horovod.spark, horovod.ray and horovod.run"
    )


class _Last(MetaPathFinder):
    """The last finder of modules, which explains what Ronde lacks."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.startswith("horovod."):
            # Without the argument `name`, for which `from horovod import ...` would swallow the message.
            raise ModuleNotFoundError(_missing(fullname))


def __getattr__(name: str) -> Any:
    if name == "run":
        return import_module("horovod.runner").run  # needs the launcher
    raise AttributeError(_missing(f"horovod.{name}"))


_finder: Any = _Last()
sys.meta_path.append(_finder)
