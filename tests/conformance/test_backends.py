"""What every backend must do (backend_cases.py), and who is chosen. A new backend is done when it passes this.

MPI's ranks are started by every `mpirun` that can be found: beside this Python, and in PATH. Each brings the library
that mpi4py is to load.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance import backend_cases
from tests.conformance.backend_cases import CASES
from tests.ranks.engine.test_stall import Reports

import ronde
from ronde.backends.ccl import is_installed
from ronde.engine import engine
from ronde.errors import AbortedError, MismatchError, UsageError
from ronde.testing import ranks
from ronde.types import DType, Kind

pytestmark = [
    pytest.mark.usefixtures("copied_ranks"),
]

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 250
LAUNCHERS = {"open mpi": "Open MPI", "mpich": "MPICH"}  # what their mpirun calls itself
HAS_CCL = is_installed()  # 2 GB: only where somebody has installed it
ALONE = (pytest.mark.alone, pytest.mark.slow)  # MPI has names in /dev/shm
BACKENDS = (
    "native",
    *(pytest.param(name, marks=ALONE) for name in ("gloo", *LAUNCHERS, *(["ccl"] if HAS_CCL else []))),
)

# What tells a process who it is; none of it may come from whoever runs the tests.
SPEAKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "RONDE_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")


@functools.cache
def mpirun(launcher: str) -> Path | None:
    """The mpirun of this MPI."""
    folders = [str(Path(sys.executable).parent), *os.get_exec_path()]
    for folder in dict.fromkeys(folders):
        found = shutil.which("mpirun", path=folder)
        if found:
            said = subprocess.run([found, "--version"], check=False, capture_output=True, text=True).stdout
            if LAUNCHERS[launcher] in said or (launcher == "mpich" and "HYDRA" in said):
                return Path(found)
    return None


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SPEAKS)}
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    return clean | {"OMP_NUM_THREADS": "1"} | more


def run_under_mpi(launcher: str, n: int, program: str, folder: str, answers: int) -> None:
    """Run one of the programs. Every rank stays until so many have answered: mpirun ends them all with the first."""
    pytest.importorskip("mpi4py")
    found = mpirun(launcher)
    if found is None:
        pytest.skip(f"needs the mpirun of {LAUNCHERS[launcher]}")
    library = next(iter(sorted((found.parent.parent / "lib").glob("libmpi.so.*"))), None)
    options = (
        ["--allow-run-as-root", "--oversubscribe", "--rtos", "recoverable"] if launcher == "open mpi" else []
    )
    stay = f'"$@"; while [ $(ls "{folder}" | wc -l) -lt {answers} ]; do sleep 0.05; done'
    code = f"from tests.conformance.backend_cases import {program}; {program}({folder!r})"
    done = subprocess.run(
        [str(found), *options, "-n", str(n), "sh", "-c", stay, "sh", sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(RONDE_BACKENDS="mpi,native", **({"MPI4PY_LIBMPI": str(library)} if library else {})),
    )
    assert len(os.listdir(folder)) == answers, done.stdout + done.stderr


def run_program(backend: str, n: int, program: Callable[[str], None], answers: int) -> list[Any]:
    """Run one of the programs on ranks with that backend; return what they have left, by rank."""
    with tempfile.TemporaryDirectory(prefix="ronde-backends-") as home:
        folder = os.path.join(home, "answers")
        os.mkdir(folder)
        if backend in LAUNCHERS:
            run_under_mpi(backend, n, program.__name__, folder, answers)
        else:
            if backend == "gloo":
                pytest.importorskip("torch")
            with ranks.start(program, n, folder, environ={"RONDE_BACKENDS": f"{backend},native"}) as job:
                ended = job.outcomes(TIMEOUT_S)
            assert len(os.listdir(folder)) == answers, [outcome.traceback_text for outcome in ended]
        return [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]


def outcomes(backend: str, n: int, folder: Path) -> list[Mapping[str, str]]:
    """What went wrong in each case, by rank. All cases run in one job, whose outcomes are kept in the folder."""
    file = folder / f"{backend}-{n}"
    with file.open("a+") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        if not file.stat().st_size:
            json.dump(run_all_cases(backend, n), kept)
    outcomes: list[Mapping[str, str]] = json.loads(file.read_text())
    return outcomes


def run_all_cases(backend: str, n: int) -> list[Mapping[str, str]]:
    answers = run_program(backend, n, backend_cases.pass_all, n)
    assert len(answers) == n
    in_use = [] if backend == "native" else ["mpi" if backend in LAUNCHERS else backend]
    assert all(backends == in_use for backends, _ in answers)
    return [cases for _, cases in answers]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend(backend: str, n: int, case: str, folder_of_all: Path) -> None:
    for rank, cases in enumerate(outcomes(backend, n, folder_of_all)):
        assert not cases[case], f"rank {rank}:\n{cases[case]}"


@pytest.fixture
def memory_of_the_dead() -> Iterator[None]:
    """A process of MPI that is killed leaves shared memory behind, and so do those that cannot finalize MPI then."""
    before = set(os.listdir("/dev/shm"))
    yield
    for name in set(os.listdir("/dev/shm")) - before:
        if name.startswith(("mpich_shm_", "sm_segment.")):
            (Path("/dev/shm") / name).unlink()


@pytest.mark.usefixtures("memory_of_the_dead")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_rank_is_named_by_all_others(backend: str) -> None:
    answers = run_program(backend, 4, backend_cases.lose_one, 3)
    assert len(answers) == 3
    for rank, text in answers:
        assert rank == 3
        assert text.startswith("rank 3 on ")


# Who is chosen


def ask() -> tuple[list[str], float]:
    ronde.init()
    total = float(ronde.allreduce(np.ones(1), name="x", op=ronde.Sum)[0])
    backends = engine().backends()
    ronde.shutdown()
    return backends, total


def refused() -> str:
    with pytest.raises(UsageError) as caught:
        ronde.init()
    return str(caught.value)


@pytest.mark.alone
def test_what_one_rank_lacks_is_used_by_none() -> None:
    """These ranks were not started by mpirun."""
    assert ranks.run(ask, 2, environ={"RONDE_BACKENDS": "mpi,native"}) == [([], 2.0)] * 2


@pytest.mark.alone
def test_a_wish_that_cannot_be_fulfilled_is_an_error() -> None:
    for answer in ranks.run(refused, 2, environ={"RONDE_BACKENDS": "native;broadcast=mpi"}):
        assert "no backend can carry broadcast: backend mpi cannot be used: rank 0 on " in answer


def test_unknown_backends() -> None:
    for answer in ranks.run(refused, 2, environ={"RONDE_BACKENDS": "glue,native"}):
        assert "backend 'glue' does not exist" in answer


def disagree() -> str:
    rank = int(os.environ["RANK"])
    with pytest.raises(MismatchError) as caught:
        ronde.init(backends="native" if rank == 0 else "native;barrier=native")
    return str(caught.value)


def test_all_ranks_want_the_same() -> None:
    for answer in ranks.run(disagree, 2):
        assert "backends is 'native' on rank 0 and 'native;barrier=native' on rank 1" in answer


# Backends of others

PLUGIN = '''
from ronde.backends.backend import Backend
from ronde.types import Kind


class Picky(Backend):
    """Carries barriers and broadcasts. Those of 2.0 work; one of 7 lasts for ever; others fail on rank 1."""

    name = "picky"

    def missing(self): return None
    def open(self): pass
    def close(self, failed): pass
    def is_enabled(self, kind, dtype, op): return kind in (Kind.barrier, Kind.broadcast)
    def barrier(self): pass

    def broadcast(self, data, root):
        if data.view("float64")[0] == 2.0:
            return
        if self.place.rank == 1 and len(data.view("float64")) != 7:
            raise ValueError("broadcasts are not to my taste")
        patience = self.place.patience("broadcast by picky")
        while True:
            patience.check()

    allreduce = reducescatter = allgather = alltoall = None
'''


def install(folder: Path, name: str, attribute: str, program: str) -> None:
    """Make a package that registers a backend."""
    (folder / f"{name}_backend.py").write_text(program)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ronde.backends]\n{name} = {name}_backend:{attribute}\n")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "picky", "Picky", PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)


def fall_out() -> tuple[list[str], str]:
    ronde.init()
    backends = engine().backends()
    ronde.barrier()
    assert (ronde.allreduce(np.ones(3), name="native", op=ronde.Sum) == ronde.size()).all()
    with pytest.raises(AbortedError) as caught:
        ronde.broadcast(np.ones(3), 0, name="x")
    assert caught.value.rank == 1
    with pytest.raises(AbortedError):
        ronde.barrier()
    ronde.shutdown()
    return backends, str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_what_a_backend_raises_is_told_to_all() -> None:
    for backends, text in ranks.run(fall_out, 3, environ={"RONDE_BACKENDS": "picky,native"}):
        assert backends == ["picky"]
        assert text.startswith("rank 1 on ")
        assert "broadcast of 3 float64 with root 0: ValueError: broadcasts are not to my taste" in text


def hang_in_a_backend() -> tuple[list[str], str]:
    ronde.init(stall_warning_ns=10**9 // 4, stall_shutdown_ns=5 * 10**9)
    told = Reports()
    with pytest.raises(AbortedError) as caught:
        ronde.broadcast(np.ones(7), 0, name="x")
    ronde.shutdown()
    return told.texts, str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_a_backend_that_does_not_return_is_named_and_given_up() -> None:
    told = ranks.run(hang_in_a_backend, 2, environ={"RONDE_BACKENDS": "picky,native"})
    reports = [text for texts, _ in told for text in texts]
    assert any("by all ranks: it is being executed, perhaps by picky" in text for text in reports), reports
    for _, error in told:
        assert "all ranks have submitted it" in error


# Memory of a device. Here the device is the processor, which nobody tells: the native side must not touch the memory.

DEVICE_PLUGIN = '''
import ctypes
import numpy, torch
from ronde.backends.backend import DeviceBackend
from ronde.backends.gloo import Gloo
from ronde.types import Kind


class Near(DeviceBackend):
    """Gloo for what pretends to be the memory of a device."""

    name = "near"

    def __init__(self, place):
        super().__init__(place)
        self.gloo, self.device, self.seen = Gloo(place), torch.device("cpu"), []

    def missing(self): return self.gloo.missing()
    def claim(self): return f"the place of rank {self.place.rank}"
    def open(self): self.gloo.open()
    def close(self, failed): self.gloo.close(failed)
    def is_enabled(self, kind, dtype, op): return kind is not Kind.barrier and "16" not in dtype.name

    def view(self, address, size, dtype):
        return numpy.frombuffer((ctypes.c_char * size).from_address(address), dtype.name)

    def allreduce(self, x, out, op): self.gloo.allreduce(x, out, op)
    def reducescatter(self, x, out, counts, op): self.gloo.reducescatter(x, out, counts, op)
    def allgather(self, x, out, sizes): self.gloo.allgather(x.copy(), out, sizes)
    def broadcast(self, data, root): self.gloo.broadcast(data, root)
    def alltoall(self, x, ins, out, outs): self.gloo.alltoall(x, ins, out, outs)
    def barrier(self): raise NotImplementedError
'''


def stay_on_device() -> list[str]:
    torch = pytest.importorskip("torch")
    ronde.init()
    rank, size, the_engine = ronde.rank(), ronde.size(), engine()
    total = sum(range(size))
    place = torch.device("cpu")

    def submit(kind: Kind, x: Any, name: str, **terms: Any) -> Any:
        return ronde.engine.submit(kind, x, name=name, device="cpu memory", **terms)

    for _ in range(2):  # negotiated, then cached
        handles = [
            submit(Kind.allreduce, torch.full((5,), float(rank + i)), f"sum {i}", op=ronde.Sum)
            for i in range(9)
        ]
        for i, handle in enumerate(handles):  # a burst, of which nothing is fused
            assert (handle.wait() == total + i * size).all()
        x = torch.full((3, 2), rank, dtype=torch.int64)
        assert submit(Kind.allreduce, x, "in place", op=ronde.Max, out=x).wait() is x
        assert (x == size - 1).all()
        answer = submit(Kind.allreduce, torch.tensor([rank == 1, False]), "any", op=ronde.Sum).wait()
        assert answer.tolist() == [True, False]
        answer = submit(Kind.allreduce, torch.full((2,), 1j * rank), "parts", op=ronde.Sum).wait()
        assert answer.tolist() == [1j * total] * 2
        share = submit(Kind.reducescatter, torch.ones(size + 1, 2), "shares", op=ronde.Sum).wait()
        assert share.shape == (2 if rank == 0 else 1, 2)
        assert (share == size).all()
        rows = submit(Kind.allgather, torch.full((rank + 1, 2), rank), "rows").wait()
        assert rows[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
        y = torch.full((4,), rank)
        assert submit(Kind.broadcast, y, "root", root=1, out=y).wait() is y
        assert (y == 1).all()
        splits = [p + rank for p in range(size)]
        dealt = submit(Kind.alltoall, torch.full((sum(splits),), rank), "deal", splits=splits).wait()
        assert dealt.tolist() == [r for r in range(size) for _ in range(rank + r)]
    assert (ronde.allreduce(np.ones(3), name="in main memory", op=ronde.Sum) == size).all()
    with pytest.raises(
        UsageError, match="no backend can carry an allreduce by Sum of float16 values in cpu memory"
    ):
        submit(Kind.allreduce, torch.ones(3, dtype=torch.float16), "refused", op=ronde.Sum)
    where = "cpu memory" if rank == 0 else "cpu"
    handle = ronde.engine.submit(Kind.allreduce, torch.ones(3), name="apart", op=ronde.Sum, device=where)
    with pytest.raises(MismatchError, match="cpu memory"):
        handle.wait()
    assert the_engine.carries(Kind.allreduce, DType.float32, ronde.Sum, place)
    assert not the_engine.carries(Kind.allreduce, DType.float16, ronde.Sum, place)
    backends = the_engine.backends()
    ronde.shutdown()
    return backends


@pytest.fixture
def device_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "near", "Near", DEVICE_PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("device_plugin")
def test_memory_of_a_device_is_left_to_the_backend() -> None:
    pytest.importorskip("torch")
    assert ranks.run(stay_on_device, 3, environ={"RONDE_BACKENDS": "native,near"}) == [["near"]] * 3


def scale_and_average_on_device() -> None:
    """What PyTorch does there: factors, and averages of integers. `near` stands for NCCL, which has streams."""
    torch = pytest.importorskip("torch")
    from ronde.backends import nccl
    from ronde.torch.call import Call
    from ronde.torch.tensors import is_carried, start_on_device

    nccl.make_ready = lambda *tensors: None
    ronde.init()
    rank, size = ronde.rank(), ronde.size()

    def wait(call: Call, x: Any) -> Any:
        assert is_carried(call, x)
        return start_on_device(call, x).wait()

    x = torch.tensor([-7 if rank == 0 else 0, 100], dtype=torch.int8)
    mean = Call(Kind.allreduce, "mean", None, ronde.Average)
    assert wait(mean, x).tolist() == [-2, 100]
    doubled = Call(Kind.allreduce, "doubled", None, ronde.Sum, 2.0, 0.5, in_place=True)
    y = torch.full((3,), float(rank))
    assert wait(doubled, y) is y
    assert y.tolist() == [sum(range(size))] * 3
    weights = torch.full((2,), float(rank))
    assert wait(Call(Kind.broadcast, "weights", None, root=1), weights).tolist() == [1.0, 1.0]
    assert weights.tolist() == [rank, rank]
    rows = wait(Call(Kind.alltoall, "rows", None, splits=[1] * size), torch.full((size,), rank))
    assert rows.tolist() == list(range(size))
    ronde.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("device_plugin")
def test_factors_and_averages_on_a_device() -> None:
    pytest.importorskip("torch")
    ranks.run(scale_and_average_on_device, 3, environ={"RONDE_BACKENDS": "native,near"})


def test_cuda_tensors_need_a_device_each() -> None:
    """There is none here, or fewer than ranks: CUDA tensors would travel through main memory."""
    pytest.importorskip("torch")
    assert (
        ranks.run(ask, 2, environ={"RONDE_BACKENDS": "nccl,native", "CUDA_VISIBLE_DEVICES": ""})
        == [([], 2.0)] * 2
    )


def give_up_waiting() -> str:
    ronde.init(timeout_ns=300_000_000)
    with pytest.raises(ronde.errors.TimeoutError) as caught:
        ronde.broadcast(np.ones(3), 0, name="x")
    ronde.shutdown()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_the_time_limit_holds_for_backends() -> None:
    answer = ranks.run(give_up_waiting, 1, environ={"RONDE_BACKENDS": "picky,native"})[0]
    assert answer == "waited 300 ms in broadcast by picky"


def interrupt() -> str:
    ronde.init()
    x = np.full(3, 2.0)
    ronde.broadcast(x, 0, name="x")
    x[:] = 1.0  # now it is cached, and whoever waits does the work himself
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        ronde.broadcast(x, 0, name="x")
    with pytest.raises(AbortedError):
        ronde.barrier()
    ronde.shutdown()
    return "done"


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_ctrl_c_ends_a_backends_operation() -> None:
    assert ranks.run(interrupt, 1, environ={"RONDE_BACKENDS": "picky,native"}) == ["done"]


def reject() -> str:
    ronde.init()
    ronde.barrier()
    with pytest.raises(UsageError) as caught:
        ronde.allreduce(np.ones(3, np.int32), name="x", op=ronde.Max)
    ronde.shutdown()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_what_nobody_can_carry_is_refused() -> None:
    for answer in ranks.run(reject, 2, environ={"RONDE_BACKENDS": "picky"}):
        assert "no backend can carry an allreduce by Max of int32 values in cpu memory" in answer
        assert "add native" in answer
