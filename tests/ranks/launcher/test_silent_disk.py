"""Log files on a file system that does not answer: a network file system whose server has gone away, hard mounted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.ranks.launcher.test_launcher import Launcher, await_lines, end

FUSE = "/dev/fuse"


@contextmanager
def silent(folder: Path) -> Iterator[None]:
    """A folder on a file system that does not answer."""
    server = os.open(FUSE, os.O_RDWR)
    options = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    subprocess.run(
        ["mount", "-i", "-t", "fuse", "-o", options, "silent", str(folder)], pass_fds=[server], check=True
    )
    try:
        yield
    finally:
        os.close(server)  # now every question fails
        subprocess.run(["umount", str(folder)], check=True)


ATTEMPTS = """
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, flush=True)
while not os.path.exists("silent"):
    time.sleep(0.02)
sys.exit("the end of attempt " + attempt)
"""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists(FUSE), reason="there is no FUSE")
def test_logs_on_a_disk_that_does_not_answer_hold_up_no_restart_and_no_end(launcher: Launcher) -> None:
    launcher.script(ATTEMPTS)
    words = "-n 2 --max-restarts 1 --preload none --log-dir logs --redirects 2 script.py"
    process = launcher.start(*words.split())
    await_lines(process, 2)
    (run,) = (launcher.folder / "logs").iterdir()
    with silent(run):
        (launcher.folder / "silent").touch()
        code, out, err = end(process)
    assert code == 1
    assert sorted(out.splitlines()) == ["[0] attempt 1", "[1] attempt 1"]
    for rank in (0, 1):
        folder = run / "attempt_1" / str(rank)
        problem = f"cannot make {folder}: the disk has not answered for 10 s"
        assert f"\nronde: rank {rank} has no log files: {problem}\n" in err
    assert err.endswith("    the end of attempt 1\n")  # it is shown where there are no files
    assert not list((run / "attempt_0").rglob("error.json"))
