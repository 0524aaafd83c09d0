"""`ronde.compat`: scripts for Horovod run unchanged, if Horovod is not installed or if that is what is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

# The shape that Horovod's documentation gives a script: init, pin the device, scale the learning rate, share the data,
# wrap the optimizer, broadcast, train, average the metrics, and let rank 0 print.
SCRIPT = """
import argparse

import torch
import torch.nn.functional as F
import torch.utils.data.distributed

import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce_async_, synchronize
from horovod.torch.compression import Compression
from horovod.common.exceptions import HorovodInternalError

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true", default=False)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(8, 16)
        self.norm = hvd.SyncBatchNorm(16)
        self.fc2 = torch.nn.Linear(16, 2)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.norm(self.fc1(x)))), dim=1)


def metric_average(val, name):
    return hvd.allreduce(torch.tensor(val), name=name).item()


def main():
    args = parser.parse_args()
    hvd.init()
    assert issubclass(HorovodInternalError, RuntimeError)
    if hvd.cuda_built() and torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    torch.manual_seed(42)
    torch.set_num_threads(1)
    images = torch.randn(240, 8)
    labels = (images.sum(dim=1) > 0).long()
    dataset = torch.utils.data.TensorDataset(images, labels)
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=12, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    model = Net()
    lr_scaler = hvd.size() if not args.use_adasum else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * lr_scaler, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer,
                                         named_parameters=model.named_parameters(),
                                         compression=compression,
                                         op=hvd.Average,
                                         gradient_predivide_factor=1.0)
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            F.nll_loss(model(data), target).backward()
            optimizer.step()
    model.eval()
    correct = model(images).argmax(1).eq(labels).float().mean().item()
    correct = metric_average(correct, "avg_accuracy")
    seen = synchronize(allreduce_async_(torch.tensor([len(sampler)]), name="seen", op=hvd.Sum))
    if hvd.rank() == 0:
        print(f"ranks {hvd.size()} seen {int(seen)} accuracy {'good' if correct > 0.9 else correct}")


if __name__ == "__main__":
    main()
"""


def python(*words: object, folder: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("RONDE_", "HOROVOD_"))
    }
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, *sys.path]))
    return subprocess.run(
        [sys.executable, *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
        env=environ,
    )


def output(*words: object, folder: Path, path: str = "") -> str:
    done = python(*words, folder=folder, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "train.py"
    script.write_text(SCRIPT)
    return script


def test_a_script_runs_unchanged(script: Path, tmp_path: Path) -> None:
    words = ["-m", "ronde", "run", "--horovod", "-n", 2, script, "--epochs", 3, "--fp16-allreduce"]
    assert "ranks 2 seen 240 accuracy good" in output(*words, folder=tmp_path)


def test_it_runs_under_other_launchers(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "tool.py").write_text(
        "import sys, horovod, beside\nprint(__name__, sys.argv[1:], horovod.__version__, beside.__file__)"
    )
    beside = tmp_path / "scripts" / "beside.py"
    beside.write_text("")
    expected = f"__main__ ['--x', '-m'] 0.28.1 {beside}\n"
    script = beside.with_name("tool.py")
    assert output("-m", "ronde.compat", script, "--x", "-m", folder=tmp_path) == expected
    assert output("-m", "ronde.compat", "-m", "tool", "--x", "-m", folder=script.parent) == expected
    assert output("-m", "ronde.compat", "--help", folder=tmp_path).startswith("usage: python -m ronde.compat")
    assert python("-m", "ronde.compat", folder=tmp_path).returncode == 2


CALLS = """
import os, sys
import ronde.compat
import horovod, horovod.runner

def work(a, b, fails=False):
    if fails and os.environ["HOROVOD_RANK"] == "1":
        raise RuntimeError("on purpose")
    return int(os.environ["HOROVOD_RANK"]), a + b

def where():
    return os.path.basename(sys.orig_argv[0]), os.environ["RONDE_START_TIMEOUT"]

if __name__ == "__main__":
    for more in ({"np": 2}, {"num_proc": 2, "hosts": "localhost:1,127.0.0.1:1", "use_gloo": True, "verbose": 2}):
        print(horovod.run(work, (1,), {"b": 2}, **more))
    os.makedirs("bin")
    os.symlink(sys.executable, "bin/another")
    os.environ["PATH"] += ":" + os.path.abspath("bin")
    print(horovod.run(where, executable="another", start_timeout=7))
    both = {"use_gloo": True, "use_mpi": True}
    for more in ({"min_np": 2, "max_np": 1}, {"executable": "./no"}, both, {"hosts": "localhost:1"}):
        try:
            horovod.runner.run(work, np=2, **more)
        except ValueError as error:
            print("ValueError:", error)
    try:
        horovod.run(work, (1, 2), {"fails": True}, np=2, output_filename="logs")
    except RuntimeError as error:
        assert str(error).startswith("Horovod detected that one or more processes exited"), error
        print(error.rank, "on purpose" in str(error), open("logs/rank.1/stderr").read().splitlines()[-1])
"""


def test_a_function_is_called_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    lines = output("calls.py", folder=tmp_path).splitlines()
    assert lines[:2] == ["[(0, 3), (1, 3)]"] * 2
    assert lines[2].endswith("another', '7')]")
    assert [line.partition(":")[0] for line in lines[3:7]] == ["ValueError"] * 4
    assert lines[7:] == ["1 True RuntimeError: on purpose"]


ELASTIC = """
import os, signal, sys
from pathlib import Path
import ronde.compat
import horovod

def work(folder):
    import ronde.torch as hvd  # what `horovod.torch` is here
    import torch

    @hvd.elastic.run
    def train(state):
        killed = Path(folder, "killed")
        while state.step < 20 or hvd.size() < 2:
            if state.step == 10 and hvd.rank() == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(torch.ones(1), name="x")
            state.step += 1
            state.commit()
        return hvd.rank(), hvd.size()

    state = hvd.elastic.TorchState(step=0)
    return (*train(state), recoveries())

def recoveries():
    import ronde.elastic
    return ronde.elastic.goodput().recoveries

if __name__ == "__main__":
    folder = sys.argv[1]
    more = {"num_proc": 2, "min_num_proc": 1, "max_num_proc": 2}
    if sys.argv[2] == "hosts":
        Path(folder, "hosts.sh").write_text("#!/bin/sh\\necho localhost:1\\necho 127.0.0.1:1\\n")
        Path(folder, "hosts.sh").chmod(0o755)
        more |= {"host_discovery_script": folder + "/hosts.sh", "cooldown_range": [1, 2], "reset_limit": 9}
    print(horovod.run(work, (folder,), **more))
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["here", "hosts"])
def test_a_function_survives_a_killed_worker(place: str, tmp_path: Path) -> None:
    (tmp_path / "elastic.py").write_text(ELASTIC)
    lines = output("elastic.py", str(tmp_path), place, folder=tmp_path).splitlines()
    assert lines[-1] == "[(0, 2, 1), (1, 2, 0)]", "rank 0 has survived the loss, and rank 1 is new"
    assert (tmp_path / "killed").exists()


def test_what_is_not_there_says_so(tmp_path: Path) -> None:
    program = """
import ronde.compat
for line in (
    "import horovod.tensorflow", "import horovod.tensorflow.keras", "import horovod.keras",
    "from horovod import mxnet", "import horovod.mxnet.x", "import horovod.torch.adasum",
    "import horovod; horovod.mxnet",
    "import horovod.torch as hvd; hvd.elasticity", "from horovod.torch import elasticity",
    "from horovod.runner.launch import _run", "from horovod.runner.mpi_run import mpi_run",
    "from horovod.runner import _HorovodArgs",
    "from horovod.runner.gloo_run import gloo_run", "from horovod.runner.launch import unknown",
):
    try:
        exec(line)
    except (ImportError, AttributeError) as error:
        print(line, "->", type(error).__name__, error)
import horovod
from horovod.common.process_sets import ProcessSet, global_process_set
print(horovod.__version__)
"""
    lines = output("-c", program, folder=tmp_path).splitlines()
    assert len(lines) == 15
    for line in lines[:-1]:
        assert "is not available: Ronde replaces Horovod" in line or "cannot import name" in line, line
    assert "horovod.tensorflow is not available" in lines[0]
    assert "and provides only horovod.torch, horovod.spark, horovod.ray and horovod.run" in lines[6]
    assert "ModuleNotFoundError" in lines[1]
    told = ("call horovod.run", "start the script by mpirun", "call horovod.run", "call horovod.run")
    for line, instead in zip(lines[9:13], told, strict=True):
        assert "ImportError" in line or "ModuleNotFoundError" in line, line
        assert instead in line, line


NAMES = """
import inspect
import ronde.compat
import horovod.torch as hvd
import horovod

for module in (hvd.mpi_ops, hvd.compression, hvd.functions, hvd.optimizer, hvd.sync_batch_norm):
    assert module.__name__.startswith("horovod.torch."), module
assert hvd.mpi_ops.Average is hvd.Average
assert hvd.compression.FP16Compressor is hvd.Compression.fp16
assert hvd.compression.NoneCompressor is hvd.Compression.none
exceptions = horovod.common.exceptions
assert exceptions.HorovodInternalError is hvd.HorovodInternalError
assert exceptions.HostsUpdatedInterrupt(skip_sync=True).skip_sync
mismatch = exceptions.HorovodVersionMismatchError("torch", "2.0", "1.0")
assert isinstance(mismatch, ImportError) and (mismatch.version, mismatch.installed_version) == ("2.0", "1.0")
util = horovod.common.util
assert hvd.check_extension is util.check_extension
util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", hvd.__file__, "mpi_lib_v2")
try:
    util.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", hvd.__file__, "mpi_lib")
    raise SystemExit("there is no TensorFlow here")
except ImportError as error:
    assert "horovod.tensorflow is not available" in str(error)
assert util.extension_available("torch") and not util.extension_available("mxnet")
assert util.gloo_built() == hvd.gloo_built() and util.split_list([1, 2, 3], 2) == [[1, 2], [3]]
assert util.num_rank_is_power_2(4) and not util.num_rank_is_power_2(0)
import os
os.environ["BEFORE"] = "1"
with util.env(BEFORE="2", NEW="3", LEFT=None):
    assert (os.environ["BEFORE"], os.environ["NEW"]) == ("2", "3")
assert os.environ["BEFORE"] == "1" and "NEW" not in os.environ
import horovod.version
assert horovod.version.__version__ == horovod.__version__
from horovod.common.basics import HorovodBasics
basics = HorovodBasics(hvd.__file__, "mpi_lib_v2")
basics.init()
assert (basics.rank(), basics.size(), basics.local_size(), basics.Sum) == (0, 1, 1, hvd.Sum)
assert basics.gloo_built() == hvd.gloo_built() and basics.mpi_enabled() is False and basics.is_homogeneous()
basics.shutdown()
assert not basics.is_initialized()
from horovod.runner import mpi_run
os.makedirs("bin")
for said, name in (("mpirun (Open MPI) 5.0.11", "open_mpi"), ("HYDRA build details:", "mpich"),
                   ("Intel(R) MPI Library, based on MPICH", "intel_mpi"), ("IBM Spectrum MPI", "spectrum_mpi")):
    with open("bin/mpirun", "w") as file:
        file.write(f"#!/bin/sh\\necho '{said}'\\n")
    os.chmod("bin/mpirun", 0o755)
    found = {each for each in ("open_mpi", "mpich", "intel_mpi", "spectrum_mpi")
             if getattr(mpi_run, f"is_{each}")({"PATH": os.path.abspath("bin") + ":/usr/bin:/bin"})}
    assert found == {name}, (said, found)
assert not mpi_run.mpi_available({"PATH": "/nowhere"})
print(*inspect.signature(horovod.run).parameters)
"""

LOADERS = """
import threading
import ronde.compat
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

class Loader(BaseDataLoader):
    def __init__(self, batches, fails=False):
        self.batches, self.fails = batches, fails

    def __len__(self):
        return self.batches

    def _iterate(self):
        for batch in range(self.batches):
            yield batch
        if self.fails:
            raise LookupError("no more data")

    def _process_batch(self, batch):
        return batch * 10

class AsyncLoader(AsyncDataLoaderMixin, Loader):
    pass

print(list(Loader(3)), len(Loader(3)))
for size in (0, 1, 64):
    loader = AsyncLoader(async_loader_queue_size=size, batches=100)
    for _ in range(2):
        assert list(loader) == [10 * batch for batch in range(100)]
    for batch in loader:
        if batch == 50:
            break
    del batch
    loader.close_async_loader()
    loader.close_async_loader()
    assert next(iter(loader)) == 0
    loader.close_async_loader()
    iterator = iter(loader)
    assert next(iterator) == 0
    loader.close_async_loader()
    assert next(iterator, "the end") == (10 if size == 0 else "the end")
    iterator.close()
    assert [*zip(loader, loader)][0] == (0, 0)
    loader.close_async_loader()
    found = []
    try:
        for batch in AsyncLoader(size, batches=2, fails=True):
            found.append(batch)
    except LookupError as error:
        print(size, found, error)
assert threading.active_count() == 1, threading.enumerate()
"""


def test_data_loaders_read_ahead_and_end(tmp_path: Path) -> None:
    lines = output("-c", LOADERS, folder=tmp_path).splitlines()
    assert lines == ["[0, 10, 20] 3"] + [f"{size} [0, 10] no more data" for size in (0, 1, 64)]


def test_horovodrun_is_ronde_run(script: Path, tmp_path: Path) -> None:
    program = "import sys, ronde.compat; from horovod.runner.launch import run_commandline; sys.exit(run_commandline())"
    words = ["-np", 2, sys.executable, script, "--epochs", 3]
    assert "ranks 2 seen 240 accuracy good" in output("-c", program, *words, folder=tmp_path)


RUN = """
    func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile
    host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo
    use_mpi mpi_args network_interface network_interfaces executable np min_np max_np
"""


def test_horovods_modules_and_names_are_there(tmp_path: Path) -> None:
    assert output("-c", NAMES, folder=tmp_path).split() == RUN.split()


def test_an_installed_horovod_goes_before_unless_forced(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "horovod").mkdir(parents=True)
    (site / "horovod" / "__init__.py").write_text("__version__ = 'theirs'\n")

    def says(program: str, *, path: str = str(site)) -> str:
        return output("-c", program, folder=tmp_path, path=path).strip()

    show = "; import horovod; print(horovod.__version__)"
    assert says("import ronde.compat" + show) == "theirs"
    assert says("import ronde.compat; ronde.compat.install(force=True)" + show) == "0.28.1"
    assert says("import ronde.compat" + show, path="") == "0.28.1"
    (site / "horovod" / "__init__.py").unlink()  # a folder of that name is no Horovod
    assert says("import ronde.compat" + show) == "0.28.1"
    assert says("import ronde.compat" + show.replace("print", "ronde.compat.install(); print")) == "0.28.1"
    (site / "horovod" / "__init__.py").write_text("")
    done = python(
        "-c", "import horovod, ronde.compat as c; c.install(force=True)", folder=tmp_path, path=str(site)
    )
    assert "UsageError: Horovod has been imported already, from " in done.stderr


def test_the_dry_run_shows_it(script: Path, tmp_path: Path) -> None:
    plan = output("-m", "ronde", "run", "--horovod", "--dry-run", script, folder=tmp_path)
    assert any("PYTHONPATH=" in line and "ronde/compat/packages" in line for line in plan.splitlines())
