"""Other libraries that can carry the engine's tensors: MPI, Gloo, NCCL, oneCCL, and registered ones.

Each is a room of its own, behind the interface in `base`, and is imported only if a user asks for it by name. What they
must do is said by one suite, tests/conformance/test_backends.py.
"""
