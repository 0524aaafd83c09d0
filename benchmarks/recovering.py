"""The worker of recovery.py: calls all-reduce by Gloo in a loop, in place of training, and records the times.

    recovering.py FOLDER

It writes one line per process into FOLDER/PID: its rank, the world's size, and on the clock that all processes share
the times when torch had been imported and when its first all-reduce was done. It ends when FOLDER/stop is there.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

import torch
import torch.distributed

STEP_S = 0.005


def main() -> None:
    """Train until FOLDER/stop exists."""
    folder = pathlib.Path(sys.argv[1])
    imported_ns = time.monotonic_ns()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    total = torch.ones(2)
    torch.distributed.all_reduce(total)
    text = f"{rank} {size} {imported_ns} {time.monotonic_ns()}\n"
    part = folder / f"part{os.getpid()}"
    part.write_text(text)
    part.rename(folder / str(os.getpid()))
    while True:
        stopped = (folder / "stop").exists()
        total = torch.tensor([1.0, float(stopped)])
        torch.distributed.all_reduce(total)
        if total[1] == size:  # all have seen it
            break
        time.sleep(STEP_S)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
