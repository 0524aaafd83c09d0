from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from ronde.process.resources import available_memory

MIB = 1 << 20


def test_the_tightest_of_the_machine_and_all_groups_counts(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 7168 kB\n")
    assert available_memory(tmp_path) == 7 * MIB
    write("proc/self/cgroup", "0::/outer/inner\n")
    write("sys/fs/cgroup/outer/inner/memory.max", "max\n")
    write("sys/fs/cgroup/outer/memory.max", f"{8 * MIB}\n")
    write("sys/fs/cgroup/outer/memory.current", f"{5 * MIB}\n")
    write("sys/fs/cgroup/outer/memory.stat", f"anon 3\ninactive_file {2 * MIB}\n")
    assert available_memory(tmp_path) == 5 * MIB  # 2 of the 5 that are taken hold files
    write("sys/fs/cgroup/outer/memory.current", f"{20 * MIB}\n")
    assert available_memory(tmp_path) == 0


def test_the_limit_of_a_process_counts() -> None:
    program = "from ronde.process.resources import available_memory; print(available_memory())"
    limited = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 < int(limited.stdout) < 1 << 30
