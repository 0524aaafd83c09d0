"""`ronde run --check-build`: lists the available libraries in horovodrun's layout, after loading each of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["check_build"]

Probe = Callable[[], str]  # returns a description; raises any exception if the thing is missing


def check_build() -> str:
    """Return the text. Loads frameworks, so this process can start no workers afterwards."""
    from ronde.cli import version as ours

    groups: dict[str, dict[str, Probe]] = {
        "Frameworks (any that exchanges arrays by DLPack or the buffer protocol works)": {
            "NumPy": lambda: version("numpy"),
            "PyTorch": lambda: str(import_module("torch").__version__),
            "TensorFlow": lambda: _not_ours("tensorflow"),
            "MXNet": lambda: _not_ours("mxnet"),
        },
        "Controllers": {
            "Ronde's own": _native,
            "MPI": lambda: _none("none is needed"),
            "Gloo": lambda: _none("none is needed"),
        },
        "Backends (RONDE_BACKENDS; docs/backends.md)": {
            "native": _native,
            "MPI": _mpi,
            "Gloo": lambda: _of_torch("gloo"),
            "NCCL": _nccl,
            "oneCCL": _ccl,
        },
        "Launchers": {
            "this machine": lambda: "ronde run -n",
            "SSH": lambda: _program("ssh"),
            "MPI": lambda: _program("mpirun"),
            "Slurm": lambda: _program("srun"),
        },
    }
    lines = [f"Ronde {ours()}", ""]
    for title, probes in groups.items():
        lines += [f"{title}:", *(_line(name, probe) for name, probe in probes.items()), ""]
    return "\n".join(lines[:-1]) + "\n"


def _line(name: str, probe: Probe) -> str:
    try:
        mark, found = "X", probe()
    except PackageNotFoundError as error:
        mark, found = " ", f"{error.name} is not installed"
    except Exception as error:  # libraries fail to load in many ways
        mark, found = " ", str(error).strip().partition("\n")[0] or type(error).__name__
    return f"    [{mark}] {name}: {found}"


def _none(why: str) -> str:
    raise LookupError(why)


def _not_ours(package: str) -> str:
    try:
        version(package)
    except PackageNotFoundError:
        _none("not installed, and not supported by Ronde")
    return _none("installed, but not supported by Ronde")


def _native() -> str:
    import_module("ronde.comm.communicator")  # loads the native module
    return "shared memory and TCP"


def _mpi() -> str:
    import_module("mpi4py").rc.initialize = False
    mpi: Any = import_module("mpi4py.MPI")
    return str(mpi.Get_library_version()).partition(",")[0].strip("\0\n ")


def _of_torch(backend: str) -> str:
    distributed: Any = import_module("torch.distributed")
    if not distributed.is_available() or not getattr(distributed, f"is_{backend}_available")():
        _none(f"this PyTorch was built without {backend}")
    return "of PyTorch"


def _nccl() -> str:
    found = _of_torch("nccl")
    cuda: Any = import_module("torch.cuda")
    if not cuda.is_available():
        _none("PyTorch sees no CUDA device")
    return f"{found}, with {cuda.device_count()} CUDA devices"


def _ccl() -> str:
    ccl: Any = import_module("ronde.backends.ccl")
    if not ccl.is_installed():
        _none("the package oneccl is not installed")
    return "of the package oneccl"


def _program(name: str) -> str:
    return shutil.which(name) or _none(f"there is no {name} in PATH")
