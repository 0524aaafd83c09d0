"""Counts GPUs by the kernel's files and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde.cli.run_here import usable_gpus


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("0,2", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,7,1", 1),
        ("GPU-1234,GPU-5678", 2),
        ("MIG-1", 1),
    ],
)
def test_of_nvidia(tmp_path: Path, visible: str | None, count: int) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert usable_gpus(environment, f"{tmp_path}/") == count


def test_processors_are_no_gpus_of_amd(tmp_path: Path) -> None:
    for node, gpu in enumerate(("0", "12345", "54321")):  # the first one is the processor
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu}\n")
    assert usable_gpus({}, f"{tmp_path}/") == 2
    assert usable_gpus({"HIP_VISIBLE_DEVICES": "1"}, f"{tmp_path}/") == 1


def test_a_variable_shows_no_gpu_that_is_not_there(tmp_path: Path) -> None:
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "0"}, f"{tmp_path}/") == 0
