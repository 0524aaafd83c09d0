"""Where the output of a worker goes, without workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ronde.launch.agent.outputs import RunOutputs, WorkerOutput
from ronde.launch.config import Outputs, Std
from ronde.launch.launch_plan import WorkerPlan
from ronde.process.uncaught import LEAVES_TRACEBACK

WORKER = WorkerPlan(rank=7, local_rank=1, index=1, argv=("true",), environment={})


@contextmanager
def output(outputs: Outputs, size: int = 8) -> Iterator[WorkerOutput]:
    with closing(RunOutputs(outputs, "run", pytest.fail, host="h", reports=True)) as run:
        yield run.worker(0, WORKER, size)


@pytest.mark.parametrize(
    ("size", "name"), [(8, "rank.7"), (10, "rank.7"), (11, "rank.07"), (101, "rank.007")]
)
def test_directories_of_ranks_have_the_width_of_the_last(tmp_path: Path, size: int, name: str) -> None:
    with output(Outputs(log_dir=str(tmp_path), by_rank=True), size) as worker:
        assert Path(worker.error_file).parent == tmp_path / name


@pytest.mark.parametrize(("std", "expected"), [(Std.NONE, "1"), (Std.OUT, "1"), (Std.ERR, ""), (Std.ALL, "")])
@pytest.mark.parametrize("field", ["tee", "redirects"])
def test_a_worker_whose_errors_go_into_a_file_prints_its_traceback(
    tmp_path: Path, field: str, std: Std, expected: str
) -> None:
    with output(Outputs(log_dir=str(tmp_path), **{field: {-1: std}})) as worker:  # type: ignore[arg-type]
        assert worker.environment[LEAVES_TRACEBACK] == expected
