"""The same small program under every launcher."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.ports import free_port

PROGRAM = """
import sys
import numpy, ronde

arguments = dict(word.split("=", 1) for word in sys.argv[1:])
for name in ("rank", "size", "world_size"):
    if name in arguments:
        arguments[name] = int(arguments[name])
for _ in range(2):  # to leave and to join again works, whoever started it
    ronde.init(**arguments)
    world = ronde.world()
    total = int(world.allreduce(numpy.array([world.rank + 1]))[0])
    places = world.allgather(numpy.array([[world.rank, world.local_rank, world.local_size]])).tolist()
    ronde.shutdown()
sys.stdout.write(f"rank {world.rank} of {world.size}: {total} {places}\\n")  # in one piece, even under python -u
"""
TORCH_PROGRAM = """
import os
import torch
import torch.distributed as dist

totals = []
for _ in range(2):
    dist.init_process_group("gloo")
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    totals.append(x.item())
    size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
print(f"rank {os.environ['RANK']} of {size}: {totals[0]} {totals[1]}")
"""
EXPECTED = [f"rank {rank} of 2: 3 [[0, 0, 2], [1, 1, 2]]" for rank in range(2)]

# What tells a process who it is; none of it may come from whoever runs the tests.
SPEAKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "RONDE_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def environment(**more: object) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SPEAKS)}
    clean["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return clean | {name: str(value) for name, value in more.items()}


def run(command: list[str]) -> list[str]:
    """Return the sorted lines of its output."""
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=100, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def run_by_hand(commands: list[list[str]], environments: list[dict[str, str]]) -> list[str]:
    """Return the output of ranks without a launcher, in the order of ranks."""
    started = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, env in zip(commands, environments)
    ]
    lines = []
    for process in started:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        lines.append(out.strip())
    return lines


def test_ronde_run(script: str) -> None:
    lines = run([sys.executable, "-m", "ronde", "run", "-n", "2", script])
    assert lines == [f"[{rank}] {line}" for rank, line in enumerate(EXPECTED)]


@pytest.mark.parametrize(
    "options",
    [
        ["--standalone"],
        pytest.param(["--master-addr=127.0.0.1", "--master-port={port}"], marks=pytest.mark.slow),
    ],
)
def test_torchrun(script: str, options: list[str]) -> None:
    """With its c10d rendezvous and with the older, static one."""
    pytest.importorskip("torch")
    rendezvous = [option.format(port=free_port("127.0.0.1")) for option in options]
    assert (
        run([sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node=2", script])
        == EXPECTED
    )


@pytest.mark.parametrize("kind", ["Open MPI", "MPICH"])
def test_ranks_of_mpirun_find_each_other(script: str, kind: str) -> None:
    """Each of them where it is, beside this Python or in PATH."""
    signs = {"Open MPI": ("Open MPI",), "MPICH": ("MPICH", "HYDRA")}[kind]
    for folder in dict.fromkeys([str(Path(sys.executable).parent), *os.get_exec_path()]):
        mpirun = shutil.which("mpirun", path=folder)
        said = (
            mpirun
            and subprocess.run([mpirun, "--version"], check=False, capture_output=True, text=True).stdout
        )
        if mpirun and said and any(sign in said for sign in signs):
            break
    else:
        pytest.skip(f"needs the mpirun of {kind}")
    options = ["--allow-run-as-root", "--oversubscribe"] if kind == "Open MPI" else []
    assert run([mpirun, *options, "-n", "2", sys.executable, script]) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("rest", [[], ["init_method=env://"]], ids=["", "env://"])
def test_srun_as_it_sets_the_environment(script: str, rest: list[str]) -> None:
    """tests/clusters has a real Slurm."""
    step = {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_ID": free_port("127.0.0.1"),
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_STEP_NUM_NODES": 1,
    }
    environments = [
        environment(SLURM_PROCID=rank, SLURM_STEP_NODELIST="localhost", **step) for rank in range(2)
    ]
    assert run_by_hand([[sys.executable, script, *rest]] * 2, environments) == EXPECTED


def test_ronde_run_by_mpirun(script: str) -> None:
    if shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is None:
        pytest.skip("needs mpirun")
    assert run([sys.executable, "-m", "ronde", "run", "--launcher", "mpi", "-n", "2", script]) == EXPECTED


def test_environment_by_hand(script: str) -> None:
    port = free_port("127.0.0.1")
    environments = [
        environment(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in range(2)
    ]
    assert run_by_hand([[sys.executable, script]] * 2, environments) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("store", ["tcp:127.0.0.1:{port}", "tcp:[::1]:{port}", "unix:@ronde-test-{port}"])
def test_arguments(script: str, store: str) -> None:
    store = "store=" + store.format(port=free_port("127.0.0.1"))
    commands = [[sys.executable, script, f"rank={rank}", "size=2", store] for rank in range(2)]
    assert run_by_hand(commands, [environment()] * 2) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("size", ["size", "world_size"])
def test_init_method_by_tcp(script: str, size: str) -> None:
    there = f"init_method=tcp://127.0.0.1:{free_port('127.0.0.1')}"
    commands = [[sys.executable, script, f"rank={rank}", f"{size}=2", there] for rank in range(2)]
    assert run_by_hand(commands, [environment()] * 2) == EXPECTED


def records_of_rank_1(store: Path) -> set[bytes]:
    """The keys of records of rank 1 that have been written into the file, one for each epoch of two ranks."""
    content = store.read_bytes() if store.exists() else b""
    return set(re.findall(rb"world 2/[0-9a-f]+-[0-9]+/0/1", content))


@pytest.mark.slow
def test_init_method_by_a_file_that_is_used_again(script: str, tmp_path: Path) -> None:
    """The second time after a rank was killed while it waited for the other one."""
    there = f"init_method=file://{tmp_path}/store"
    commands = [[sys.executable, script, f"rank={rank}", "world_size=2", there] for rank in range(2)]
    assert run_by_hand(commands, [environment()] * 2) == EXPECTED
    before = records_of_rank_1(tmp_path / "store")
    lonely = subprocess.Popen(commands[1], env=environment())
    while records_of_rank_1(tmp_path / "store") <= before:
        assert lonely.poll() is None
        time.sleep(0.01)
    lonely.kill()
    lonely.wait()
    assert run_by_hand(commands, [environment()] * 2) == EXPECTED
    ranks = [environment(RANK=rank, WORLD_SIZE=2) for rank in range(2)]
    assert run_by_hand([[sys.executable, script, there]] * 2, ranks) == EXPECTED


def test_init_method_by_a_file_with_one_rank_twice(script: str, tmp_path: Path) -> None:
    command = [sys.executable, script, "rank=1", "world_size=2", f"init_method=file://{tmp_path}/store"]
    first = subprocess.Popen(command, env=environment())
    try:
        while not records_of_rank_1(tmp_path / "store"):
            time.sleep(0.01)
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment())
        assert done.returncode != 0
        assert re.search(
            rf"UsageError: two processes have rank 1 .*: the other one is process {first.pid} on",
            done.stderr,
        )
    finally:
        first.kill()
        first.wait()


@pytest.mark.slow
@pytest.mark.parametrize("init_method", ["env://", "tcp://127.0.0.1:{port}"])
def test_init_method_within_ronde_run(script: str, init_method: str) -> None:
    there = "init_method=" + init_method.format(port=free_port("127.0.0.1"))
    lines = run([sys.executable, "-m", "ronde", "run", "-n", "2", script, there])
    assert lines == [f"[{rank}] {line}" for rank, line in enumerate(EXPECTED)]


@pytest.mark.slow
def test_torch_scripts_run_unchanged(tmp_path: Path) -> None:
    """torch.distributed's own env:// under `ronde run`, twice in a row in each process."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TORCH_PROGRAM)
    lines = run([sys.executable, "-m", "ronde", "run", "--nproc_per_node=2", str(tmp_path / "train.py")])
    assert lines == [f"[{rank}] rank {rank} of 2: 3.0 3.0" for rank in range(2)]


@pytest.mark.parametrize("how", ["ronde run", "by hand"])
def test_nothing_is_open_when_the_interpreter_ends(script: str, how: str) -> None:
    """Python's development mode prints what is; with `-W error` and a logging program that is a failure."""
    environ = environment(PYTHONDEVMODE=1)
    commands = [[sys.executable, "-m", "ronde", "run", "-n", "2", script]]
    if how == "by hand":
        place = f"store=tcp:127.0.0.1:{free_port('127.0.0.1')}"
        commands = [[sys.executable, script, f"rank={rank}", "size=2", place] for rank in range(2)]
    started = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    for process in started:
        out, err = process.communicate(timeout=100)
        assert (process.returncode, err) == (0, ""), out


def test_a_lone_process(script: str) -> None:
    assert run([sys.executable, script]) == ["rank 0 of 1: 1 [[0, 0, 1]]"]


def test_without_a_place_to_meet(script: str) -> None:
    command = [sys.executable, script, "rank=0", "size=2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment())
    assert done.returncode != 0
    assert "UsageError: ronde.init(rank=, size=) started rank 0 of 2, but nothing says where" in done.stderr
    assert "give store='tcp:<host of rank 0>:<free port>' too" in done.stderr


def test_a_missing_rank_is_named(script: str) -> None:
    command = [sys.executable, script, "rank=0", "size=3", f"store=tcp:127.0.0.1:{free_port('127.0.0.1')}"]
    env = environment(RONDE_START_TIMEOUT=1)
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    assert done.returncode != 0
    assert re.search(
        r"TimeoutError: waited \S+ s for ranks 1, 2 of 3 to join at tcp:127\.0\.0\.1:", done.stderr
    )
