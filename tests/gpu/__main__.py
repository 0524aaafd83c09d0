"""Checks what Ronde does with tensors in the memory of a GPU, on a machine with one: in under eight minutes.

    python -m tests.gpu              # all programs, on the GPU
    python -m tests.gpu --cpu        # the same with tensors in main memory, without the programs of NCCL
    python -m tests.gpu ddp fsdp     # these programs

Needs a Ronde that is installed, a PyTorch with CUDA, and of this repository only tests/gpu. A *program* runs on one or
two ranks, which share the GPU. Each has a time limit, and several *checks*: each compares results with those computed
here without Ronde, or with those of PyTorch's own backends. Prints a table at the end; the exit code is 1 if a check
failed or did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from tests.gpu import elastic, engine, process_groups  # noqa: F401, fill PROGRAMS
from tests.gpu.programs import PROGRAMS, Program, my_rank, on_cpu, place

import ronde

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # sums in the same order in each run
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}
LIMIT_S = 460  # of all programs together


def run_checks(name: str) -> int:
    """Run a program's checks on this rank; write each result as soon as it is there."""
    chosen, failures = PROGRAMS[name], 0
    with open(f"{os.environ['CHECK_FOLDER']}/{name}.{my_rank()}", "w", buffering=1) as results:
        try:
            if not on_cpu():
                torch.cuda.set_device(0)
                torch.zeros(1, device=place())  # the start of CUDA is no check's time
            for check_name, check in chosen.checks():
                began, note, error = time.monotonic(), None, ""
                try:
                    note = check()
                except Exception as failure:
                    traceback.print_exc()
                    error, failures = f"{type(failure).__name__}: {failure}", failures + 1
                took_s = time.monotonic() - began
                row = [check_name, error, took_s, note if isinstance(note, str) else ""]
                results.write(json.dumps(row) + "\n")
        except Exception as failure:
            traceback.print_exc()
            failures += 1
            results.write(
                json.dumps(["start or end", f"{type(failure).__name__}: {failure}", 0.0, ""]) + "\n"
            )
    return 1 if failures else 0


def run_program(chosen: Program, cpu: bool, folder: Path, left_s: float) -> list[Sequence[Any]]:
    """Run a program within its limit and `left_s`. Return its rows: program, check, ranks, error, seconds, note."""
    environ = {
        **os.environ,
        **ENVIRONMENT,
        **chosen.environ,
        "CHECK_DEVICE": "cpu" if cpu else "cuda",
        "CHECK_FOLDER": str(folder),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "ronde", "run", "-n", str(chosen.ranks)]
    command += [sys.executable, "-m", "tests.gpu", "--program", chosen.name]
    print(f"\n== {chosen.name}", flush=True)
    began, limit_s = time.monotonic(), min(chosen.limit_s, left_s)
    process = subprocess.Popen(command, env=environ, start_new_session=True)
    ending = ""
    try:
        code = process.wait(limit_s)
        ending = f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        ending = f"it did not end within {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = collected(chosen, folder)
    took_s = time.monotonic() - began
    is_explained = any(error for _, _, _, error, _, _ in found) and not ending.startswith("it did")
    error = "" if is_explained else ending or ("" if found else "no results")
    return [*found, (chosen.name, "the whole program", chosen.ranks, error, took_s, "")]


def collected(chosen: Program, folder: Path) -> list[Sequence[Any]]:
    """Return the rows of a program from the files of its ranks."""
    rows_of: dict[str, list[Any]] = {}
    counts: dict[str, int] = {}
    for rank in range(chosen.ranks):
        path = folder / f"{chosen.name}.{rank}"
        for line in path.read_text().splitlines() if path.exists() else []:
            name, error, took_s, note = json.loads(line)
            row = rows_of.setdefault(name, [chosen.name, name, chosen.ranks, "", 0.0, ""])
            row[3] = row[3] or (f"rank {rank}: {error}" if error else "")
            row[4], row[5] = max(row[4], took_s), row[5] or note
            counts[name] = counts.get(name, 0) + 1
    for name, count in counts.items():
        if count < chosen.ranks and not rows_of[name][3]:
            rows_of[name][3] = "not done on all ranks"
    return list(rows_of.values())


def print_table(found: Sequence[Sequence[Any]], cpu: bool) -> None:
    print(f"\n{'program':15}{'check':62}{'ranks':>5}{'s':>7}  result")
    for program_name, name, ranks, error, took_s, note in found:
        short = " ".join(error.split())
        result = f"FAILED {short[:300]}" if error else f"ok{f': {note}' if note else ''}"
        print(f"{program_name:15}{name:62}{ranks:5}{took_s:7.1f}  {result}")
    print(versions(cpu))


def versions(cpu: bool) -> str:
    parts = [f"ronde {ronde.__version__}", f"PyTorch {torch.__version__}", f"numpy {numpy.__version__}"]
    parts.append("Python " + sys.version.split()[0])
    if not cpu:
        parts.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
        parts.append(f"CUDA {torch.version.cuda}, {torch.cuda.get_device_name(0)}")
    return ", ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(PROGRAMS)} (default: all)")
    parser.add_argument(
        "--cpu", action="store_true", help="tensors in main memory, without the programs of NCCL"
    )
    parser.add_argument("--program", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        return run_checks(options.program)
    names = options.programs or list(PROGRAMS)
    found: list[Sequence[Any]] = []
    end = time.monotonic() + LIMIT_S
    for name in names:
        if not (options.cpu and PROGRAMS[name].needs_gpu):
            left_s = max(1.0, end - time.monotonic())
            with tempfile.TemporaryDirectory() as folder:
                found += run_program(PROGRAMS[name], options.cpu, Path(folder), left_s)
    print_table(found, options.cpu)
    return 1 if any(error for _, _, _, error, _, _ in found) else 0


if __name__ == "__main__":
    sys.exit(main())
