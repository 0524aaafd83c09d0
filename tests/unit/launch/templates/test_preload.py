"""The modules that a template of a script imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde.launch.templates.preload import modules_to_preload


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import os, torch, json", ["torch"]),
        ("import torch.nn.functional as F", ["torch.nn.functional"]),
        ("def f():\n    from sklearn.datasets import load_digits", ["sklearn.datasets"]),
        ("from torch import optim", ["torch", "torch.optim", "torch._dynamo"]),
        ("import torch\no = torch.optim.SGD", ["torch", "torch.optim", "torch._dynamo"]),
        ("import ronde", ["ronde", "ronde.comm.world", "ronde.engine.process"]),
        ("from . import numpy", []),
        ("torch.optim = 1", []),
        ("this is no Python", []),
        ("import tensorflow, jax, helper", []),
    ],
)
def test_the_text_says_it(tmp_path: Path, text: str, modules: list[str]) -> None:
    (tmp_path / "script.py").write_text(text)
    assert modules_to_preload(str(tmp_path / "script.py")) == modules


def test_modules_beside_the_script_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import model\nfrom package import data")
    (tmp_path / "model.py").write_text("import numpy, script")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "data.py").write_text("import pandas")
    assert set(modules_to_preload(str(tmp_path / "script.py"))) == {"numpy", "pandas"}


def test_without_a_script_nothing() -> None:
    assert modules_to_preload("/nowhere/script.py") == []
