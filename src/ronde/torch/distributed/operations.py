"""The operations of a process group: from tensors and options of torch.distributed to calls of the data plane.

The rules:
  1. Every member makes the same collective calls in the same order. The queue of the group makes them, in that order.
     A call with `async_op=False` that finds the queue empty is made in the calling thread.
  2. Messages (`send`, `recv`) have no order with collectives. The mailbox of the world carries them.
  3. Where PyTorch allows a tensor instead of a list of them, and values instead of options, so do the methods here.
  4. A contiguous tensor in main memory is read and written in place. Others, such as tensors on a GPU and those that
     wrap another tensor, are copied to main memory before and from there afterwards: right, but slow. For GPUs there is
     NCCL ("cpu:ronde,cuda:nccl").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed import ReduceOp as TorchReduceOp

from ronde.errors import UsageError
from ronde.torch.distributed.monitored_barrier import monitored_barrier
from ronde.torch.distributed.work import (
    DONE,
    NO_LIMIT,
    CombinedWork,
    Completer,
    Done,
    InFlight,
    InFlightMemory,
    Operation,
    Recorded,
    is_profiling,
    nanoseconds,
    of_several_tensors,
)
from ronde.types import Average, BitAnd, BitOr, BitXor, DType, Kind, Max, Min, Product, ReduceOp, Sum

if TYPE_CHECKING:
    from ronde.torch.distributed.connection import GroupConnection

__all__ = ["Operations"]

Tensors = Sequence[torch.Tensor]
Pieces = list[tuple[int, int]]  # addresses and sizes in bytes

_DTYPES: dict[torch.dtype, DType] = {
    getattr(torch, dtype.name): dtype for dtype in DType if hasattr(torch, dtype.name)
}

_Op = TorchReduceOp.RedOpType
_REDUCTIONS: dict[Any, ReduceOp] = {
    _Op.SUM: Sum,
    _Op.AVG: Average,
    _Op.MIN: Min,
    _Op.MAX: Max,
    _Op.PRODUCT: Product,
    _Op.BAND: BitAnd,
    _Op.BOR: BitOr,
    _Op.BXOR: BitXor,
    _Op.PREMUL_SUM: Sum,
}

_NAMES = {Kind.allreduce: "all_reduce", Kind.allgather: "all_gather", Kind.reducescatter: "reduce_scatter"}
_NAMES |= {Kind.alltoall: "all_to_all"}  # those that PyTorch spells differently

_NO_SIZES: tuple[int, ...] = ()
_NATIVE: Any = torch.Tensor.__torch_dispatch__  # of tensors whose operators are PyTorch's
_FIRST_RESERVED_TAG = 2**31  # tags from here on are Ronde's


class _Host(NamedTuple):
    """Tensors in main memory, for the data plane; `finish` copies results to where the user wants them."""

    tensors: Tensors
    finish: Callable[[], None] | None = None


class Operations:
    """The operations of one group. A subclass connects the group, and PyTorch calls its methods."""

    _connection: GroupConnection | None
    _completer: Completer
    _timeout_ns: int
    _batch: list[Any] | None = None  # the operations since start_coalescing
    _sequence = 0
    _in_flight: InFlightMemory

    def _connected(self) -> GroupConnection:
        """Return the connection of the group. Raises UsageError if it has none."""
        raise NotImplementedError

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Any:
        if not isinstance(opts, AllreduceOptions):
            (tensors,) = _listed(tensors)
            opts = _with_values(AllreduceOptions(), opts, timeout, op)
        if tensors and tensors[0].layout != torch.strided:
            (tensor,) = tensors
            return self._add_sparse(tensor, opts)
        return self._reduce(Kind.allreduce, tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        works = self._reduce(Kind.allreduce, tensors, tensors, opts or AllreduceCoalescedOptions())
        return of_several_tensors(works)

    def reduce(self, tensors: Any, opts: Any = None, *values: Any, **named: Any) -> Any:
        if not isinstance(opts, ReduceOptions):
            (tensors,) = _listed(tensors)
            opts = _with_values(ReduceOptions(), opts, *values, **named)
        root = opts.rootRank
        # On the other ranks PyTorch leaves the tensor's values open. Here they stay as they are.
        return self._reduce(Kind.reduce, tensors, tensors if root == self.rank() else (), opts, root)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *values: Any, **named: Any) -> Any:
        if not isinstance(opts, ReduceScatterOptions):
            outputs, inputs = _listed(outputs, inputs)
            opts = _with_values(ReduceScatterOptions(), opts, *values, **named)
        (output,), (parts,) = outputs, inputs
        self._check_count(parts, "reduce_scatter")
        return self._reduce(Kind.reducescatter, parts, [output], opts, sizes=[each.nbytes for each in parts])

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        if given.nbytes != output.nbytes * self.size():
            raise _wrong_size("input", given, output, self.size())
        sizes = [output.nbytes] * self.size()
        return self._reduce(
            Kind.reducescatter, [given], [output], opts or ReduceScatterOptions(), sizes=sizes
        )

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self._together(
            [
                self.reduce_scatter_single(output, given, opts)
                for output, given in zip(outputs, inputs, strict=True)
            ]
        )

    def _reduce(
        self,
        kind: Kind,
        inputs: Tensors,
        outputs: Tensors,
        opts: Any,
        root: int = -1,
        sizes: Sequence[int] = _NO_SIZES,
    ) -> Any:
        op = opts.reduceOp
        code = op.op
        reduction = _REDUCTIONS[code]
        dtype = inputs[0].dtype
        if dtype not in _DTYPES:
            raise UsageError(
                f"ronde has no reduction of {dtype} values: convert them to float32 first, for example"
            )
        if any(each.dtype != dtype for each in (*inputs, *outputs)):
            raise UsageError(
                f"all tensors of one reduction need the same dtype: {_dtypes((*inputs, *outputs))}"
            )
        factor = _factor(op) if code == _Op.PREMUL_SUM else 1.0
        return self._call(
            kind, _DTYPES[dtype], reduction, root, inputs, outputs, sizes, _NO_SIZES, opts, factor
        )

    def _add_sparse(self, tensor: torch.Tensor, opts: Any) -> Any:
        """Add up a sparse tensor of all ranks within the call: before it no rank knows how large the sum is."""
        if tensor.layout != torch.sparse_coo or opts.reduceOp.op != _Op.SUM:
            raise UsageError(
                f"ronde only has a sum of sparse COO tensors, not {opts.reduceOp.op} of {tensor.layout}: convert it by "
                "to_dense() first"
            )
        mine = tensor.detach().cpu().coalesce()
        dims = mine.sparse_dim()
        counts = torch.empty((self.size(), 2), dtype=torch.int64)
        self._move(
            Kind.allgather,
            [torch.tensor([mine._nnz(), dims])],
            [counts],
            opts,
            out_sizes=[counts.element_size() * 2] * self.size(),
        ).wait()
        if not (counts[:, 1] == dims).all():
            raise UsageError(
                f"all-reduce of sparse tensors: by rank they have {counts[:, 1].tolist()} sparse dimensions"
            )
        numbers = counts[:, 0].tolist()
        indices = self._gathered(mine.indices().t().contiguous(), numbers, opts)
        values = self._gathered(mine.values().contiguous(), numbers, opts)
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True).coalesce()
        with torch.no_grad():
            tensor.copy_(total)
        return Done([tensor])

    def _gathered(self, rows: torch.Tensor, numbers: Sequence[int], opts: Any) -> torch.Tensor:
        """Return the rows of all ranks. `numbers`: how many each has."""
        whole = rows.new_empty((sum(numbers), *rows.shape[1:]))
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        sizes = [number * row_bytes for number in numbers]
        self._move(Kind.allgather, [rows], [whole], opts, out_sizes=sizes).wait()
        return whole

    # Operations that move data

    def broadcast(self, tensors: Any, opts: Any = None, *values: Any, **named: Any) -> Any:
        if not isinstance(opts, BroadcastOptions):
            (tensors,) = _listed(tensors)
            opts = _with_values(BroadcastOptions(), opts, *values, **named)
        if self.rank() == opts.rootRank:  # which only reads: parts of its tensor may share memory
            return self._move(Kind.broadcast, tensors, (), opts, root=opts.rootRank)
        return self._move(Kind.broadcast, (), tensors, opts, root=opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        if not isinstance(opts, AllgatherOptions):
            outputs, inputs = _listed(outputs, inputs)
            opts = _with_values(AllgatherOptions(), opts, timeout)
        (parts,), (given,) = outputs, inputs
        self._check_count(parts, "all_gather")
        if parts[self.rank()].nbytes != given.nbytes:
            raise UsageError(
                f"all_gather: the input has {given.nbytes} bytes, but the output tensor for this rank has "
                f"{parts[self.rank()].nbytes}"
            )
        return self._move(Kind.allgather, [given], parts, opts, out_sizes=[each.nbytes for each in parts])

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        if output.dtype != given.dtype:
            raise UsageError(f"all_gather: the output is {output.dtype}, but the input is {given.dtype}")
        if output.nbytes != given.nbytes * self.size():
            raise _wrong_size("output", output, given, self.size())
        return self._move(Kind.allgather, [given], [output], opts, out_sizes=[given.nbytes] * self.size())

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self._together(
            [
                self.all_gather_single(output, given, opts)
                for output, given in zip(outputs, inputs, strict=True)
            ]
        )

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        self._check_count(outputs, "all_gather_coalesced")
        parts = [tensor for of_rank in outputs for tensor in of_rank]
        sizes = [sum(tensor.nbytes for tensor in of_rank) for of_rank in outputs]
        return self._move(Kind.allgather, inputs, parts, opts, out_sizes=sizes)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *values: Any, **named: Any) -> Any:
        if not isinstance(opts, GatherOptions):
            outputs, inputs = _listed(outputs, inputs)
            opts = _with_values(GatherOptions(), opts, *values, **named)
        (given,) = inputs
        parts = outputs[0] if self.rank() == opts.rootRank else ()
        if self.rank() == opts.rootRank:
            self._check_count(parts, "gather")
            _check_same_size(parts, given, "gather")
        sizes = [given.nbytes] * self.size()
        return self._move(Kind.gather, [given], parts, opts, root=opts.rootRank, out_sizes=sizes)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *values: Any, **named: Any) -> Any:
        if not isinstance(opts, ScatterOptions):
            outputs, inputs = _listed(outputs, inputs)
            opts = _with_values(ScatterOptions(), opts, *values, **named)
        (output,) = outputs
        parts = inputs[0] if self.rank() == opts.rootRank else ()
        if self.rank() == opts.rootRank:
            self._check_count(parts, "scatter")
            _check_same_size(parts, output, "scatter")
        sizes = [output.nbytes] * self.size()
        return self._move(Kind.scatter, parts, [output], opts, root=opts.rootRank, in_sizes=sizes)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        if not isinstance(opts, AllToAllOptions):
            opts = _with_values(AllToAllOptions(), opts, timeout)
        in_sizes = self._block_sizes(given, input_rows, "input")
        out_sizes = self._block_sizes(output, output_rows, "output")
        return self._move(Kind.alltoall, [given], [output], opts, in_sizes=in_sizes, out_sizes=out_sizes)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: Any = None) -> Any:
        if not isinstance(opts, AllToAllOptions):
            opts = _with_values(AllToAllOptions(), opts, timeout)
        self._check_count(outputs, "all_to_all")
        self._check_count(inputs, "all_to_all")
        in_sizes, out_sizes = ([each.nbytes for each in tensors] for tensors in (inputs, outputs))
        return self._move(Kind.alltoall, inputs, outputs, opts, in_sizes=in_sizes, out_sizes=out_sizes)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        if not isinstance(opts, BarrierOptions):
            opts = _with_values(BarrierOptions(), opts, timeout)
        return self._call(Kind.barrier, DType.uint8, Sum, -1, (), (), _NO_SIZES, _NO_SIZES, opts)

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. `opts`: a time limit, or options that have one.

        Raises TimeoutError that names the missing ranks, on all ranks that have come.
        """
        connection = self._connected()
        connection.monitored_barriers += 1
        limit_ns = nanoseconds(opts) if isinstance(opts, timedelta) else _limit_ns(opts, self._timeout_ns)
        monitored_barrier(
            connection.mailbox,
            connection.ranks,
            self.rank(),
            f"{connection.context} {connection.monitored_barriers}",
            limit_ns,
            wait_all_ranks,
        )

    def _move(
        self,
        kind: Kind,
        inputs: Tensors,
        outputs: Tensors,
        opts: Any,
        *,
        root: int = -1,
        in_sizes: Sequence[int] = _NO_SIZES,
        out_sizes: Sequence[int] = _NO_SIZES,
    ) -> Any:
        # Types without arithmetic here, such as float8, travel as bytes.
        dtypes = {each.dtype for each in (*inputs, *outputs)}
        dtype = _DTYPES.get(dtypes.pop(), DType.uint8) if len(dtypes) == 1 else DType.uint8
        return self._call(kind, dtype, Sum, root, inputs, outputs, in_sizes, out_sizes, opts)

    def _call(
        self,
        kind: Kind,
        dtype: DType,
        op: ReduceOp,
        root: int,
        inputs: Tensors,
        outputs: Tensors,
        in_sizes: Sequence[int],
        out_sizes: Sequence[int],
        opts: Any,
        factor: float = 1.0,
    ) -> Any:
        """Make one call, or post it to the queue."""
        connection = self._connected()
        results = outputs or inputs
        finish = None
        in_place = inputs is outputs
        if not all(map(_is_ready, inputs)) or not (in_place or all(map(_is_ready, outputs))):
            outputs, finish = _on_host(outputs, has_values=in_place)
            inputs = outputs if in_place else _on_host(inputs, has_values=True).tensors
        is_event = is_profiling()
        at_once = not getattr(opts, "asyncOp", True) and self._batch is None and not is_event
        pending: InFlight = connection.queue.post(
            kind,
            dtype,
            op,
            root,
            [(each.data_ptr(), each.nbytes) for each in inputs],
            [(each.data_ptr(), each.nbytes) for each in outputs],
            in_sizes,
            out_sizes,
            factor,
            _limit_ns(opts, self._timeout_ns),
            at_once,
        )
        self._sequence += 1
        if at_once:
            if finish is not None:
                finish()
            return DONE
        if is_event:
            pending = Recorded(pending, _NAMES.get(kind, kind.name), inputs)
        return self._begun(pending, results, [inputs, outputs], finish)

    # Messages

    def send(self, tensors: Tensors, dest: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        connection = self._connected()
        (ready,), _ = _on_host([tensor], has_values=True)
        peer = connection.ranks[self._peer(dest)]
        message = connection.mailbox.send(peer, connection.context, _tag(tag), ready.data_ptr(), ready.nbytes)

        def what() -> str:
            return f"{self}: send of {ready.nbytes} bytes with tag {tag} to rank {dest}"

        pending = Recorded(message, "send", [ready]) if is_profiling() else message
        return self._begun(pending, [tensor], [ready], limit_ns=self._timeout_ns, what=what)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        return self._receive(self._connected(), tensors, self._peer(source), tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self._receive(self._connected(), tensors, -1, tag)

    def _receive(self, connection: GroupConnection, tensors: Tensors, peer: int, tag: int) -> Any:
        (tensor,) = tensors
        (ready,), finish = _on_host([tensor], has_values=False)
        ranks = connection.ranks
        others = [rank for rank in ranks if rank != ranks[self.rank()]] if peer < 0 else ()
        source_rank = ranks[peer] if peer >= 0 else -1
        message = connection.mailbox.receive(
            source_rank, connection.context, _tag(tag), ready.data_ptr(), ready.nbytes, others
        )

        def source() -> int:
            return ranks.index(message.source())

        def what() -> str:
            sender = f"rank {peer}" if peer >= 0 else "any rank"
            return f"{self}: receive of {ready.nbytes} bytes with tag {tag} from {sender}"

        name = "recv" if peer >= 0 else "recvAnySource"
        pending = Recorded(message, name, [ready]) if is_profiling() else message
        return self._begun(pending, [tensor], [ready], finish, self._timeout_ns, source, what)

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.size():
            raise UsageError(
                f"rank {rank} is not one of the ranks 0 to {self.size() - 1} of this process group"
            )
        return rank

    # Several operations as one

    def start_coalescing(self) -> None:
        self._batch = []

    def end_coalescing(self) -> Any:
        works, self._batch = self._batch or [], None
        return works[0] if len(works) == 1 else CombinedWork(works, self._completer)

    def _begun(
        self,
        pending: Any,
        result: Tensors,
        memory: list[Any],
        finish: Callable[[], None] | None = None,
        limit_ns: int = 0,
        source: Callable[[], int] | None = None,
        what: Callable[[], str] | None = None,
    ) -> Operation:
        """Return the operation. Its tensors live until it is done, also if the program drops them and never waits."""
        self._in_flight.keep(pending, memory)
        warning_ns = 0 if what is None else self._connected().stall_warning_ns
        work = Operation(pending, self._completer, result, memory, finish, limit_ns, source, what, warning_ns)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _together(self, works: list[Any]) -> Any:
        if len(works) == 1:
            return works[0]
        return of_several_tensors(CombinedWork(works, self._completer)) if works else DONE

    # About the group

    def rank(self) -> int:
        raise NotImplementedError

    def size(self) -> int:
        raise NotImplementedError

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _check_count(self, tensors: Sequence[object], operation: str) -> None:
        if len(tensors) != self.size():
            raise UsageError(
                f"{operation} needs one tensor for each of the {self.size()} ranks, not {len(tensors)}"
            )

    def _block_sizes(self, tensor: torch.Tensor, rows: Sequence[int], what: str) -> list[int]:
        """Return the bytes of the block for each rank; without `rows` all have the same number."""
        total = tensor.shape[0] if tensor.dim() else 0
        if not rows:
            if total % self.size():
                raise UsageError(
                    f"all_to_all_single: the {what} has {total} rows, which {self.size()} ranks cannot share evenly; "
                    f"pass {what}_split_sizes"
                )
            return [tensor.nbytes // self.size()] * self.size()
        if len(rows) != self.size() or sum(rows) != total:
            raise UsageError(
                f"all_to_all_single: {what}_split_sizes={list(rows)} must be {self.size()} numbers with the sum "
                f"{total}, the number of rows"
            )
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        return [count * row_bytes for count in rows]


def _listed(*arguments: Any) -> Any:
    """Return what PyTorch passes for these arguments: each in a list, if one of them is a tensor.

    >>> _listed([1, 2], torch.tensor(3))
    ([[1, 2]], [tensor(3)])
    """
    if any(isinstance(each, torch.Tensor) for each in arguments):
        return tuple([each] for each in arguments)
    return arguments


def _with_values(options: Any, *values: object, **named: object) -> Any:
    """Return the options after setting what the values are, by their types: a reduction, a root, a time limit.

    Raises UsageError for another type.
    """
    for value in (*values, *named.values()):
        if isinstance(value, TorchReduceOp):
            options.reduceOp = value
        elif isinstance(value, timedelta):
            options.timeout = value
        elif isinstance(value, int):
            options.rootRank = value
        elif value is not None:
            raise UsageError(
                f"{value!r} is not an argument of this operation: pass {type(options).__name__}, a reduction, the rank "
                f"of the root or a timeout"
            )
    return options


def _is_ready(tensor: torch.Tensor) -> bool:
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return False
    # A tensor that wraps others, such as AsyncCollectiveTensor, has no memory: its operators are written in Python.
    return type(tensor).__torch_dispatch__ is _NATIVE


def _on_host(tensors: Tensors, *, has_values: bool) -> _Host:
    """Return tensors that the data plane can access: the given ones, or new ones in main memory.

    `has_values`: the new ones get the values, else they are only room for results, which `finish` copies back.
    """
    if all(map(_is_ready, tensors)):
        return _Host(tensors)
    ready = [each if _is_ready(each) else _room_for(each) for each in tensors]
    if has_values:
        for user, host in zip(tensors, ready):
            if user is not host:
                host.copy_(user.detach())

    # Work before the call may still use the memory of the results, and only this stream has waited for it.
    streams = [torch.cuda.current_stream(each.device) if each.is_cuda else None for each in tensors]

    def finish() -> None:
        with torch.no_grad():
            for user, host, stream in zip(tensors, ready, streams, strict=True):
                if user is not host:
                    with torch.cuda.stream(stream):
                        user.copy_(host)  # returns when the values are there, so any stream may use them

    return _Host(ready, finish)


def _room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return main memory for a tensor's values: pinned for a GPU, which reaches it directly, and kept by PyTorch."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _factor(op: Any) -> float:
    factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]  # the latter in earlier versions
    return float(factor() if callable(factor) else factor)


def _limit_ns(opts: Any, default_ns: int) -> int:
    timeout = getattr(opts, "timeout", NO_LIMIT)
    return nanoseconds(timeout) if timeout > NO_LIMIT else default_ns  # negative: not given


def _tag(tag: int) -> int:
    if not 0 <= tag < _FIRST_RESERVED_TAG:
        raise UsageError(f"a tag must be a number from 0 to {_FIRST_RESERVED_TAG - 1}, not {tag}")
    return tag


def _wrong_size(what: str, large: torch.Tensor, small: torch.Tensor, size: int) -> UsageError:
    return UsageError(
        f"the {what} must have {size} times the elements of the other tensor, one part for each rank: it has "
        f"{large.numel()}, the other one {small.numel()}"
    )


def _check_same_size(parts: Tensors, other: torch.Tensor, operation: str) -> None:
    for rank, part in enumerate(parts):
        if part.nbytes != other.nbytes:
            raise UsageError(
                f"{operation}: all tensors must have the same size, but the one of rank {rank} has {part.nbytes} bytes "
                f"and the other tensor {other.nbytes}"
            )


def _dtypes(tensors: Tensors) -> str:
    return ", ".join(sorted({str(each.dtype) for each in tensors}))
