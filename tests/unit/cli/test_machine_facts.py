from __future__ import annotations

from pathlib import Path

import pytest

from ronde.cli.doctor import read_facts
from ronde.cli.machine_check import NetworkInterface

FILES = {
    "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 2048 kB\n",
    "proc/self/cgroup": "0::/jobs/one\n",
    "proc/self/statm": "10 1 1 1 0 1 0",
    "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
    "sys/fs/cgroup/jobs/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/jobs/one/cpu.max": "max 100000\n",
    "sys/fs/cgroup/jobs/one/pids.max": "64\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "sys/class/net/lo/operstate": "unknown\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth0/mtu": "9000\n",
    "sys/class/net/eth0/speed": "25000\n",
    "sys/class/net/wifi/operstate": "down\n",
    "sys/class/net/veth/operstate": "up\n",
    "sys/class/net/veth/mtu": "1450\n",
    "sys/class/net/veth/speed": "-1\n",
}


def test_facts_come_from_the_files_of_the_kernel(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    facts = read_facts(tmp_path)
    assert (facts.core_quota, facts.huge_pages, facts.clock) == (1.5, "never", "tsc")
    assert facts.available_bytes <= 2048 * 1024
    assert facts.most_processes is not None
    assert facts.most_processes <= 64
    assert (facts.receive_bytes, facts.send_bytes) == (6291456, None)
    assert facts.interfaces == (NetworkInterface("eth0", 9000, 25000), NetworkInterface("veth", 1450, None))


def test_facts_of_this_machine() -> None:
    facts = read_facts()
    assert facts.cores >= 1
    assert facts.available_bytes > 0
    assert facts.host_name


@pytest.mark.parametrize("name", ["sys", "proc/sys"])
def test_a_machine_that_tells_little(tmp_path: Path, name: str) -> None:
    for each, text in FILES.items():
        if not each.startswith(name):
            path = tmp_path / each
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    facts = read_facts(tmp_path)
    assert (facts.receive_bytes, facts.send_bytes) in [(None, None), (6291456, None)]
    assert facts.cores >= 1
