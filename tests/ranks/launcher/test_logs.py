"""Log lines name their rank and host; a program with its own handlers keeps them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HOST = re.escape(socket.gethostname())
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "


def errors(program: str, *words: str, **environ: str) -> list[str]:
    """The lines on stderr of a program that speaks through the logger."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RONDE_", "HOROVOD_"))}
    clean["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, *(words or ("-c",)), program],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env=clean | environ,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


SPEAK = (
    "; logging.getLogger('ronde.engine').warning('%d%% of it', 7); logging.getLogger('ronde').info('more')"
)
INIT = "import logging, ronde; ronde.init()" + SPEAK


@pytest.mark.slow
def test_lines_of_a_program_without_handlers() -> None:
    (line,) = errors(INIT)
    assert re.fullmatch(TIME + rf"WARNING rank 0 on {HOST}: ronde\.engine: 7% of it", line)
    first, second = errors(INIT, HOROVOD_LOG_LEVEL="TRACE", HOROVOD_LOG_HIDE_TIME="1")
    assert re.fullmatch(rf"WARNING rank 0 on {HOST}: ronde\.engine: 7% of it", first)
    assert second.startswith("INFO rank 0")
    (line,) = errors(INIT, RONDE_LOG_HIDE_TIM="1")[:-1]  # a warning while settings are read, once
    assert re.fullmatch(TIME + rf"WARNING rank 0 on {HOST}: .* did you mean RONDE_LOG_HIDE_TIME\?", line)
    assert errors(INIT, RONDE_LOG_LEVEL="fatal") == []


def test_horovods_variables_without_effect_are_reported_once() -> None:
    ignored = {"HOROVOD_MPI_THREADS_DISABLE": "1", "HOROVOD_CCL_CACHE": "1", "HOROVOD_CACHE_CAPACITY": "5"}
    assert len(errors(INIT, **ignored)) == 1  # at the usual level nothing
    told = [line for line in errors(INIT, **ignored, RONDE_LOG_LEVEL="info") if "Horovod" in line]
    assert len(told) == 1
    assert told[0].endswith("have no effect in Ronde: HOROVOD_CCL_CACHE, HOROVOD_MPI_THREADS_DISABLE")


@pytest.mark.slow
def test_a_program_with_handlers_keeps_them() -> None:
    before = (
        "import logging, sys; logging.basicConfig(format='mine: %(message)s'); import ronde; ronde.init()"
    )
    assert errors(before + SPEAK) == ["mine: 7% of it"]
    form = "it.setFormatter(logging.Formatter('own: %(message)s'));"
    own = f"import logging, sys, ronde; it = logging.StreamHandler(); {form}"
    add = "logging.getLogger('ronde').addHandler(it)"
    assert errors(f"{own} {add}; ronde.init()" + SPEAK) == ["own: 7% of it"]
    # Also if it comes later.
    assert errors(f"{own} ronde.init(); {add}" + SPEAK) == ["own: 7% of it"]
    later = "import logging, ronde; ronde.init(); logging.basicConfig(format='later: %(message)s')"
    assert errors(later + SPEAK) == ["later: 7% of it"]
    untouched = (
        "import logging, ronde; ronde.init(); assert not logging.getLogger().handlers; logging.warning('x')"
    )
    assert errors(untouched) == ["WARNING:root:x"]


def test_every_rank_and_every_world(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(INIT + "\nronde.shutdown(); ronde.init()\nlogging.getLogger('ronde').error('again')\n")
    lines = errors(str(script), "-m", "ronde", "run", "-n", "2", RONDE_LOG_HIDE_TIME="1")
    for rank in range(2):
        prefix = rf"(\[{rank}\] )?"
        for text in (
            rf"WARNING rank {rank} on {HOST}: ronde\.engine: 7% of it",
            rf"ERROR rank {rank} on {HOST}: ronde: again",
        ):
            assert sum(re.fullmatch(prefix + text, line) is not None for line in lines) == 1, lines
