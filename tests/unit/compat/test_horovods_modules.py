"""The modules of `horovod` that have no file: they are found, keep names and classes, and say what they lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ronde.compat import PACKAGES

PROGRAM = """
import importlib, importlib.util, inspect, pickle, sys
import horovod.common, horovod.data, horovod.version

for module in ("common.basics", "common.exceptions", "common.process_sets", "common.util", "data.data_loader_base",
               "version"):
    made = importlib.import_module(f"horovod.{module}")
    assert importlib.util.find_spec(made.__name__) is made.__spec__
    for name in made.__all__:
        member = getattr(made, name)
        if inspect.isclass(member) and member.__module__.startswith("horovod."):
            assert member.__module__ == made.__name__, member
            assert pickle.loads(pickle.dumps(member)) is member
            assert inspect.getsource(member).startswith("class ")
assert "util" in horovod.common.__all__
assert horovod.common.exceptions.HostsUpdatedInterrupt is horovod.common.elastic.HostsUpdatedInterrupt
assert horovod.common.elastic.HostsUpdatedInterrupt(True).skip_sync
for line in ("horovod.common.util.nothing", "import horovod.common.nothing", "import horovod.data.x.y"):
    try:
        exec(line)
    except (AttributeError, ModuleNotFoundError) as error:
        print(type(error).__name__, str(error).partition(" is not available: Ronde replaces Horovod")[0])
from horovod.runner import mpi_run
try:
    mpi_run.mpi_run
except ImportError as error:
    print(str(error).rpartition("; ")[2])
from horovod.runner.util.threads import in_thread
done = []
in_thread(done.append, (1,)).join()
in_thread(lambda: 1 / 0, silent=True, daemon=False, name="silent").join()
assert done == [1]
calls = []
count = horovod.common.util._cache(lambda: len(calls))
assert [count(), calls.append(1), count()] == [0, None, 0]
"""


def test_they_are_modules_of_horovod_in_every_respect(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([PACKAGES, *filter(None, sys.path)])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "AttributeError horovod.common.util.nothing",
        "ModuleNotFoundError horovod.common.nothing",
        "ModuleNotFoundError horovod.data.x",
        "start the script by mpirun, as python -m ronde.compat script.py",
    ]
