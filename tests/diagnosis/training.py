"""Failures in the middle of training with PyTorch."""

from __future__ import annotations

import importlib.util

import pytest
from tests.diagnosis.failure import Failure

WITH_TORCH = (
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
)
BEGINNING = """\
import os, signal, torch
import ronde.torch as hvd
torch.set_num_threads(1)
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
"""

FAILURES = [
    Failure(
        "an exception in a hook of the backward pass",
        """
        def check(gradient):
            if hvd.rank() == 1:
                raise ArithmeticError("the gradient is too large")
        model.weight.register_hook(check)
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) failed with exit code 1",
            r"script.py\", line 10, in check",
            r"ArithmeticError: the gradient is too large",
        ),
        beginning=BEGINNING,
        within_s=60,
        marks=WITH_TORCH,
    ),
    Failure(
        "a worker of a DataLoader that is killed",
        """
        class Images(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                if hvd.rank() == 1 and index == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return torch.ones(2)
        for batch in torch.utils.data.DataLoader(Images(), num_workers=1):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) failed with exit code 1",
            r"RuntimeError: DataLoader worker \(pid\(?s?\)? \d+\).* (killed by signal|exited unexpectedly)",
        ),
        beginning=BEGINNING,
        within_s=60,
        marks=WITH_TORCH,
    ),
]
