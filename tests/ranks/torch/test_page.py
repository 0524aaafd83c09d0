"""The PyTorch programs of the pages run, and the names in docs/torch.md exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ronde.torch")

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "torch.md").read_text()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("page", ["getting-started.md", "torch.md"])
def test_the_program_runs(page: str, n: int, tmp_path: Path) -> None:
    text = (DOCS / page).read_text()
    (program,) = re.findall(r"^```python\n(import torch\n.*?)^```", text, re.DOTALL | re.MULTILINE)
    script = tmp_path / "train.py"
    script.write_text(program)
    command = [sys.executable, "-m", "ronde", "run", "-n", str(n), str(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.search(rf"the loss after 100 steps, as a mean over {n} ranks: (\S+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) < 1e-2


def test_all_names_are_there() -> None:
    assert hvd.__all__ == sorted(hvd.__all__)
    reference = (DOCS / "api/torch.md").read_text()
    for name in hvd.__all__:
        assert getattr(hvd, name) is not None
        assert re.search(rf"\b{name}\b", reference), name
    for name in re.findall(r"\bhvd\.(\w+)", PAGE):
        assert name in hvd.__all__
