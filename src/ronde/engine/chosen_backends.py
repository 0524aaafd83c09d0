"""Chooses the backends that carry the engine's collectives: the setting lists them, and all ranks agree once.

The setting `backends` is a list for all operations, `mpi,native`, lists for some,
`allreduce=mpi,native;broadcast=gloo`, or both, `native;allreduce=gloo,native`. Operations without a list are native.
The first backend of a list that supports a tensor carries it.

Every rank sends what it lacks for each listed backend. If one rank lacks something, no rank uses the backend, and the
next one in the list takes its place. Then the backends connect, and the native side gets the table of what each
carries.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from itertools import product
from typing import Any

from ronde import _native
from ronde.backends.backend import Backend, BackendContext, DeviceBackend
from ronde.backends.carrier import Carrier, DeviceCarrier
from ronde.comm.byte_exchange import allgather_bytes, broadcast_bytes
from ronde.comm.communicator import Communicator
from ronde.comm.world import meeting
from ronde.errors import UsageError
from ronde.settings import Settings
from ronde.typed_json import TypedJson
from ronde.types import Allreduce, Average, DType, Kind, ReduceOp, Reducescatter

__all__ = ["DEVICE_MEMORY", "ChosenBackends", "backend_class", "preferences"]

_log = logging.getLogger("ronde.engine")

_NATIVE = "native"

_OPERATIONS = (
    Kind.allreduce,
    Kind.reducescatter,
    Kind.allgather,
    Kind.broadcast,
    Kind.alltoall,
    Kind.barrier,
)

_GROUP = "ronde.backends"  # of entry points
_OURS = {
    "mpi": ("ronde.backends.mpi", "MPI"),
    "gloo": ("ronde.backends.gloo", "Gloo"),
    "ccl": ("ronde.backends.ccl", "CCL"),
    "nccl": ("ronde.backends.nccl", "NCCL"),
}

_ON_DEVICE = 1 << 12  # as in Backends of cpp/engine/backend.h, like the table
_NO_BACKEND = 255
# The end of the device of a tensor that a backend takes in place (cpp/engine/signature.h).
DEVICE_MEMORY = " memory"

# For each backend: what a rank lacks, or None, and the resource of its host that it claims.
_LACKS_AND_CLAIMS: TypedJson[tuple[tuple[str | None, str], ...]] = TypedJson(
    tuple[tuple[str | None, str], ...], "list of what a rank lacks"
)


class ChosenBackends:
    """The backends of one engine, connected. All ranks make it.

    `members`: by rank in `comm`, its rank in the job (None: all ranks). `settings`: the same `backends` on all ranks.
    Raises UsageError, on all ranks, if no backend carries an operation.
    """

    def __init__(
        self,
        cycle: _native.Cycle,
        comm: Communicator,
        settings: Settings,
        members: Sequence[int] | None = None,
    ) -> None:
        self._members = tuple(range(comm.size) if members is None else members)
        self._comm = comm
        self._preferences = preferences(settings.backends)
        self._opened: list[Backend] = []
        self._lacks: list[str] = []  # the reasons why backends cannot be used
        self._table = [0] * _ON_DEVICE + [_NO_BACKEND] * _ON_DEVICE
        classes = _needed(self._preferences)
        if not classes:
            return
        token = broadcast_bytes(comm, os.urandom(8).hex().encode()).decode()
        candidates = [
            kind(_place(comm, self._members, settings, f"{name} {token}")) for name, kind in classes.items()
        ]
        usable = self._agree(candidates)
        self._check_preferences(usable)
        if comm.rank == 0:
            for lack in self._lacks:
                _log.warning("%s", lack)
        for backend in candidates:
            if backend.name in usable:
                self._open(backend)
        carriers = {backend.name: _carrier(backend) for backend in self._opened}
        self._fill_table(carriers)
        cycle.use_backends(list(carriers.values()), self._table)

    def check(self, kind: Kind, dtype: DType, op: ReduceOp, device: str) -> None:
        """Raise UsageError, alike on all ranks, if no backend can carry the operation."""
        if self._table[_place_of(kind, dtype, op, device.endswith(DEVICE_MEMORY))] == _NO_BACKEND:
            what = f"{op.name} of " if kind in (Allreduce, Reducescatter) else ""
            raise UsageError(
                f"no backend can carry an {kind.name} by {what}{dtype.name} values in {device.split()[0]} memory: the "
                f"setting allows {', '.join(self._preferences[kind])}; add native to it"
            )

    def carries(self, kind: Kind, dtype: DType, op: ReduceOp, device: Any) -> bool:
        """Return whether a backend takes tensors of this device (a torch.device) in place."""
        is_there = any(isinstance(it, DeviceBackend) and it.device == device for it in self._opened)
        return is_there and self._table[_place_of(kind, dtype, op, True)] != _NO_BACKEND

    def names(self) -> list[str]:
        """Return the names of the backends in use besides the native one."""
        return [backend.name for backend in self._opened]

    def close(self, failed: bool) -> None:
        """Close all backends. `failed`: the world has failed."""
        for backend in self._opened:
            backend.close(failed)
        self._opened = []

    def _agree(self, candidates: Sequence[Backend]) -> list[str]:
        """Return the names of the backends that all ranks can use."""
        lacking = [backend.missing() for backend in candidates]
        claims = [backend.claim() if lack is None else "" for backend, lack in zip(candidates, lacking)]
        mine = _LACKS_AND_CLAIMS.encode(tuple(zip(lacking, claims)))
        everyones = [_LACKS_AND_CLAIMS.decode(each) for each in allgather_bytes(self._comm, mine)]
        usable = []
        for index, backend in enumerate(candidates):
            reasons = _reasons([of_rank[index] for of_rank in everyones])
            if not reasons:
                usable.append(backend.name)
                continue
            rank, reason = next(iter(reasons.items()))
            more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            who = f"rank {rank} on {self._comm.hosts[rank]}{more}"
            self._lacks.append(f"backend {backend.name} cannot be used: {who}: {reason}")
        return usable

    def _check_preferences(self, usable: list[str]) -> None:
        for kind, order in self._preferences.items():
            if not any(name == _NATIVE or name in usable for name in order):
                lacks = "; ".join(self._lacks)
                raise UsageError(f"no backend can carry {kind.name}: {lacks}; backends={','.join(order)}")

    def _open(self, backend: Backend) -> None:
        try:
            backend.open()
        except BaseException as error:
            self._comm.abort(f"backend {backend.name} could not start: {error!r}")
            self.close(failed=True)
            raise
        self._opened.append(backend)

    def _fill_table(self, carriers: Mapping[str, Carrier | DeviceCarrier]) -> None:
        numbers = {_NATIVE: 0, **{name: number for number, name in enumerate(carriers, start=1)}}

        def number_of(kind: Kind, dtype: DType, op: ReduceOp, on_device: bool) -> int:
            for name in self._preferences[kind]:
                if name == _NATIVE and not on_device:
                    return numbers[name]
                carrier = carriers.get(name)
                if carrier is not None and isinstance(carrier, DeviceCarrier) == on_device:
                    if carrier.is_enabled(kind, dtype, op):
                        return numbers[name]
            return _NO_BACKEND

        for kind, dtype, op in product(_OPERATIONS, DType, ReduceOp):
            if kind in (Allreduce, Reducescatter) and not _native.is_supported(dtype, op):
                continue
            self._table[_place_of(kind, dtype, op, False)] = number_of(kind, dtype, op, False)
            # ronde/torch/tensors.py divides those.
            if op is not Average or not DType.uint8 <= dtype <= DType.int64:
                self._table[_place_of(kind, dtype, op, True)] = number_of(kind, dtype, op, True)


def _needed(wanted: Mapping[Kind, Sequence[str]]) -> dict[str, type[Backend]]:
    """Return the backends that may carry an operation. Raises UsageError for unknown names.

    The native backend carries every tensor in main memory. So after it in a list, only backends for the memory of a
    device have an effect.
    """
    needed: dict[str, type[Backend]] = {}
    for order in wanted.values():
        for name in order:
            if name != _NATIVE and name not in needed:
                found = backend_class(name)
                if _NATIVE not in order[: order.index(name)] or issubclass(found, DeviceBackend):
                    needed[name] = found
    return needed


def _carrier(backend: Backend) -> Carrier | DeviceCarrier:
    return DeviceCarrier(backend) if isinstance(backend, DeviceBackend) else Carrier(backend)


def _reasons(lacks_and_claims: Sequence[tuple[str | None, str]]) -> dict[int, str]:
    """Return why a backend cannot be used, by rank: what the rank lacks, or a claim that it shares with another."""
    reasons: dict[int, str] = {}
    owners: dict[str, int] = {}
    for rank, (lack, claim) in enumerate(lacks_and_claims):
        if lack is not None:
            reasons[rank] = lack
        elif claim and owners.setdefault(claim, rank) != rank:
            reasons[rank] = f"it shares {claim} with rank {owners[claim]}"
    return reasons


def _place_of(kind: Kind, dtype: DType, op: ReduceOp, on_device: bool) -> int:
    return (_ON_DEVICE if on_device else 0) | kind << 8 | dtype << 4 | op


def _place(comm: Communicator, members: tuple[int, ...], settings: Settings, purpose: str) -> BackendContext:
    met = meeting()
    return BackendContext(
        rank=comm.rank,
        size=comm.size,
        members=members,
        hosts=comm.hosts,
        local_rank=comm.local_rank,
        address=met.address if met is not None else "127.0.0.1",
        purpose=purpose,
        store=met.store if met is not None else None,
        timeout_ns=settings.timeout_ns,
        start_timeout_ns=settings.start_timeout_ns,
        has_failed=comm.has_failed,
    )


# The setting `backends`, and backends by name


def preferences(text: str) -> dict[Kind, list[str]]:
    """Return the names for each operation, in order of preference. Raises UsageError for an invalid list."""
    names = {kind.name: kind for kind in _OPERATIONS}
    wanted: dict[Kind, list[str]] = {}
    default = [_NATIVE]
    for part in filter(None, (part.strip() for part in text.split(";"))):
        operation, equals, listed = part.rpartition("=")
        order = list(dict.fromkeys(name for name in (word.strip() for word in listed.split(",")) if name))
        if not order:
            raise UsageError(f"backends={text!r} is invalid: expected the name of a backend in {part!r}")
        if not equals:
            default = order
        elif operation.strip() in names:
            wanted[names[operation.strip()]] = order
        else:
            raise UsageError(
                f"backends={text!r} is invalid: {operation.strip()!r} is not one of the operations {', '.join(names)}"
            )
    return {kind: wanted.get(kind, default) for kind in _OPERATIONS}


def backend_class(name: str) -> type[Backend]:
    """Return the backend of this name, Ronde's or a registered one. Raises UsageError for an unknown name."""
    if name in _OURS:
        module, attribute = _OURS[name]
        found: type[Backend] = getattr(importlib.import_module(module), attribute)
        return found
    registered = {point.name: point for point in entry_points(group=_GROUP)}
    if name in registered:
        loaded: type[Backend] = registered[name].load()
        return loaded
    known = ", ".join([_NATIVE, *_OURS, *sorted(registered)])
    raise UsageError(f"backend {name!r} does not exist: expected one of {known}")
