"""`horovod.common`: what all frameworks share: errors, process sets, and functions about job and installation.

Of the frameworks that Horovod calls extensions, Ronde has PyTorch. Programs call these functions before they import the
part of a framework.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

from ronde.comm import world
from ronde.elastic import HostsUpdatedInterrupt, ObjectState, State  # noqa: F401 - for add_modules
from ronde.engine import process
from ronde.engine.process import ProcessSet, add_process_set, global_process_set, remove_process_set
from ronde.environment import environment, set_variable
from ronde.errors import CollectiveError as HorovodInternalError
from ronde.types import Adasum, Average, Max, Min, Product, Sum

from . import add_modules

__all__ = [
    "HorovodInternalError",
    "ProcessSet",
    "add_process_set",
    "check_extension",
    "global_process_set",
    "remove_process_set",
]

EXTENSIONS = ["tensorflow", "torch", "mxnet"]
_cache = functools.cache  # private in Horovod, too, but its tests import it

T = TypeVar("T")


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than Horovod was built for. Ronde is not built for any, and never raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} is running, but {installed_version} was installed", name=name)
        self.name = name
        self.version = version
        self.installed_version = installed_version


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless Ronde answers for this framework: `ext_name` is "horovod.torch", for example."""
    if not extension_available(ext_name.removeprefix("horovod.")):
        raise ImportError(
            f"{ext_name} is not available: Ronde replaces Horovod in this process (ronde.compat), and of "
            "the frameworks provides only PyTorch, if it is installed"
        )


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether Ronde answers for this framework: "torch", if it is installed."""
    return ext_base_name == "torch" and find_spec("torch") is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework sees a GPU."""
    if not extension_available(ext_base_name):
        return False
    import torch

    return bool(torch.cuda.is_available())


def mpi_built(verbose: bool = False) -> bool:
    """Return whether MPI could carry tensors; this and the next are those of `horovod.torch`."""
    from ronde.torch import basics

    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Return whether Gloo could."""
    from ronde.torch import basics

    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """Return the version of NCCL that could, or 0."""
    from ronde.torch import basics

    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """Return whether IBM's DDL could."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return whether oneCCL could."""
    from ronde.torch import basics

    return basics.ccl_built()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set variables of the environment within a block; those that are None stay as they are."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    before = environment()
    try:
        for name, value in given.items():
            set_variable(name, value)
        yield
    finally:
        for name in given:
            set_variable(name, before.get(name))


def get_ext_suffix() -> str:
    """Return how the names of Python's extension modules end here."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Do nothing: Ronde works with every version of a framework that it supports, without being built for it."""


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether the number is a power of two."""
    return num_rank > 0 and num_rank.bit_count() == 1


def is_iterable(x: object) -> bool:
    """Return whether one can iterate over it."""
    return isinstance(x, Iterable)


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 - Horovod's name
    """Cut a list into n parts of about equal length; the first ones are longer if there is a remainder."""
    short, longer = divmod(len(l), n)
    bounds = [i * short + min(i, longer) for i in range(n + 1)]
    return [l[begin:end] for begin, end in zip(bounds, bounds[1:])]


class HorovodBasics:
    """Horovod's functions that need no framework. The arguments, which name Horovod's library, have no effect."""

    Adasum, Average, Max, Min, Product, Sum = Adasum, Average, Max, Min, Product, Sum

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        pass

    def init(
        self,
        comm: Sequence[int] | None = None,
        process_sets: Iterable[ProcessSet | Sequence[int]] | str | None = None,
        **how: Any,
    ) -> None:
        """Join the world, as `horovod.torch.init` does; `comm`: None or the list of all ranks."""
        from ronde.torch.basics import init

        init(comm, process_sets, **how)

    shutdown = staticmethod(process.shutdown)
    start_timeline = staticmethod(process.start_timeline)
    stop_timeline = staticmethod(process.stop_timeline)
    is_initialized = staticmethod(world.is_initialized)
    rank = staticmethod(world.rank)
    size = staticmethod(world.size)
    local_rank = staticmethod(world.local_rank)
    local_size = staticmethod(world.local_size)
    cross_rank = staticmethod(world.cross_rank)
    cross_size = staticmethod(world.cross_size)
    is_homogeneous = staticmethod(world.is_homogeneous)
    mpi_built = staticmethod(mpi_built)
    gloo_built = staticmethod(gloo_built)
    nccl_built = staticmethod(nccl_built)
    ddl_built = staticmethod(ddl_built)
    ccl_built = staticmethod(ccl_built)

    def __getattr__(self, name: str) -> Any:
        if name in ("cuda_built", "gloo_enabled", "mpi_enabled", "mpi_threads_supported", "rocm_built"):
            from ronde.torch import basics

            return getattr(basics, name)
        raise AttributeError(f"HorovodBasics of Ronde has no {name}")


add_modules(
    __name__,
    basics=["HorovodBasics"],
    elastic=["HostsUpdatedInterrupt", "ObjectState", "State"],
    exceptions=["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"],
    process_sets=["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"],
    util=[
        "EXTENSIONS",
        "_cache",
        "ccl_built",
        "check_extension",
        "check_installed_version",
        "ddl_built",
        "env",
        "extension_available",
        "get_ext_suffix",
        "gloo_built",
        "gpu_available",
        "is_iterable",
        "mpi_built",
        "nccl_built",
        "num_rank_is_power_2",
        "split_list",
    ],
)
