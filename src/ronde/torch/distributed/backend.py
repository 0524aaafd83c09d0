"""The backend "ronde" of torch.distributed: the process groups of `init_process_group("ronde")` and `new_group`.

A group of this backend alone is a process group written in Python, whose methods PyTorch calls without detours. In one
of several backends, such as "cpu:ronde,cuda:nccl", ours is a backend written in Python, which PyTorch 2.14 and later
can have. For earlier versions `MixedGroup` has the other backends itself, and passes the tensors of their devices to
them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import FrameType, FunctionType
from typing import Any

import torch.distributed
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ronde import settings
from ronde.errors import AbortedError, NotInitializedError, UsageError
from ronde.stall.watch import keeping_thread
from ronde.torch.distributed.connection import (
    GroupConnection,
    connect_group,
    connect_world,
    world_of_default_group,
)
from ronde.torch.distributed.counted_operators import count_calls
from ronde.torch.distributed.meeting import factory_of, store_of
from ronde.torch.distributed.operations import Operations
from ronde.torch.distributed.reconfiguration import Generations, ReconfigureError
from ronde.torch.distributed.work import DONE, Completer, InFlightMemory, nanoseconds

__all__ = ["NAME", "make_backend", "register"]

NAME = "ronde"
DEVICES = ["cpu", "cuda"]

DESTROYED = "the process group was destroyed"
ABORTED = "the process group was aborted"
NOT_CONFIGURED = "it has no members yet: call reconfigure() first"

HAS_PYTHON_BACKENDS = hasattr(c10d.Backend, "supports_reconfigure")  # PyTorch 2.14 and later


class _Members(Operations):
    """The operations of one group, connected or not."""

    def __init__(
        self, rank: int, size: int, timeout: timedelta, name: str, connection: GroupConnection | None
    ) -> None:
        self._rank, self._size = rank, size
        self._name, self._description = name, "undefined"
        self._connection = connection
        self._completer = Completer()
        self._in_flight = InFlightMemory()
        self._ended = DESTROYED
        self._set_timeout(timeout)

    def __repr__(self) -> str:
        return f"<process group {self._name} of ronde: rank {self._rank} of {self._size}>"

    def _connected(self) -> GroupConnection:
        connection = self._connection
        if connection is None:
            # An abort may come between two operations of a backward pass: the second one fails as the first one does.
            error = AbortedError if self._ended == ABORTED else NotInitializedError
            raise error(f"process group {self._name}: {self._ended}")
        return connection

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size  # noqa: N815, the names that PyTorch's C++ code looks for

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def name(self) -> str:
        return NAME

    def _set_timeout(self, timeout: timedelta) -> None:
        self._timeout_ns = nanoseconds(timeout)

    set_timeout = _set_default_timeout = _set_timeout

    def get_error(self) -> Any:
        return c10d.ErrorType.SUCCESS  # operations raise their errors, and no thread watches for others

    # The end

    def shutdown(self) -> None:
        """Leave the group, once its operations here are done."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(self._ended)
        self._end_operations()

    def abort(self) -> None:
        """Fail all operations of the group, on all of its ranks."""
        self._ended = ABORTED
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort(self._ended)
        self._end_operations()

    def _end_operations(self) -> None:
        """Complete the futures of operations that have failed; the group may get another connection."""
        self._completer.close()
        self._completer = Completer()
        self._in_flight.outlive_group()
        self._sequence = 0


class RondeGroup(_Members, torch.distributed.ProcessGroup):  # type: ignore[misc]
    """A process group all of whose devices have the backend "ronde"."""

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        connection: GroupConnection | None,
        is_default: bool,
    ) -> None:
        torch.distributed.ProcessGroup.__init__(self, rank, size)
        _Members.__init__(self, rank, size, timeout, name, connection)
        self._is_default = is_default
        self._generations = Generations()
        if connection is None:
            self._ended = NOT_CONFIGURED
        if HAS_PYTHON_BACKENDS:
            # PyTorch's recorder of operations asks native code for the group's name, which only a backend there has.
            custom = torch.distributed.ProcessGroup.BackendType.CUSTOM
            self._set_default_backend(custom)
            named = RondeBackend(rank, size, timeout, name, None, range(size))
            self._register_backend(torch.device("cpu"), custom, named)

    def shutdown(self) -> None:
        super().shutdown()
        self._generations.close()

    # Generations of members (ronde/torch/distributed/reconfiguration.py)

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        return self._generations.handle()

    def reconfigure(self, opts: Any) -> Any:
        self.reconfigure_with(opts.uuid, opts.handles, opts.timeout)
        return DONE

    def reconfigure_with(self, uuid: int, handles: Collection[str], timeout: timedelta | None) -> None:
        """See `ronde.torch.distributed.reconfigure`."""
        if not self.supports_reconfigure:
            raise ReconfigureError("a group of several backends cannot be reconfigured")
        planned = self._generations.plan(uuid, handles)
        self._ended = "its last reconfigure() failed; call it again"
        limit_ns = self._timeout_ns if timeout is None else nanoseconds(timeout)
        connection, self._connection = self._connection, None
        with keeping_thread():
            if connection is not None:
                # Not aborted: others may still finish its operations.
                connection.close("the process group was reconfigured")
                self._end_operations()
            self._connection = self._generations.connect(planned, limit_ns)
        self._connection.is_default = self._is_default
        self._rank, self._size = planned.rank, planned.size
        self.global_ranks = range(planned.size)
        self._ended = DESTROYED

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name
        if HAS_PYTHON_BACKENDS:
            super()._set_group_name(name)

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    # PyTorch asks the backend of a device for some things, which here is the group itself

    store: Any = None  # of PyTorch, of which a part of the group is made
    global_ranks: Sequence[int] = ()

    def _get_backend(self, device: Any) -> Any:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def options(self) -> Any:
        return c10d.Backend.Options(NAME, timedelta(microseconds=self._timeout_ns // 1000))

    def get_group_store(self) -> Any:
        return self.store

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    @property
    def supports_splitting(self) -> bool:
        return True

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Any:
        """Return a group of these ranks of this one, None if this rank is not among them."""
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}:{','.join(map(str, ranks))}"
        limit = timeout or timedelta(microseconds=self._timeout_ns // 1000)
        connection = self._connected()
        members = [connection.ranks[rank] for rank in ranks]
        part = connect_group(connection.world, members, nanoseconds(limit))
        made = RondeGroup(list(ranks).index(self._rank), len(ranks), limit, name, part, is_default=False)
        made.store = torch.distributed.PrefixStore(f"{name}/", self.store)
        made.global_ranks = [self.global_ranks[rank] for rank in ranks]
        made.setGroupDesc(group_desc or "undefined")
        return made

    # Earlier names of operations

    _allgather_base = allgather_base = Operations.all_gather_single
    _reduce_scatter_base = Operations.reduce_scatter_single
    allgather_into_tensor_coalesced = Operations.all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = Operations.reduce_scatter_single_coalesced
    alltoall_base = Operations.all_to_all_single


count_calls(RondeGroup)

if HAS_PYTHON_BACKENDS:

    class RondeBackend(_Members, c10d.Backend):
        """The backend "ronde" of some devices of a group; others have other backends."""

        def __init__(
            self,
            rank: int,
            size: int,
            timeout: timedelta,
            name: str,
            connection: GroupConnection | None,
            ranks: Sequence[int],
        ) -> None:
            c10d.Backend.__init__(self, rank, size)
            _Members.__init__(self, rank, size, timeout, name, connection)
            self._options = c10d.Backend.Options(NAME, timeout)
            self._options.global_ranks_in_group = list(ranks)
            self._options.group_name = name

        @property
        def options(self) -> Any:
            return self._options

        @property
        def supports_coalescing(self) -> bool:
            return True


class MixedGroup(RondeGroup):
    """A process group of PyTorch up to 2.13 with other backends for some devices, by the type of the device."""

    others: Mapping[str, Any] = {}

    @property
    def supports_reconfigure(self) -> bool:
        return False

    def shutdown(self) -> None:
        super().shutdown()
        self._end_others("shutdown")

    def abort(self) -> None:
        super().abort()
        self._end_others("abort")

    def _end_others(self, how: str) -> None:
        others, self.others = self.others, {}
        with ExitStack() as ends:  # all of them, also if one raises
            for other in others.values():
                end = getattr(other, how, None) or getattr(other, f"_{how}", None)  # with PyTorch up to 2.5
                if end is not None:
                    ends.callback(end)

    def _backend_of(self, arguments: Sequence[Any]) -> Any:
        return self.others.get(_device_type(list(arguments)))

    # From Python the other backends have these only for one tensor.

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, *opts: Any) -> Any:
        backend = self._backend_of([outputs, inputs])
        if backend is None:
            return super().allgather_into_tensor_coalesced(outputs, inputs, *opts)
        return self._each(backend._allgather_base, outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, *opts: Any) -> Any:
        backend = self._backend_of([outputs, inputs])
        if backend is None:
            return super().reduce_scatter_tensor_coalesced(outputs, inputs, *opts)
        return self._each(backend._reduce_scatter_base, outputs, inputs, opts)

    def _each(self, operation: Callable[..., Any], outputs: Any, inputs: Any, opts: Sequence[Any]) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        for work in [operation(output, given, *opts) for output, given in pairs]:
            work.wait()
        return DONE


def _device_type(value: object) -> str:
    """Return the device of the first tensor in nested lists, "" if there is none."""
    if isinstance(value, torch.Tensor):
        return str(value.device.type)
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_device_type, value)), "")
    return ""


def _routed(name: str) -> Callable[..., Any]:
    """Return an operation that another backend does if the tensors are on its device."""

    def operation(self: MixedGroup, *arguments: Any, **named: Any) -> Any:
        backend = self._backend_of(arguments)
        return getattr(super(MixedGroup, self) if backend is None else backend, name)(*arguments, **named)

    return operation


for _name in (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "allgather_coalesced"),
    *("_allgather_base", "gather", "scatter", "reduce_scatter"),
    *("_reduce_scatter_base", "alltoall", "alltoall_base"),
    *("send", "recv", "recv_anysource"),
):
    setattr(MixedGroup, _name, _routed(_name))


def make_backend(given: Any, options: Any = None) -> Any:
    """Return the backend of a new group; PyTorch calls it on each member. `given`: its `_DistributedBackendOptions`.

    Raises TimeoutError that names the missing ranks, UsageError if there is no job key.
    """
    rank, size, timeout, name = given.group_rank, given.group_size, given.timeout, given.group_id
    ranks = list(given.global_ranks_in_group)  # none for the default group
    if not torch.cuda.is_available():
        # In sharded tensors PyTorch makes tensors on the first device of a backend that is not the CPU, there or not.
        torch.distributed.Backend.backend_capability[NAME] = ["cpu"]
    others = _other_backends(sys._getframe(1))
    waits = getattr(given, "enable_reconfigure", False) or getattr(options, "enable_reconfigure", False)
    made_by_torch = {} if HAS_PYTHON_BACKENDS else others  # 2.14 and later make the others themselves
    beside = {device: _make_other(backend, device, given) for device, backend in made_by_torch.items()}
    connection = None if waits and not others else _connect(given, ranks, nanoseconds(timeout))
    if not others:
        group = RondeGroup(rank, size, timeout, name, connection, not ranks)
        group.store, group.global_ranks = given.store, ranks or range(size)
        return group
    if HAS_PYTHON_BACKENDS:
        return RondeBackend(rank, size, timeout, name, connection, ranks or range(size))
    mixed = MixedGroup(rank, size, timeout, name, connection, not ranks)
    mixed.others = beside
    return mixed


def _connect(given: Any, ranks: Sequence[int], timeout_ns: int) -> GroupConnection:
    if ranks and isinstance(torch.distributed.group.WORLD, RondeGroup):
        torch.distributed.group.WORLD._connected()  # raises if it has no members now
    world = world_of_default_group()
    if ranks and world is not None:
        return connect_group(world, ranks, timeout_ns)
    store, host = store_of(given.store)
    wanted = settings.resolve(settings.environment())
    made = connect_world(
        store,
        given.group_rank,
        given.group_size,
        given.group_id,
        timeout_ns,
        "new_group()" if ranks else "init_process_group()",
        lambda exchange: factory_of(exchange, wanted, host),
    )
    made.is_default = not ranks
    return made


def _other_backends(caller: FrameType) -> dict[str, str]:
    """Return the devices of the new group that have another backend, with its name.

    PyTorch does not tell a backend with which others it makes a group, so this reads the variable of its function.
    """
    config = caller.f_locals.get("backend_config")
    devices = config.get_device_backend_map() if config is not None else {}
    return {device: backend for device, backend in devices.items() if backend != NAME}


def _make_other(backend: str, device: str, given: Any) -> Any:
    """Return another backend of a `MixedGroup`, made as PyTorch makes it."""
    rank, size = given.group_rank, given.group_size
    store = torch.distributed.PrefixStore(f"{device}/", given.store)
    if backend == "gloo":
        return c10d.ProcessGroupGloo(store, rank, size, timeout=given.timeout)
    if backend == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = given.timeout
        options.global_ranks_in_group = given.global_ranks_in_group
        options.group_name = given.group_id
        return c10d.ProcessGroupNCCL(store, rank, size, options)
    raise UsageError(
        f"with PyTorch {torch.__version__} a group of ronde and {backend} is not possible: use gloo or nccl for "
        f"{device}, or PyTorch 2.14 or later"
    )


def _keep_from_compiler(*classes: type) -> None:
    """Have PyTorch's compiler run the methods of these classes, and the functions below them, as they are.

    Native code calls them within compiled programs, such as a compiled DistributedDataParallel. The compiler would try
    to compile them and fail, because it allows no Python code to use attributes of a process group.
    """
    compiler = torch._C._dynamo.eval_frame
    if hasattr(compiler, "set_code_exec_strategy"):
        action = compiler._FrameAction.SKIP
        strategy = compiler._FrameExecStrategy(action, action)
        set_strategy = compiler.set_code_exec_strategy
    else:  # earlier versions
        strategy, set_strategy = None, lambda code, _: compiler.skip_code(code)
    for each in classes:
        for method in vars(each).values():
            if isinstance(method, FunctionType):
                set_strategy(method.__code__, strategy)


def register() -> None:
    """Make `init_process_group("ronde")` known. A second call does nothing."""
    if NAME.upper() not in torch.distributed.Backend._plugins:
        torch.distributed.Backend.register_backend(NAME, make_backend, extended_api=True, devices=DEVICES)
        _keep_from_compiler(Operations, _Members, RondeGroup, MixedGroup)
        _replace_monitored_barrier()
        _replace_shutdown()
        _replace_builtin_hooks()


def _replace_monitored_barrier() -> None:
    """Let `torch.distributed.monitored_barrier` serve our groups: up to 2.13 it refuses other names than "gloo"."""
    original = distributed_c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        found = torch.distributed.group.WORLD if group is None else group
        if not isinstance(found, RondeGroup):
            original(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        found.monitored_barrier(limit, wait_all_ranks)

    for module in (torch.distributed, distributed_c10d):
        module.monitored_barrier = monitored_barrier


def _replace_shutdown() -> None:
    """Let `destroy_process_group` end our groups: up to PyTorch 2.8 it ends those of NCCL alone."""
    original = getattr(distributed_c10d, "_shutdown_backend", None)
    if original is None:
        return

    def shutdown_backend(group: Any) -> None:
        if isinstance(group, RondeGroup):
            group.shutdown()
        else:
            original(group)

    distributed_c10d._shutdown_backend = shutdown_backend


def _replace_builtin_hooks() -> None:
    """Let `DistributedDataParallel._register_builtin_comm_hook` serve our groups.

    PyTorch's native hooks need futures with lists of tensors as native values, which Python code cannot make. Those of
    `default_hooks` do the same.
    """
    original = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(original)
    def register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        group = self.process_group
        if not isinstance(group, RondeGroup):
            original(self, comm_hook_type)
            return
        kinds = torch.distributed.BuiltinCommHookType
        hooks = {
            kinds.ALLREDUCE: default_hooks.allreduce_hook,
            kinds.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(group, hooks[comm_hook_type])

    DistributedDataParallel._register_builtin_comm_hook = register_builtin_comm_hook
