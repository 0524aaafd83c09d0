"""How a stall is told: the warning, the error of an abort, and stacks as people can read them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ronde.core.stall import MOST_STACKS, Stall, Waiting

__all__ = ["MOST_FRAMES", "abort_reason", "describe", "readable_stacks"]

MOST_FRAMES = 30  # of a thread, the innermost
_MOST_NAMES = 12
_NAME_LENGTH = 60
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])?.*:$")


def describe(stall: Stall, hosts: Mapping[int, str], states: Mapping[int, str]) -> str:
    """Return the warning, of several lines. `hosts`: by rank; `states`: what is known of silent ranks' processes."""
    count = len(stall.tensors)
    what = f"{_tensors(count)} {'has' if count == 1 else 'have'} been waiting for {_seconds(stall.age_ns)}"
    lines = [f"stalled: {what}"]
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Waiting]] = {}
    for waiting in stall.tensors:
        groups.setdefault((waiting.submitted, waiting.missing), []).append(waiting)
    for (submitted, missing), members in groups.items():
        lines.append(f"  {_names(members)}")
        if missing or stall.silent:
            not_by = f", not by {_ranks(missing)}" if missing else ""
            lines.append(f"    submitted by {_ranks(submitted)}{not_by}")
        else:
            why = "" if stall.behind else ": it is being executed, or waits for others of its group"
            lines.append(f"    submitted by all ranks{why}")
    for rank in stall.silent[:MOST_STACKS]:
        state = states.get(rank) or "its process must be stopped"
        lines.append(f"rank {rank} on {hosts[rank]} does not answer: {state}")
    for rank in stall.culprits[:MOST_STACKS]:
        lines += _place(stall, rank, hosts[rank])
    if others := (*stall.silent[MOST_STACKS:], *stall.culprits[MOST_STACKS:]):
        lines.append(f"and {len(others)} more")
    return "\n".join(lines)


def abort_reason(stall: Stall, hosts: Mapping[int, str], limit_ns: int) -> str:
    """Return the same in one sentence, which fits into the message that tells it to all ranks."""
    culprits = (*stall.culprits, *stall.silent)
    who = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in culprits[:3])
    if len(culprits) > 3:
        who += f" and {len(culprits) - 3} more"
    first = stall.tensors[0].tensor
    which = f"'{_short(first.name)}' ({first.kind})"
    if len(stall.tensors) > 1:
        which += f" and {len(stall.tensors) - 1} more"
    reason = f"waited for {who}" if who else "all ranks have submitted it"
    return f"stalled for {_seconds(stall.age_ns)} (stall_shutdown is {_seconds(limit_ns)}): tensor {which}: {reason}"


def readable_stacks(raw: str) -> str:
    """Return what faulthandler has written, the main thread first and Ronde's own threads left out.

    Its first line is ours: the ids of the main thread and of our own threads, in hexadecimal.
    """
    preface, _, dump = raw.partition("\n")
    main, *own = preface.split()
    threads: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in dump.splitlines():
        if match := _THREAD.match(line):
            ident = hex(int(match[1], 16))
            lines = ["main thread:" if ident == main else f"thread {match[2] or ident}:"]
            threads[ident] = lines
        elif line.strip() and 0 < len(lines) <= MOST_FRAMES:
            lines.append(line)
    shown = {ident: text for ident, text in threads.items() if ident not in own}
    ordered = sorted(shown.items(), key=lambda item: item[0] != main)
    return "\n".join(line for _, text in ordered for line in text)


def _place(stall: Stall, rank: int, host: str) -> list[str]:
    """Where a rank is, as lines."""
    who = f"rank {rank} on {host}"
    lines = []
    if rank in stall.behind:
        lines.append(
            f"{who} holds up the engine: the others have gone on and wait for it; perhaps a call of its program keeps "
            "the interpreter's lock (GIL)"
        )
    text = stall.stacks.get(rank, "")
    if not text:
        return [*lines, f"{who} does not tell where it is"]
    return [*lines, f"{who} is here (most recent call first):", *(f"  {line}" for line in text.splitlines())]


def _names(members: Sequence[Waiting]) -> str:
    shown = [f"'{_short(each.tensor.name)}' ({each.tensor.kind})" for each in members[:_MOST_NAMES]]
    rest = len(members) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 3] + "..."


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3g} s" if ns < 10**9 else f"{ns / 1e9:.0f} s"


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}" if ranks else "nobody"
