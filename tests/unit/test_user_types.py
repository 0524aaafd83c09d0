"""What type checkers say about a user's script for `ronde.torch`: its calls are accepted, and their types known."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = """
from typing import Any, assert_type

import torch

import ronde
import ronde.torch as hvd
from ronde.torch.handles import Handle

hvd.init()
assert_type(hvd.rank(), int)
model = torch.nn.Sequential(torch.nn.Linear(2, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_parameters(model.named_parameters())
hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
optimizer = hvd.DistributedOptimizer(  # the variable keeps its name, as in most scripts
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16, op=hvd.Average
)
assert_type(optimizer.synchronize(), None)
assert_type(optimizer.backward_passes_per_step, int)
with optimizer.skip_synchronize():
    optimizer.step()
optimizer.zero_grad()
torch.optim.lr_scheduler.StepLR(optimizer, step_size=2).step()
assert_type(optimizer.state_dict(), dict[str, Any])

ones = torch.ones(2)
assert_type(hvd.allreduce(ones, name="loss", op=hvd.Sum), torch.Tensor)
assert_type(hvd.allreduce_(ones), torch.Tensor)
assert_type(hvd.allreduce_async(ones), Handle[torch.Tensor])
assert_type(hvd.synchronize(hvd.allreduce_async_(ones)), torch.Tensor)
assert_type(hvd.grouped_allreduce([ones, ones]), list[torch.Tensor])
assert_type(hvd.synchronize(hvd.grouped_allreduce_async([ones])), list[torch.Tensor])
assert_type(hvd.allgather(ones), torch.Tensor)
assert_type(hvd.broadcast_(ones, 0), torch.Tensor)
assert_type(hvd.reducescatter(ones), torch.Tensor)
assert_type(hvd.alltoall(ones), torch.Tensor)
assert_type(hvd.alltoall(ones, [1, 1]), tuple[torch.Tensor, torch.Tensor])
assert_type(hvd.synchronize(hvd.sparse_allreduce_async(ones.to_sparse())), torch.Tensor)
assert_type(hvd.poll(hvd.broadcast_async(ones, 0)), bool)
assert_type(hvd.broadcast_object({"epoch": 1}), dict[str, int])
assert_type(hvd.allgather_object(1.0), list[float])
assert_type(hvd.join(), int)
assert_type(hvd.SyncBatchNorm(4).forward(torch.ones(2, 4)), torch.Tensor)
assert_type(ronde.allreduce(ones), torch.Tensor)


class Rounded:
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor.round(), None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: None) -> torch.Tensor:
        return tensor


hvd.allreduce(ones, compression=Rounded)
try:
    hvd.barrier()
except hvd.HorovodInternalError as error:
    print(error)
"""
WRONG = """
import torch

import ronde.torch as hvd

hvd.allreduce("text")
hvd.DistributedOptimizer(torch.nn.Linear(2, 1))
hvd.broadcast_parameters(torch.nn.Linear(2, 1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_checker_knows_the_types_of_a_users_script(checker: str, tmp_path: Path) -> None:
    found = Path(sys.executable).with_name(checker)
    program = str(found) if found.exists() else shutil.which(checker)
    if program is None:
        pytest.skip(f"{checker} is not installed here")
    options = {
        "mypy": ["--strict", "--python-executable", sys.executable, "--cache-dir", str(tmp_path / "cache")],
        "pyright": ["--pythonpath", sys.executable],
    }
    for name, text in (("script.py", SCRIPT), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [program, *options[checker], "script.py", "wrong.py"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    found_lines = {
        (line[1], int(line[2]))
        for line in re.finditer(r"(\w+)\.py:(\d+)(?::\d+)?(?: -)?:? error", done.stdout)
    }
    assert found_lines == {("wrong", 6), ("wrong", 7), ("wrong", 8)}, done.stdout + done.stderr
