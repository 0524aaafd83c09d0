"""The program of `ronde.torch.elastic`: a rank is killed, and the other one keeps its process and its GPU memory.

Its only rank starts jobs of two ranks, because ranks of a program do not die.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tests.gpu.programs import Check, close, program, same

_OF_JOB = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "RONDE_", "_RONDE_")
JOB_LIMIT_S = 60


@program("elastic", ranks=1, limit_s=240)
def elastic() -> Iterator[tuple[str, Check]]:
    undisturbed: list[Any] = []
    yield "two ranks, without a loss", lambda: undisturbed.extend(trained("undisturbed")[0])
    yield "a spare takes the place of a killed rank, bit by bit", lambda: replaced("--spares", undisturbed)
    yield (
        "a fresh process takes the place of a killed rank, bit by bit",
        lambda: replaced("--max-restarts", undisturbed),
    )
    yield "one rank goes on alone, a fresh process comes, 1e-5", lambda: alone(undisturbed)


def replaced(option: str, expected: Sequence[Any]) -> str:
    """Kill a rank that a spare or a fresh process replaces; return the times of the recovery."""
    results, events, output = trained(option, option, "1", how="replaced")
    same(results, expected)
    return recovery(events, output)


def alone(expected: Sequence[Any]) -> str:
    """Kill a rank; the other one goes on alone, until a fresh process comes."""
    results, events, output = trained("alone", "--min-np", "1", "--max-restarts", "3", how="alone")
    close(results, expected)
    sizes = [each["size"] for each in events if each["event"] == "entered" and each["rank"] == 0]
    assert sizes == [2, 1, 2], f"rank 0 was in worlds of the sizes {sizes}, not of 2, 1, and 2"
    return recovery(events, output)


def trained(name: str, *words: str, how: str = "") -> tuple[list[Any], list[Any], str]:
    """Train on two ranks. Return the tensors at the end, which both ranks share, the events, and the output."""
    name = name.strip("-")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_OF_JOB)}
    command = [sys.executable, "-m", "ronde", "run", "-n", "2", *words]
    command += [sys.executable, "-m", "tests.gpu.elastic_training", name, how]
    done = subprocess.run(
        *(command,),
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        timeout=JOB_LIMIT_S,
    )
    print(done.stdout, flush=True)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-300:]}"
    beginning = os.path.join(os.environ["CHECK_FOLDER"], name)
    one, other = (torch.load(f"{beginning}.{rank}.results") for rank in range(2))
    same(one, other)
    with open(f"{beginning}.events") as lines:
        return one, [json.loads(line) for line in lines], done.stdout


def recovery(events: Sequence[Any], output: str) -> str:
    """Return the times of the first recovery; raise AssertionError unless the survivor has kept its process."""
    entered = [each for each in events if each["event"] == "entered" and each["rank"] == 0]
    assert len({each["pid"] for each in entered}) == 1, "rank 0 has changed its process"
    assert len({str(each["addresses"]) for each in entered}) == 1, "the parameters have moved in memory"
    assert len(entered) > 1, "no rank was lost"
    (killed,) = (each for each in events if each["event"] == "killed")
    stepped = next(each for each in events if each["event"] == "done" and each["at"] > entered[1]["at"])
    told = re.search(r"after ([\d.]+) ms", output)
    assert told, "Ronde has not told how long the recovery took"
    to_train, to_step = (1000 * (each["at"] - killed["at"]) for each in (entered[1], stepped))
    return (
        f"{told[1]} ms to recover; from the kill to the training function {to_train:.1f} ms, to the end of its "
        f"first step {to_step:.1f} ms"
    )
