"""The backend `nccl`: the NCCL of PyTorch, for tensors that stay in the memory of CUDA devices.

The rules:
  1. The stream of the submitting thread writes a tensor. `make_ready` records an event on it, and the backend's stream
     waits for the event before it uses the memory. So no thread of the host waits for the device.
  2. An operation ends for the engine when the device has completed it. So the program may use the result on any stream,
     and free its memory.
  3. After a failure the group is aborted, which ends NCCL's kernels: they would wait for ever for a rank that is gone.

Each rank needs a device that no other rank uses: of the devices that it sees, the one whose number is its local rank.
NCCL rounds sums of 16-bit floats at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ronde.backends.backend import BackendContext, DeviceBackend
from ronde.types import BitAnd, BitOr, BitXor, DType, Kind, ReduceOp

__all__ = ["NCCL", "make_ready"]

_KINDS = (Kind.allreduce, Kind.reducescatter, Kind.allgather, Kind.broadcast, Kind.alltoall)
_REDUCED = (
    *(DType.int8, DType.uint8, DType.int32, DType.int64),
    *(DType.float16, DType.bfloat16, DType.float32, DType.float64),
)
_SPIN_NS = 10**9  # the device works on without the processor, which need not ask without pauses for longer

_ready: dict[int, Any] = {}  # by address: the event after which the memory may be used


def make_ready(*tensors: Any) -> None:
    """Let the backend use the memory after the work that is now on the current stream."""
    import torch

    for tensor in tensors:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensor.device))
        _ready[tensor.data_ptr()] = event


class _Memory:
    """Bytes of a device, for torch.as_tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


class NCCL(DeviceBackend):
    """A ProcessGroupNCCL of torch.distributed, which only this object knows."""

    name = "nccl"

    def __init__(self, place: BackendContext) -> None:
        super().__init__(place)
        self._group: Any = None

    def missing(self) -> str | None:
        try:
            import torch.distributed as distributed
            from torch import cuda
        except ImportError as error:
            return f"PyTorch cannot be imported ({error})"
        if not cuda.is_available():
            return "PyTorch sees no CUDA device"
        if not distributed.is_available() or not distributed.is_nccl_available():
            return "this PyTorch was built without NCCL"
        return self.place.lack_of_store()

    def claim(self) -> str:
        """Return the device that this rank cannot share."""
        import torch

        return f"CUDA device {torch.cuda.get_device_properties(self._device_number()).uuid}"

    def open(self) -> None:
        import torch
        from torch.distributed import ProcessGroupNCCL as Group
        from torch.distributed import ReduceOp as Op

        from ronde.backends.torch_store import JobStore

        self._torch = torch
        self._operations = dict(zip(ReduceOp, (Op.SUM, Op.AVG, Op.MIN, Op.MAX, Op.PRODUCT)))
        self.device = torch.device("cuda", self._device_number())
        self._stream = torch.cuda.Stream(self.device)
        options = Group.Options()
        options._timeout = timedelta(days=365)  # Ronde handles timeouts
        self._store = JobStore(self.place)
        self._group = Group(self._store, self.place.rank, self.place.size, options)
        one = torch.ones(1, device=self.device)
        make_ready(one)
        self._run_on_stream("start", [one], lambda: self._group.allreduce([one]))  # connects
        self._store.forget()

    def close(self, failed: bool) -> None:
        group, self._group = self._group, None
        if group is not None:
            if failed:
                group.abort()
            else:
                group.shutdown()

    def is_enabled(self, kind: Kind, dtype: DType, op: ReduceOp) -> bool:
        if kind in (Kind.allreduce, Kind.reducescatter):
            return dtype in _REDUCED and op in self._operations and op not in (BitAnd, BitOr, BitXor)
        return kind in _KINDS

    def view(self, address: int, size: int, dtype: DType) -> Any:
        if size == 0:
            return self._torch.empty(0, dtype=getattr(self._torch, dtype.name), device=self.device)
        flat = self._torch.as_tensor(_Memory(address, size), device=self.device)
        return flat.view(getattr(self._torch, dtype.name))

    def allreduce(self, x: Any, out: Any, op: ReduceOp) -> None:
        def begin() -> Any:
            if x is not out:
                out.copy_(x, non_blocking=True)
            return self._group.allreduce([out], self._options("AllreduceOptions", op))

        if out.numel():
            self._run_on_stream("allreduce", [x, out], begin)

    def reducescatter(self, x: Any, out: Any, counts: Sequence[int], op: ReduceOp) -> None:
        """Reduce and scatter equal shares by NCCL's operation, others by an all-reduce of which each rank keeps one."""
        if not x.numel():
            return
        start = sum(counts[: self.place.rank])

        def begin() -> Any:
            if min(counts) == max(counts):
                return self._group._reduce_scatter_base(out, x, self._options("ReduceScatterOptions", op))
            whole = x.clone()
            self._group.allreduce([whole], self._options("AllreduceOptions", op)).wait()
            out.copy_(whole[start : start + out.numel()], non_blocking=True)
            return None

        self._run_on_stream("reducescatter", [x, out], begin)

    def allgather(self, x: Any, out: Any, sizes: Sequence[int]) -> None:
        """Gather arrays that are padded to the longest: NCCL expects the same size from all ranks."""
        longest = max(sizes)

        def begin() -> Any:
            if min(sizes) == longest:
                return self._group._allgather_base(out, x)
            mine = x.new_zeros(longest)
            mine[: x.numel()] = x
            everything = x.new_empty(longest * len(sizes))
            self._group._allgather_base(everything, mine).wait()
            end = 0
            for rank, size in enumerate(sizes):
                out[end : end + size] = everything[rank * longest : rank * longest + size]
                end += size
            return None

        self._run_on_stream("allgather", [x, out], begin, late=True)

    def broadcast(self, data: Any, root: int) -> None:
        options = self._torch._C._distributed_c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._run_on_stream("broadcast", [data], lambda: self._group.broadcast([data], options))

    def alltoall(self, x: Any, in_sizes: Sequence[int], out: Any, out_sizes: Sequence[int]) -> None:
        def begin() -> Any:
            return self._group.alltoall_base(out, x, list(out_sizes), list(in_sizes))

        self._run_on_stream("alltoall", [x, out], begin, late=True)

    def barrier(self) -> None:
        raise NotImplementedError("a barrier has no memory, so no device carries it")

    def _device_number(self) -> int:
        import torch

        return self.place.local_rank % int(torch.cuda.device_count())

    def _options(self, name: str, op: ReduceOp) -> Any:
        options = getattr(self._torch._C._distributed_c10d, name)()
        options.reduceOp = self._operations[op]
        return options

    def _run_on_stream(
        self, operation: str, memory: Sequence[Any], begin: Callable[[], Any], late: bool = False
    ) -> None:
        """Run an operation on the stream when its memory is ready; return when the device has completed it.

        `late`: the engine's thread allocated the result's memory, which the default stream may still be using.
        """
        cuda = self._torch.cuda
        with cuda.device(self.device), cuda.stream(self._stream):
            for tensor in memory:
                event = _ready.get(tensor.data_ptr())
                if event is not None:
                    self._stream.wait_event(event)
            if late:
                self._stream.wait_stream(cuda.default_stream(self.device))
            work = begin()
            if work is not None:
                work.wait()  # the stream waits, not this thread
            done = cuda.Event()
            done.record(self._stream)
        self.place.patience(f"{operation} by nccl").wait_until(done.query, _SPIN_NS)
