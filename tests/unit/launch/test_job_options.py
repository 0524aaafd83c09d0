"""Every function that runs a function on a cluster has the names and defaults of RunOptions."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import ronde
from ronde.errors import UsageError
from ronde.launch.job_options import RunOptions

SOURCES = Path(ronde.__file__).parent
DEFAULTS = {each.name: each.default for each in fields(RunOptions) if each.name != "num_proc"}


def parameters(path: str, *names: str) -> dict[str, object]:
    """Return the default of each parameter of a function or method, of a module that this Python may not import."""
    node: ast.AST = ast.parse((SOURCES / path).read_text(encoding="utf-8"))
    for name in names:
        node = next(
            each
            for each in ast.iter_child_nodes(node)
            if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name
        )
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    named = dict(zip([each.arg for each in given.args[-len(given.defaults) :]], given.defaults))
    named |= {each.arg: default for each, default in zip(given.kwonlyargs, given.kw_defaults) if default}
    return {name: ast.literal_eval(default) for name, default in named.items()}


@pytest.mark.parametrize(
    ("path", "names", "least"),
    [
        ("spark/__init__.py", ["run"], 9),
        ("spark/__init__.py", ["run_elastic"], 11),
        ("dask/__init__.py", ["run"], 9),
        ("flink/__init__.py", ["run"], 9),
        ("ray/__init__.py", ["RayExecutor", "create_settings"], 3),
    ],
)
def test_options_have_one_name_and_one_default(path: str, names: list[str], least: int) -> None:
    shared = {name: default for name, default in parameters(path, *names).items() if name in DEFAULTS}
    assert len(shared) >= least
    assert shared == {name: DEFAULTS[name] for name in shared}


def test_what_follows_from_the_options() -> None:
    fixed = RunOptions(4, reset_limit=3)
    assert (fixed.least, fixed.max_restarts, fixed.interface) == (4, 0, None)
    elastic = RunOptions(4, min_num_proc=2, nics=["eth0", "eth1"])
    assert (elastic.least, elastic.max_restarts, elastic.interface) == (2, 20, "eth0,eth1")
    assert RunOptions(4, min_num_proc=2, reset_limit=0, nics="eth0").max_restarts == 0
    assert type(RunOptions(np.int64(4)).num_proc) is int  # type: ignore[arg-type]


@pytest.mark.parametrize("least", [0, 5])
def test_the_smallest_number_of_workers_is_at_most_the_largest(least: int) -> None:
    with pytest.raises(UsageError, match=f"min_num_proc={least} is invalid: expected 1 to 4"):
        RunOptions(4, min_num_proc=least)
