"""The training that the program `elastic` starts: DDP on two ranks, one of which may kill itself in the middle.

    python -m tests.gpu.elastic_training NAME HOW

It writes files that begin with CHECK_FOLDER/NAME: the parameters at the end by rank, and events, one line of JSON each.
HOW: "" (no rank dies), "replaced" (rank 1 dies), "alone" (as before, and rank 0 waits in step `WAITS_AT` for another).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from tests.gpu.programs import my_rank, on_cpu, place
from tests.gpu.training import network, rows, sgd
from torch.nn.parallel import DistributedDataParallel

import ronde.torch.distributed  # noqa: F401, registers the backend
from ronde.torch import elastic

DIES_AT, WAITS_AT, STEPS = 8, 12, 20

NAME, HOW = sys.argv[1:3]
BEGINNING = os.path.join(os.environ["CHECK_FOLDER"], NAME)


def note(**event: Any) -> None:
    """Append an event with the time, of the clock that all processes of the machine share."""
    with open(f"{BEGINNING}.events", "a") as events:
        events.write(json.dumps({"at": time.monotonic(), "pid": os.getpid(), **event}) + "\n")


def die_once() -> None:
    """Kill this process, unless another one was killed before."""
    try:
        open(f"{BEGINNING}.killed", "x").close()
    except FileExistsError:
        return
    note(event="killed")
    os.kill(os.getpid(), signal.SIGKILL)


def step_of(model: Any, state: Any) -> None:
    inputs, targets = rows(state.step, my_rank())
    state.optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    if HOW and state.step == DIES_AT and my_rank() == 1:
        die_once()  # while rank 0 waits for the sum of gradients
    loss.backward()
    state.optimizer.step()
    dist.all_reduce(loss := loss.detach(), dist.ReduceOp.AVG)
    state.losses += loss
    state.step += 1


@elastic.run
def train(state: Any) -> None:
    addresses = [each.data_ptr() for each in state.model.parameters()]
    note(event="entered", rank=my_rank(), size=dist.get_world_size(), step=state.step, addresses=addresses)
    model = DistributedDataParallel(state.model, device_ids=None if on_cpu() else [0], bucket_cap_mb=0.05)
    while state.step < STEPS:
        if HOW == "alone" and state.step == WAITS_AT and dist.get_world_size() == 1:
            time.sleep(0.02)
            state.check_host_updates()
            continue
        step_of(model, state)
        state.commit()
        note(event="done", rank=my_rank(), step=state.step)


def main() -> None:
    if not on_cpu():
        torch.cuda.set_device(0)
    model = network()  # a spare has started CUDA and has its model when it waits for its place
    dist.init_process_group("ronde")
    state = elastic.TorchState(model, sgd(model), losses=torch.zeros((), device=place()), step=0)
    train(state)
    results = [each.detach().cpu() for each in (*model.parameters(), state.losses)]
    torch.save(results, f"{BEGINNING}.{my_rank()}.results")


if __name__ == "__main__":
    main()
