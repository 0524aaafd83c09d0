"""What holds a machine back when it runs ranks, judged from facts about it; `ronde doctor` prints the findings.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["MachineFinding", "MachineFacts", "NetworkInterface", "check_machine"]

GIB = 1 << 30
LEAST_MEMORY_BYTES = GIB
LEAST_BUFFER_BYTES = 1 << 20
LEAST_RANKS = 1024
LEAST_PROCESSES = 1024
LEAST_MTU = 1280  # bytes: of IPv6
DESCRIPTORS_OF_PROGRAM = 128  # of Python, the framework, and the program's files
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "pit")


@dataclass(frozen=True)
class NetworkInterface:
    """An interface that is up, but the loopback. `megabits_per_s`: None if the kernel does not tell."""

    name: str
    mtu_bytes: int
    megabits_per_s: int | None


@dataclass(frozen=True)
class MachineFacts:
    """Facts about a machine and this process; None: unknown, for example because it is not Linux.

    Attributes:
        cores: The cores on which this process may run.
        core_quota: How many cores' time the control group of this process may use; None: no limit.
        load: How many threads of all programs have run or waited for a core in the last minute, on average.
        available_bytes: How much memory this process can take.
        most_files: The hard limit of file descriptors; None: no limit.
        most_processes: How many processes and threads this user or control group may have; None: no limit.
        huge_pages: When shared memory has huge pages: `always`, `within_size`, `advise`, `never` or `deny`.
        clock: The kernel's clock source.
        receive_bytes: The most that the kernel buffers for a TCP connection that receives.
        send_bytes: The same for one that sends.
        interfaces: The network interfaces that are up.
        host_name: The name of the machine.
        host_addresses: What the resolver finds for that name; empty: nothing.
    """

    cores: int
    core_quota: float | None
    load: float
    available_bytes: int
    most_files: int | None
    most_processes: int | None
    huge_pages: str | None
    clock: str | None
    receive_bytes: int | None
    send_bytes: int | None
    interfaces: tuple[NetworkInterface, ...]
    host_name: str
    host_addresses: tuple[str, ...] | None


@dataclass(frozen=True)
class MachineFinding:
    """The judgement of one subject. `remedy`: the command or step that helps; "": all is well."""

    subject: str
    text: str
    remedy: str = ""


def check_machine(facts: MachineFacts, tcp_streams: int) -> list[MachineFinding]:
    """Return a finding for each subject of which there are facts, in a fixed order.

    `tcp_streams`: how many connections for tensors each pair of ranks on two hosts has.
    """
    findings: list[MachineFinding] = [_cores(facts), _other_programs(facts), _memory(facts)]
    findings += [_files(facts, tcp_streams), _processes(facts)]
    findings += _huge_pages(facts)
    findings += _clock(facts)
    findings += _buffers(facts)
    findings += _interfaces(facts)
    findings += _host_name(facts)
    return findings


def _cores(facts: MachineFacts) -> MachineFinding:
    quota = facts.core_quota
    if quota is None or quota >= facts.cores:
        return MachineFinding("cores", f"{facts.cores}, without a limit of time")
    return MachineFinding(
        "cores",
        f"{facts.cores}, but the control group stops its processes when they have used the time of {quota:g}: a rank "
        "that is stopped delays all others",
        f"give the container {facts.cores} cores, or start at most {max(int(quota), 1)} ranks here",
    )


def _other_programs(facts: MachineFacts) -> MachineFinding:
    text = f"{facts.load:.1f} threads have run or waited for a core in the last minute"
    if facts.load < max(0.5, facts.cores / 4):
        return MachineFinding("other programs", text)
    return MachineFinding("other programs", text, "`top` names them; end them, or start fewer ranks")


def _memory(facts: MachineFacts) -> MachineFinding:
    text = f"{facts.available_bytes / GIB:.1f} GiB available"
    if facts.available_bytes >= LEAST_MEMORY_BYTES:
        return MachineFinding("memory", text)
    return MachineFinding("memory", text, "end other programs, or raise the memory limit of the container")


def _files(facts: MachineFacts, tcp_streams: int) -> MachineFinding:
    if facts.most_files is None:
        return MachineFinding("file descriptors", "no limit")
    ranks = max(facts.most_files - DESCRIPTORS_OF_PROGRAM, 0) // (1 + tcp_streams)
    text = f"{facts.most_files} for each process, enough for jobs of {ranks} ranks on several hosts"
    if ranks >= LEAST_RANKS:
        return MachineFinding("file descriptors", text)
    return MachineFinding(
        "file descriptors", text, "raise the hard limit: `ulimit -Hn 65536`, or limits.conf"
    )


def _processes(facts: MachineFacts) -> MachineFinding:
    if facts.most_processes is None:
        return MachineFinding("processes", "no limit")
    text = f"at most {facts.most_processes}, with threads"
    if facts.most_processes >= LEAST_PROCESSES:
        return MachineFinding("processes", text)
    return MachineFinding(
        "processes", text, "raise the limit: `ulimit -u 65536`, or pids.max of the container"
    )


def _huge_pages(facts: MachineFacts) -> Iterator[MachineFinding]:
    if facts.huge_pages is None:
        return
    if facts.huge_pages in ("always", "within_size", "advise"):
        yield MachineFinding("huge pages", f"shared memory has them: {facts.huge_pages}")
        return
    yield MachineFinding(
        "huge pages",
        f"shared memory has none ({facts.huge_pages}), so collectives of 64 MiB and more wait for the page table",
        "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _clock(facts: MachineFacts) -> Iterator[MachineFinding]:
    if facts.clock is None:
        return
    if facts.clock not in SLOW_CLOCKS:
        yield MachineFinding("clock", facts.clock)
        return
    yield MachineFinding(
        "clock",
        f"{facts.clock}, which takes a microsecond or more to read",
        "boot with clocksource=tsc, or ask the provider of the virtual machine for a faster one",
    )


def _buffers(facts: MachineFacts) -> Iterator[MachineFinding]:
    names: Mapping[str, int | None] = {"tcp_rmem": facts.receive_bytes, "tcp_wmem": facts.send_bytes}
    for name, most in names.items():
        if most is None:
            continue
        text = f"net.ipv4.{name} allows {most >> 10} KiB for a connection"
        if most >= LEAST_BUFFER_BYTES:
            yield MachineFinding("TCP buffers", text)
        else:
            remedy = f"as root: sysctl -w net.ipv4.{name}='4096 131072 6291456'"
            yield MachineFinding("TCP buffers", f"{text}: too little for a fast link", remedy)


def _interfaces(facts: MachineFacts) -> Iterator[MachineFinding]:
    if not facts.interfaces:
        yield MachineFinding("network", "no interface is up: jobs run on this machine only")
    for each in facts.interfaces:
        rate = "" if each.megabits_per_s is None else f"{each.megabits_per_s / 1000:g} Gbit/s, "
        text = f"{each.name}: {rate}packets of {each.mtu_bytes} bytes"
        small = each.mtu_bytes < LEAST_MTU
        yield MachineFinding("network", text, f"ip link set {each.name} mtu 1500" if small else "")


def _host_name(facts: MachineFacts) -> Iterator[MachineFinding]:
    if facts.host_addresses is None:
        return
    if not facts.host_addresses:
        yield MachineFinding(
            "host name",
            f"`{facts.host_name}` has no address",
            "add it to /etc/hosts, and name this machine by its address: --rdzv-endpoint ADDRESS:PORT",
        )
        return
    text = f"`{facts.host_name}` is {', '.join(facts.host_addresses)}"
    if not all(each.startswith("127.") or each == "::1" for each in facts.host_addresses):
        yield MachineFinding("host name", text)
        return
    yield MachineFinding(
        "host name",
        f"{text}, which only this machine reaches",
        "for jobs on several hosts, name this machine by its address, or correct /etc/hosts",
    )
