"""Ronde under Horovod's name: `horovod.torch`, `horovod.ray` and `horovod.run`. See ronde.compat."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

__version__ = "0.28.1"  # the Horovod whose names these are, for scripts that check it


_INSTEAD = {  # of what has an equivalent that is no module or name of Horovod
    "horovod.ray.BaseHorovodWorker": "give RayExecutor.start an executable_cls",
    "horovod.ray.ray_logger": "print in the function, and the output appears at the caller",
    "horovod.ray.elastic_v2": "use horovod.ray.RayExecutor with min_workers",
    "horovod.torch.elastic": "save and load ronde.Checkpoints; all workers start again after a change",
}


def missing(
    name: str, lack: str = "provides only horovod.torch, horovod.spark, horovod.ray and horovod.run"
) -> str:
    """Return the error's text for a name of Horovod that Ronde lacks."""
    advice = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
    return (
        f"{name} is not available: Ronde replaces Horovod in this process (ronde.compat), and {lack}{advice}"
    )


class _Last(MetaPathFinder):
    """The last finder of modules, which explains what Ronde lacks."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.startswith("horovod."):
            # Without the argument `name`, for which `from horovod import ...` would swallow the message.
            raise ModuleNotFoundError(missing(fullname))


def __getattr__(name: str) -> Any:
    if name == "run":
        return import_module("horovod.runner").run  # needs the launcher
    raise AttributeError(missing(f"horovod.{name}"))


_finder: Any = _Last()
sys.meta_path.append(_finder)
