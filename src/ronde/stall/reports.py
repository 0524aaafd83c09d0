"""Writes the texts about a stall: the warning, the error of an abort, and readable stacks. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ronde.stall.inspector import JOIN, MOST_STACKS, Stall, StalledTensor, Tensor

__all__ = [
    "CALLS",
    "MOST_FRAMES",
    "TENSORS",
    "Subject",
    "abort_reason",
    "describe_stall",
    "ranks_text",
    "readable_stacks",
]

MOST_FRAMES = 30  # of a thread, the innermost
_MOST_NAMES = 12
_NAME_LENGTH = 60
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])?.*:$")


class Subject(NamedTuple):
    """The words for stalled operations. `where`: the communicator, if a report names it."""

    noun: str
    done: str
    complete: str  # a possible cause when all ranks have submitted it
    where: str = ""

    def name(self, tensor: Tensor) -> str:
        """Return the name of an operation in a report."""
        if tensor.kind == JOIN:
            return tensor.name
        if self.noun == "tensor":
            return f"'{_short(tensor.name)}' ({tensor.kind})"
        return f"{tensor.kind} on {self.where}: {tensor.name}"


TENSORS = Subject("tensor", "submitted", "it is being executed, or waits for others of its group")
CALLS = Subject("call", "begun", "its data are still in transit")


def describe_stall(
    stall: Stall,
    hosts: Mapping[int, str],
    states: Mapping[int, str],
    subject: Subject = TENSORS,
    here: Sequence[str] = (),
    shutdown_ns: int = 0,
) -> str:
    """Return the warning, of several lines.

    `hosts`: by rank. `states`: of silent ranks' processes, if known. `here`: the lines where this rank waits.
    `shutdown_ns`: when Ronde aborts the operation, 0: never.
    """
    lines = [_headline(stall, subject)]
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[StalledTensor]] = {}
    for waiting in stall.tensors:
        groups.setdefault((waiting.submitted, waiting.missing), []).append(waiting)
    for (submitted, missing), members in groups.items():
        lines.append(f"  {_names(members, subject)}")
        done = "called" if members[0].tensor.kind == JOIN else subject.done
        if missing or stall.silent:
            not_by = f", not by {ranks_text(missing)}" if missing else ""
            lines.append(f"    {done} by {ranks_text(submitted)}{not_by}")
        else:
            why = "" if stall.behind else f": {subject.complete}"
            lines.append(f"    {done} by all ranks{why}")
    lines += [f"this rank waits here: {place}" for place in here]
    if stall.circle:
        lines.append(_circle(stall.circle))
    for rank in stall.silent[:MOST_STACKS]:
        state = states.get(rank) or "its process is probably stopped"
        lines.append(f"rank {rank} on {hosts[rank]} does not answer: {state}")
    for rank in stall.culprits[:MOST_STACKS]:
        lines += _stacks_of(stall, rank, hosts[rank])
    if others := (*stall.silent[MOST_STACKS:], *stall.culprits[MOST_STACKS:]):
        lines.append(f"and {len(others)} more")
    return "\n".join([*lines, _outlook(stall, shutdown_ns)])


def _headline(stall: Stall, subject: Subject) -> str:
    count, age = len(stall.tensors), _seconds(stall.age_ns)
    if all(waiting.tensor.kind == JOIN for waiting in stall.tensors):
        return f"stalled: the engine has run nothing for {age}, and join() waits for the other ranks to join"
    have = "has" if count == 1 else "have"
    return f"stalled: {_counted(count, subject.noun)} {have} been waiting for {age}"


def _circle(circle: Sequence[int]) -> str:
    """Return the line about ranks that wait for each other, of which this rank is the first."""
    if len(circle) == 2:
        return f"rank {circle[1]} waits for this rank, too: a deadlock, unless another thread of either rank continues"
    links = ", ".join(
        f"rank {rank} for rank {other}" for rank, other in zip(circle, (*circle[1:], circle[0]))
    )
    return f"ranks wait in a circle, {links}: a deadlock, unless another thread of one of them continues"


def _outlook(stall: Stall, shutdown_ns: int) -> str:
    """Return the line about what Ronde does next, and what the user can do."""
    is_repeated = stall.next_ns and not 0 < shutdown_ns <= stall.next_ns
    again = f"the next report follows after {_seconds(stall.next_ns)}; " if is_repeated else ""
    if shutdown_ns:
        return f"{again}stall_shutdown aborts waiting operations after {_seconds(shutdown_ns)}"
    return f"{again}to end such jobs, set RONDE_STALL_SHUTDOWN to a number of seconds"


def abort_reason(stall: Stall, hosts: Mapping[int, str], limit_ns: int, subject: Subject = TENSORS) -> str:
    """Return the report in one sentence, short enough for the message that aborts all ranks."""
    culprits = (*stall.culprits, *stall.silent)
    who = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in culprits[:3])
    if len(culprits) > 3:
        who += f" and {len(culprits) - 3} more"
    first = stall.tensors[0].tensor
    which = subject.name(first)
    if subject.noun == "tensor" and first.kind != JOIN:
        which = f"tensor {which}"
    if len(stall.tensors) > 1:
        which += f" and {len(stall.tensors) - 1} more"
    reason = f"waited for {who}" if who else f"all ranks have {subject.done} it"
    return f"stalled for {_seconds(stall.age_ns)} (stall_shutdown is {_seconds(limit_ns)}): {which}: {reason}"


def readable_stacks(raw: str) -> str:
    """Return the stacks that faulthandler has written, the main thread first, without Ronde's own threads.

    `raw` begins with a line of ours: the ids of the main thread and of Ronde's own threads, in hexadecimal.
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


def _stacks_of(stall: Stall, rank: int, host: str) -> list[str]:
    """Return the lines about the state of a rank and its stacks."""
    who = f"rank {rank} on {host}"
    lines = []
    if rank in stall.behind:
        lines.append(
            f"{who} holds up the engine: the other ranks are ahead and wait for it; perhaps a call of its program "
            "keeps the interpreter's lock (GIL)"
        )
    if state := stall.states.get(rank):
        lines.append(f"{who} {state}")
    text = stall.stacks.get(rank, "")
    if not text:
        return [*lines, f"{who} does not send its stacks"]
    return [*lines, f"{who} is here (most recent call first):", *(f"  {line}" for line in text.splitlines())]


def _names(members: Sequence[StalledTensor], subject: Subject) -> str:
    shown = [subject.name(each.tensor) for each in members[:_MOST_NAMES]]
    rest = len(members) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 3] + "..."


def _counted(count: int, noun: str) -> str:
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:.3g} s" if ns < 10**9 else f"{ns / 1e9:.0f} s"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0-2, 5" or "no rank"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}" if ranks else "no rank"
