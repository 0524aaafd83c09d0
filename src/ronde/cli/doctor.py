"""`ronde doctor`: what holds this machine back, and what helps."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ronde.cli import show
from ronde.cli.machine_check import MachineFacts, MachineFinding, NetworkInterface, check_machine
from ronde.cli.options import Option, describe_options, parse_options
from ronde.environment import environment
from ronde.errors import UsageError
from ronde.process.resources import available_memory, usable_core_numbers
from ronde.settings import resolve

__all__ = ["HELP", "read_facts", "run"]

OPTIONS = (
    Option("output", ("--json",), "print the findings as a JSON list of objects: subject, text, remedy"),
    Option("information", ("-h", "--help"), "print this help"),
)

HELP = f"""\
usage: ronde doctor [--json]

Checks this machine for what slows ranks down or limits a job, and prints the remedy. It changes
nothing. For every host of a job:

    ronde run -H a,b --no-python ronde doctor

Whether hosts reach each other is checked at the start of every job, which names what fails.
{describe_options(OPTIONS)}"""


def run(argv: Sequence[str]) -> int:
    """Run the words after `ronde doctor` and return the exit code. Raises UsageError."""
    values, rest = parse_options(list(argv), OPTIONS)
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}: usage: ronde doctor [--json]")
    if "--help" in values:
        show(HELP)
        return 0
    findings = check_machine(read_facts(), resolve(environment()).tcp_streams)
    if "--json" in values:
        rows = [
            {"subject": each.subject, "text": each.text, "remedy": each.remedy or None} for each in findings
        ]
        show(json.dumps(rows, indent=2) + "\n")
    else:
        show("".join(_lines(each) for each in findings))
    return 0


def _lines(finding: MachineFinding) -> str:
    mark = "!" if finding.remedy else " "
    lines = f"{mark} {finding.subject + ':':<18}{finding.text}\n"
    return lines + (f"{'':20}-> {finding.remedy}\n" if finding.remedy else "")


RESOLVER_S = 3.0


def read_facts(root: Path = Path("/")) -> MachineFacts:
    """Return the facts. `root`: of the file system. A fact that cannot be read is None."""
    cores = len(usable_core_numbers())
    name = socket.gethostname()
    return MachineFacts(
        cores=cores,
        core_quota=min(_core_quotas(root), default=None),
        load=os.getloadavg()[0],
        available_bytes=available_memory(root),
        most_files=_limit(resource.RLIMIT_NOFILE),
        most_processes=min(_process_limits(root), default=None),
        huge_pages=_chosen(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        clock=_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        receive_bytes=_last_number(root / "proc/sys/net/ipv4/tcp_rmem"),
        send_bytes=_last_number(root / "proc/sys/net/ipv4/tcp_wmem"),
        interfaces=tuple(_interfaces(root)),
        host_name=name,
        host_addresses=_addresses_of(name),
    )


def _text(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text().strip() or None
    return None


def _chosen(path: Path) -> str | None:
    """Return the word in brackets, of a file such as `always [never]`."""
    words = (_text(path) or "").split()
    return next((word[1:-1] for word in words if word.startswith("[")), None)


def _last_number(path: Path) -> int | None:
    words = (_text(path) or "").split()
    return int(words[-1]) if words and words[-1].isdigit() else None


def _limit(kind: int) -> int | None:
    _, hard = resource.getrlimit(kind)
    return None if hard == resource.RLIM_INFINITY else hard


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group (version 2) and of those above it."""
    top = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            own = top / line[3:].strip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _core_quotas(root: Path) -> Iterator[float]:
    for folder in _control_groups(root):
        words = (_text(folder / "cpu.max") or "max").split()
        if len(words) == 2 and words[0] != "max":
            yield int(words[0]) / int(words[1])


def _process_limits(root: Path) -> Iterator[int]:
    if os.geteuid() != 0 and (limit := _limit(resource.RLIMIT_NPROC)) is not None:  # does not bind root
        yield limit
    for folder in _control_groups(root):
        if (text := _text(folder / "pids.max")) and text != "max":
            yield int(text)


def _interfaces(root: Path) -> Iterator[NetworkInterface]:
    with suppress(OSError):
        for folder in sorted((root / "sys/class/net").iterdir()):
            if folder.name == "lo" or _text(folder / "operstate") != "up":
                continue
            speed = _last_number(folder / "speed")  # -1, or an error, where there is none
            yield NetworkInterface(folder.name, _last_number(folder / "mtu") or 0, speed or None)


def _addresses_of(name: str) -> tuple[str, ...] | None:
    """Return what the resolver finds; None if it takes too long."""
    found: list[tuple[str, ...]] = []

    def resolve() -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError:
            found.append(())
        else:
            found.append(tuple(sorted({str(answer[4][0]) for answer in answers})))

    thread = threading.Thread(target=resolve, daemon=True, name="resolver")
    thread.start()
    thread.join(RESOLVER_S)
    return found[0] if found else None
