"""The invariants of a job of the soak under all faults. Each check returns its findings as sentences."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tests.soak.faults import Faults, Harm
from tests.soak.job import Agent, Job, Worker, is_alive, marked

FEW_FILES, FILES_OF_WORKER = 80, 10
MOMENT_S = 2.0  # for what is to happen at once, on a busy machine
KILLED = -signal.SIGKILL
ENDED, INTERRUPTED = (128 + signal.SIGTERM, -signal.SIGTERM), (128 + signal.SIGINT, -signal.SIGINT)
LEAVING = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# Of those who lost the store and met elsewhere: docs/rendezvous.md says which of them end.
TOO_FEW = re.compile(r"nodes? of the last round|last round's nodes")
CUT_OFF = "the store has not answered for"  # for long: then a node ends its workers, and others may be told too late
EJECTED = "the others went on without"
CAUSE = re.compile(
    r"^ronde: rank (\d+) \(pid (\d+)\) (?:was killed by (\w+)|failed with exit code (\d+))", re.M
)


def rounds_of(job: Job) -> list[list[Worker]]:
    """The workers of each round that any has seen, by the time at which it began."""
    rounds: dict[str, list[Worker]] = {}
    for worker in job.workers():
        rounds.setdefault(worker.round, []).append(worker)
    return list(rounds.values())


def check_ranks(job: Job) -> Iterator[str]:
    """One round has one assignment of ranks, the same for everybody."""
    for workers in rounds_of(job):
        name = f"round {workers[0].number}"
        for what in ("size", "torchelastic_restart_count", "group_world_size"):
            if len(told := {worker.begins[what] for worker in workers}) > 1:
                yield f"{name}: its workers see different values of {what}: {told}"
        ranks = [worker.begins["rank"] for worker in workers]
        if len(set(ranks)) < len(ranks) or max(ranks) >= workers[0].begins["size"]:
            yield f"{name}: ranks {sorted(ranks)} of {workers[0].begins['size']}"
        by_node = {(worker.agent, worker.begins["group_rank"]) for worker in workers}
        if len({agent for agent, _ in by_node}) < len(by_node) or len({rank for _, rank in by_node}) < len(
            by_node
        ):
            yield f"{name}: group ranks {sorted(by_node)}"
    for worker in job.workers():
        for fact in worker.facts:
            if fact.what == "wrong":
                yield f"worker {worker.pid} got a wrong sum: {fact.facts}"


def check_survivors(job: Job) -> Iterator[str]:
    """From one round to the next a node keeps its group rank if it still exists, and if the others have not lost it."""
    ejected = {agent.name for agent in job.agents if EJECTED in agent.text("err")}
    for before, after in pairwise(rounds_of(job)):
        if before[0].number < 0 or after[0].number != before[0].number + 1:
            continue  # one between them that nobody has seen
        size = int(after[0].begins["group_world_size"])
        was = {worker.agent: int(worker.begins["group_rank"]) for worker in before}
        for worker in after:
            rank = was.get(worker.agent, size)
            if worker.agent not in ejected and rank < size and int(worker.begins["group_rank"]) != rank:
                now = worker.begins["group_rank"]
                yield f"round {worker.number}: {worker.agent} has group rank {now}, and had {rank}"


def check_one_at_a_time(job: Job, faults: Faults) -> Iterator[str]:
    """Workers of a round are gone before those of the next one act, unless their agent cannot know."""
    agents = {agent.name: agent for agent in job.agents}
    rounds = rounds_of(job)
    for before, after in pairwise(rounds):
        began = min(worker.facts[0].at for worker in after)
        for worker in before:
            agent = agents[worker.agent]
            knows = not agent.got(signal.SIGSTOP) and EJECTED not in agent.text("err")
            late = max(worker.acts(), default=0.0) - began
            if late > (MOMENT_S if agent.got(signal.SIGKILL) else 0) and knows:
                yield (
                    f"worker {worker.pid} of {worker.agent} in round {worker.number} acted {late:.3f} s after the "
                    f"beginning of round {after[0].number}"
                )


def check_restarts(job: Job, faults: Faults) -> Iterator[str]:
    """Only failed workers count, and never beyond the budget."""
    failures = sum(harm.code is not None for harm in faults.harms)
    counts = [(worker.number, int(worker.begins["torchelastic_restart_count"])) for worker in job.workers()]
    most = max((count for _, count in counts), default=0)
    if most > job.shape.restarts:
        yield f"{most} restarts, of {job.shape.restarts} allowed"
    if most > failures and not any(CUT_OFF in agent.text("err") for agent in job.agents):
        yield f"{most} restarts, but only {failures} faults of workers"
    for (number, count), (next_number, next_count) in pairwise(counts):
        if 0 <= number < next_number and next_count < count:
            yield f"round {number} has {count} restarts behind it, round {next_number} only {next_count}"


def check_exit_codes(job: Job, faults: Faults) -> Iterator[str]:
    """Everybody ends with 0 unless there is a reason, and then says it."""
    harms = [harm for harm in faults.harms if harm.code is not None]
    may_fail = len(harms) > job.shape.restarts
    interrupted = any(agent.got(signal.SIGINT) for agent in job.agents)
    for agent in job.agents:
        code, err = agent.process.returncode, agent.text("err")
        if _interrupted_at_start(agent):
            continue
        if re.search(r"^Traceback \(most|BUG", err, re.M):
            yield f"{agent.name} shows a traceback of its own"
        if code == 0 or (code == KILLED and agent.got(signal.SIGKILL)):
            continue
        if (code in ENDED and agent.got(signal.SIGTERM)) or (
            code in INTERRUPTED and agent.got(signal.SIGINT)
        ):
            continue
        if interrupted and code == 1 and "interrupted by Ctrl-C" in err:
            continue
        if code in (1, 2) and _came_in_vain(agent, job, interrupted or may_fail):
            continue
        if TOO_FEW.search(err) and any(each.got(*LEAVING) for each in job.agents):
            continue
        if not may_fail:
            yield f"{agent.name} ends with {code}, but {len(harms)} of {job.shape.restarts} restarts were needed"
        else:
            yield from _check_cause(agent, job, harms)


def _interrupted_at_start(agent: Agent) -> bool:
    """Whether a Ctrl-C has ended it while the interpreter started, which shows a traceback then and exits with 1."""
    is_shown = agent.text("err").endswith("\nKeyboardInterrupt\n")
    return agent.got(signal.SIGINT) and agent.process.returncode == 1 and is_shown


def _came_in_vain(agent: Agent, job: Job, may_end: bool) -> bool:
    """Whether it has never had workers, and there is a reason for that, which it says.

    The others' job had ended; or the agent that served the store has gone before anybody had a rank by which to find
    another store.
    """
    workers = job.workers()
    if not agent.text("err") or any(worker.agent == agent.name for worker in workers):
        return False
    return may_end or (job.place.in_agent and any(each.got(*LEAVING) for each in job.agents))


def _check_cause(agent: Agent, job: Job, harms: list[Harm]) -> Iterator[str]:
    """It names a worker that we have harmed, or one that lost such a worker, and ends with its code."""
    found = list(CAUSE.finditer(agent.text("err")))
    if not found:
        yield f"{agent.name} ends with {agent.process.returncode} and names no worker"
        return
    last = found[-1]
    pid = int(last[2])
    code = 128 + getattr(signal, last[3]) if last[3] else int(last[4])
    if code != agent.process.returncode:
        yield f"{agent.name} ends with {agent.process.returncode}, and says: {last[0]}"
    blamed = [harm for harm in harms if harm.pid == pid]
    by_code = [harm for harm in harms if harm.code in (code, -1)]
    if not blamed and not by_code:
        yield f"{agent.name} names a worker that nobody has harmed: {last[0]}"
    elif blamed and code not in {harm.code for harm in blamed}:
        yield f"{agent.name} says what we have not done: {last[0]}"


def check_logs(job: Job) -> Iterator[str]:
    """What a worker has written is where it should be, though it died."""
    if job.shape.full_disk:
        return
    shown: dict[int, int] = {}
    for agent in job.agents:
        _last_said(agent.folder / f"{agent.name}.out", shown)
    agents = {agent.name: agent for agent in job.agents}
    for worker in job.workers():
        said = -1
        for fact in worker.facts:
            if fact.what == "obeys" and fact.facts["order"] == "close":
                break
            if fact.what == "said":
                said = int(fact.facts["count"])
        tees, redirects = "--tee" in job.shape.output, "--redirects" in job.shape.output
        if said < 0 or (not redirects and agents[worker.agent].got(signal.SIGKILL)):
            continue
        written: dict[int, int] = {}
        if redirects or tees:
            _last_said(Path(worker.begins["logs"]) / "stdout.log", written)
            if written.get(worker.pid, -1) < said:
                yield f"worker {worker.pid} has said {said}, its log has {written.get(worker.pid)}"
        if not redirects and shown.get(worker.pid, -1) < said:
            yield f"worker {worker.pid} has said {said}, {worker.agent} has shown {shown.get(worker.pid)}"


def _last_said(path: Path, last: dict[int, int]) -> None:
    """Remember the last number of each worker in the file."""
    try:
        text = path.read_bytes()
    except OSError:
        return
    for match in re.finditer(rb"said (\d+) (\d+)\n", text):
        last[int(match[1])] = max(int(match[2]), last.get(int(match[1]), -1))


def check_remains(job: Job) -> Iterator[str]:
    """When all agents have ended, nothing that came of them is there."""
    deadline = time.monotonic() + MOMENT_S
    while (left := marked(job.mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for seen in left:
        yield f"still there: {seen}"
    while (files := list((job.folder / "tmp").iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    if files:
        yield f"left in the folder for temporary files: {files}"


def check_descriptors(job: Job) -> Iterator[str]:
    """However many rounds there have been, an agent that lives holds no more than what one round needs."""
    for agent in job.living():
        count = len(list(Path(f"/proc/{agent.process.pid}/fd").iterdir()))
        if count > FEW_FILES + agent.slots * FILES_OF_WORKER:
            yield f"{agent.name} has {count} open files"


def check_kills(faults: Faults) -> Iterator[str]:
    """A while after an agent was killed nothing of it is left, also while the others go on."""
    for harm in faults.harms:
        if harm.kills and time.monotonic() > harm.at + MOMENT_S:
            for pid in harm.kills:
                if is_alive(pid):
                    yield f"{pid} still lives {time.monotonic() - harm.at:.1f} s after {harm.agent} was killed"
