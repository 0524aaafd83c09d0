"""Functions about the installation, which programs for Horovod call before they import a framework's part.

Of the frameworks that Horovod calls extensions, Ronde has PyTorch.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TypeVar

from ronde.environment import environment, set_variable

__all__ = [
    "EXTENSIONS",
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
]

EXTENSIONS = ["tensorflow", "torch", "mxnet"]

T = TypeVar("T")


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
