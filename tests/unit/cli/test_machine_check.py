from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ronde.cli.machine_check import MachineFacts, NetworkInterface, check_machine

GOOD = MachineFacts(
    cores=8,
    core_quota=None,
    load=0.3,
    available_bytes=32 << 30,
    most_files=1 << 20,
    most_processes=None,
    huge_pages="advise",
    clock="tsc",
    receive_bytes=6 << 20,
    send_bytes=4 << 20,
    interfaces=(NetworkInterface("eth0", 1500, 10_000),),
    host_name="a",
    host_addresses=("10.0.0.1",),
)


def test_a_good_machine_needs_no_remedy() -> None:
    findings = check_machine(GOOD, tcp_streams=2)
    assert [each.subject for each in findings if each.remedy] == []
    assert {each.subject: each.text for each in findings}[
        "network"
    ] == "eth0: 10 Gbit/s, packets of 1500 bytes"


@pytest.mark.parametrize(
    ("change", "subject", "text", "remedy"),
    [
        ({"core_quota": 1.5}, "cores", "8, but .* the time of 1.5", "8 cores, or start at most 1 ranks"),
        ({"load": 2.5}, "other programs", "2.5 threads", "`top`"),
        ({"available_bytes": 1 << 28}, "memory", "0.2 GiB", "memory limit"),
        ({"most_files": 1024}, "file descriptors", "1024 for each process, .* 298 ranks", "ulimit -Hn"),
        ({"most_processes": 100}, "processes", "at most 100", "ulimit -u"),
        ({"huge_pages": "never"}, "huge pages", r"none \(never\)", "echo advise"),
        ({"clock": "hpet"}, "clock", "hpet, which", "clocksource=tsc"),
        ({"send_bytes": 212_992}, "TCP buffers", "tcp_wmem allows 208 KiB", "sysctl -w net.ipv4.tcp_wmem"),
        (
            {"interfaces": (NetworkInterface("tun0", 576, None),)},
            "network",
            "tun0: packets of 576",
            "mtu 1500",
        ),
        ({"host_addresses": ()}, "host name", "`a` has no address", "--rdzv-endpoint"),
        (
            {"host_addresses": ("127.0.1.1", "::1")},
            "host name",
            "127.0.1.1, ::1, which only this",
            "/etc/hosts",
        ),
    ],
)
def test_what_holds_a_machine_back_has_a_remedy(
    change: dict[str, object], subject: str, text: str, remedy: str
) -> None:
    (finding,) = [each for each in check_machine(replace(GOOD, **change), 2) if each.remedy]  # type: ignore[arg-type]
    assert finding.subject == subject
    assert re.search(text, finding.text)
    assert re.search(remedy, finding.remedy)


def test_a_limit_of_time_for_all_cores_is_none() -> None:
    assert not [each for each in check_machine(replace(GOOD, core_quota=8.0), 2) if each.remedy]


def test_unknown_facts_have_no_finding() -> None:
    unknown = dict.fromkeys(("huge_pages", "clock", "receive_bytes", "send_bytes", "host_addresses"))
    subjects = {each.subject for each in check_machine(replace(GOOD, **unknown), 2)}  # type: ignore[arg-type]
    assert subjects == {"cores", "other programs", "memory", "file descriptors", "processes", "network"}
