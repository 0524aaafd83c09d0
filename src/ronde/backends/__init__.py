"""Other libraries that can carry the engine's tensors: MPI, Gloo, NCCL, oneCCL, and registered ones.

Each has a module behind the interface in `backend`, which is imported only if the setting `backends` names it. One test
suite, tests/conformance/test_backends.py, describes what all of them must do.
"""

from __future__ import annotations

from ronde.backends.backend import Backend, BackendContext, DeviceBackend, Patience

__all__ = ["Backend", "BackendContext", "DeviceBackend", "Patience"]
