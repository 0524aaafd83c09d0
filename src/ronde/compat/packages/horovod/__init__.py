"""Ronde under Horovod's name: `horovod.torch`, `horovod.spark`, `horovod.ray` and `horovod.run`. See ronde.compat.

A file has the names of one of Horovod's packages. `add_modules` makes the modules in which Horovod has them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any, NoReturn

__version__ = "0.28.1"  # the Horovod whose names these are, for scripts that check it


_LAUNCH = "call horovod.run(fn, args, np=...), or start a script by ronde run --horovod"
_INSTEAD = {  # by the name that Ronde lacks: what to use; it also counts for all names below
    "horovod.common.elastic.notification_manager": "the agent of ronde run tells its workers of changes",
    "horovod.common.elastic.run_fn": "decorate the training function with horovod.torch.elastic.run",
    "horovod.ray.BaseHorovodWorker": "give RayExecutor.start an executable_cls",
    "horovod.ray.elastic.TestDiscovery": "use Ray's own test clusters (ray.cluster_utils)",
    "horovod.ray.elastic_v2.ElasticAdapter": "use horovod.ray.RayExecutor with min_workers",
    "horovod.ray.elastic_v2.ElasticParams": "use horovod.ray.RayExecutor with min_workers",
    "horovod.ray.elastic_v2.TestDiscovery": "use Ray's own test clusters (ray.cluster_utils)",
    "horovod.ray.ray_logger": "print in the function, and the output appears at the caller",
    "horovod.ray.worker": "give RayExecutor.start an executable_cls",
    "horovod.runner._HorovodArgs": _LAUNCH,
    "horovod.runner.elastic": "give ronde run --horovod --min-np and --host-discovery-script",
    "horovod.runner.gloo_run": _LAUNCH,
    "horovod.runner.js_run": "start the script by jsrun, as python -m ronde.compat script.py",
    "horovod.runner.launch._run": _LAUNCH,
    "horovod.runner.launch.parse_args": "ronde run --horovod --dry-run shows what a command line does",
    "horovod.runner.mpi_run.mpi_run": "start the script by mpirun, as python -m ronde.compat script.py",
    "horovod.spark.common.util.get_simple_meta_from_parquet": "TorchEstimator.fit_on_parquet reads the files itself",
    "horovod.spark.common.util.prepare_data": "TorchEstimator.fit writes the data frame itself",
    "horovod.spark.keras": "train a PyTorch model by horovod.spark.torch.TorchEstimator",
    "horovod.spark.lightning": (
        "train the module by horovod.spark.torch.TorchEstimator, or call a function with a Lightning Trainer by "
        "horovod.spark.run"
    ),
    "horovod.torch.elastic.state.get_handler_registry": "give the state objects with state_dict and load_state_dict",
    "horovod.torch.elastic.state.set_handler_registry": "give the state objects with state_dict and load_state_dict",
}


def missing(
    name: str, lack: str = "provides only horovod.torch, horovod.spark, horovod.ray and horovod.run"
) -> str:
    """Return the error's text for a name of Horovod that Ronde lacks."""
    of = name
    while of and of not in _INSTEAD:
        of = of.rpartition(".")[0]
    advice = f"; {_INSTEAD[of]}" if of else ""
    return (
        f"{name} is not available: Ronde replaces Horovod in this process (ronde.compat), and {lack}{advice}"
    )


def add_modules(parent: str, **modules: Sequence[str]) -> None:
    """Make modules below `parent`, which has all their names: `add_modules(__name__, util=["env", "to_list"])`.

    Classes and functions of the parent then say that they are from the module, as in Horovod, also in pickles.
    """
    whole: Any = sys.modules[parent]
    if not hasattr(whole, "__path__"):
        whole.__path__ = []  # so Python takes it for a package, and asks `_Last` for other modules below it
    for short, names in modules.items():
        spec = ModuleSpec(f"{parent}.{short}", None, origin=whole.__file__)
        spec.has_location = True
        module: Any = module_from_spec(spec)
        for name in names:
            member = getattr(whole, name)
            if getattr(member, "__module__", None) == parent:
                member.__module__ = spec.name
            setattr(module, name, member)
        module.__all__ = list(names)
        module.__getattr__ = partial(_raise_missing, spec.name)
        sys.modules[spec.name] = module
        setattr(whole, short, module)
    if hasattr(whole, "__all__"):
        whole.__all__ = [*whole.__all__, *modules]


def _raise_missing(module: str, name: str) -> NoReturn:
    """Raise the error for a name that Ronde's module of this name lacks.

    If there is something to use instead, it is no AttributeError, for which `from` would swallow the message.
    """
    text = missing(f"{module}.{name}", f"does not provide {name}")
    raise ImportError(text) if f"{module}.{name}" in _INSTEAD else AttributeError(text)


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

add_modules(__name__, version=["__version__"])
