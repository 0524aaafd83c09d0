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
    Failure(
        "an exception in a worker of a DataLoader",
        """
        class Images(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                if hvd.rank() == 1 and index == 3:
                    raise OSError("image 3 is truncated")
                return torch.ones(2)
        for batch in torch.utils.data.DataLoader(Images(), num_workers=1):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        """,
        (
            r"ronde: rank 1 \(pid \d+\) failed with exit code 1",
            r"OSError: Caught OSError in DataLoader worker process 0",
            r'script.py", line 13, in __getitem__',
            r"OSError: image 3 is truncated",
        ),
        beginning=BEGINNING,
        within_s=60,
        marks=WITH_TORCH,
    ),
    Failure(
        "a slow worker of a DataLoader",
        """
        import time
        class Images(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                if hvd.rank() == 1 and index == 3:
                    time.sleep(600)
                return torch.ones(2)
        for batch in torch.utils.data.DataLoader(Images(), num_workers=1):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        """,
        (
            r"not by rank 1",
            r"rank 1 on \S+ is here",
            r'script.py", line 16 in <module>',
            r"child process",
            r'script.py", line 14 in __getitem__',
            r"AbortedError: .*stalled for 6 s .*: waited for rank 1",
        ),
        beginning=BEGINNING,
        within_s=60,
        options=("-n", "2", "--shutdown-timeout", "1"),
        environment={"RONDE_STALL_WARNING": "3", "RONDE_STALL_SHUTDOWN": "6"},
        marks=WITH_TORCH,
    ),
    Failure(
        "a model instead of its parameters",
        "hvd.broadcast_parameters(model, root_rank=0)",
        (r"ValueError: expected a state_dict or named parameters, not Linear; pass its state_dict\(\)",),
        beginning=BEGINNING,
        within_s=60,
        marks=WITH_TORCH,
    ),
]
