"""An Indexed Job of Kubernetes, from the inside (the place of a Pod) and from the outside (the job's progress). Pure.

The Pods of an Indexed Job are numbered: JOB_COMPLETION_INDEX is 0, 1, 2, ..., and the host name of a Pod is the name of
the Job, a dash and this number. With a headless Service as its subdomain, a Pod has the stable name
`JOB-INDEX.SERVICE.NAMESPACE.svc.DOMAIN`, which its successor inherits. The Pods of a JobSet are named alike.
Kubernetes does not tell a Pod how many others there are.

Each Pod reads its place from these variables and names, and ends with an exit code by which the Job decides whether to
replace it. The process that has submitted the job follows it from what `kubectl get` answers: whose output to show,
what to say, and how the job ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ronde.errors import UsageError
from ronde.launch.agent.decisions import FAILED, UNREACHABLE

__all__ = [
    "CONTAINER",
    "FollowLogs",
    "INDEX",
    "IndexedPod",
    "JobEnded",
    "JobProgress",
    "LOST",
    "REPLACED",
    "Step",
    "Tell",
    "find_pod",
    "pod_exit_code",
]

INDEX = "JOB_COMPLETION_INDEX"
CONTAINER = "ronde"  # the name of each Pod's container
# The exit code of an agent that ended because it has lost the others, and not because of a worker: a new Pod in its
# place may find them. (EX_TEMPFAIL of sysexits.h)
LOST = 75
# Exit codes of Pods that get a successor: also those of killed and ended ones.
REPLACED = (LOST, 128 + 9, 128 + 15)
_SUCCEEDED, _FAILED = ("Complete", "Completed"), ("Failed",)  # conditions of a Job, and of a JobSet
_STARTING = ("ContainerCreating", "PodInitializing")
NO_PODS_NS = 30 * 10**9  # after this time without Pods the user should know


# From the inside: the place of a Pod


@dataclass(frozen=True)
class IndexedPod:
    """One Pod's view of its Job.

    `job`: the Job's name; `index`: the Pod's number in it. `domain`: the Service with its domain, that is what follows
    the host name in the Pod's full name; empty if Pods have no stable names.
    """

    job: str
    index: int
    domain: str

    @property
    def own_host(self) -> str | None:
        """The Pod's own name, None if it has no stable one."""
        return f"{self.job}-{self.index}.{self.domain}" if self.domain else None

    def first_host(self) -> str:
        """Return the name of the Pod with index 0. Raises UsageError if the Pods have no stable names."""
        if not self.domain:
            raise UsageError(
                f"the Pod {self.job}-{self.index} cannot find the first one, because it has no subdomain: add a "
                "headless Service and its name as `subdomain` of the Pods (`ronde run --cluster kubernetes` writes "
                "both), or give --rdzv-endpoint HOST:PORT"
            )
        return f"{self.job}-0.{self.domain}"


def find_pod(environ: Mapping[str, str], host_name: str, full_name: str) -> IndexedPod | None:
    """Return the Pod in which this process runs, None if it is not one of an Indexed Job.

    `host_name`, `full_name`: of this machine, without and with the domain. A process whose host has another name than
    such a Pod, because it runs in the network of its machine (`hostNetwork`), gets a Pod without a domain.
    """
    text = environ.get(INDEX, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        return None
    job, dash, number = host_name.partition(".")[0].rpartition("-")
    if not (dash and number == text):
        return IndexedPod(host_name, int(text), "")
    return IndexedPod(job, int(text), full_name.partition(".")[2])


def pod_exit_code(code: int, is_final: bool) -> int:
    """Return the exit code of the Pod of an agent that ends with `code`.

    `is_final`: the job is over, because a worker has failed, also one that was killed, or because no more nodes may
    come and go. The Job replaces Pods by their exit code, and then none.
    """
    if is_final:
        return FAILED if code in REPLACED else code
    return LOST if code in (FAILED, UNREACHABLE) else code


# From the outside: the progress of the job


@dataclass(frozen=True)
class FollowLogs:
    """Show the output of the Pod, from its beginning to its end."""

    pod: str


@dataclass(frozen=True)
class Tell:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class JobEnded:
    """The job has ended, with this exit code."""

    exit_code: int
    reason: str


Step = FollowLogs | Tell | JobEnded


class JobProgress:
    """What is known of the job. `kind`, `name`: of the object that makes its Pods. `running`: the Pods that run now."""

    def __init__(self, kind: str, name: str) -> None:
        self.running: set[str] = set()
        self._kind, self._name = kind, name
        self._began_ns: int | None = None
        self._was_there = False  # whether an answer had the job in it, or has had the time to
        self._followed: set[str] = set()
        self._told: dict[str, str] = {}
        self._codes: dict[str, tuple[str, int]] = {}  # by Pod: when it ended, and how

    def read(self, now_ns: int, objects: Sequence[Any]) -> list[Step]:
        """Return what follows from the present objects of the job: the one that makes the Pods, and the Pods."""
        self.running = set()
        pods = [each for each in objects if each.get("kind") == "Pod"]
        steps = [step for pod in pods for step in self._read_pod(pod)]
        makers = [each for each in objects if each.get("kind") == self._kind]
        if self._began_ns is None:
            self._began_ns = now_ns
        self._was_there = self._was_there or bool(makers) or now_ns - self._began_ns >= NO_PODS_NS
        if not makers:
            gone = JobEnded(FAILED, f"the {self._kind} has been deleted")
            return [*steps, gone] if self._was_there else steps
        waits = ""
        for condition in makers[0].get("status", {}).get("conditions") or ():
            if condition.get("status") != "True":
                continue
            if condition.get("type") in _SUCCEEDED:
                return [*steps, JobEnded(0, "")]
            if condition.get("type") in _FAILED:
                return [*steps, JobEnded(self._exit_code(), _reason(condition))]
            if condition.get("type") == "Suspended":
                waits = _reason(condition) or "suspended"
        if pods:
            self._began_ns = now_ns
        elif not waits and now_ns - self._began_ns >= NO_PODS_NS:
            waits = f"Kubernetes makes no Pods; kubectl describe {self._kind.lower()}/{self._name} says why"
        return [*steps, *self._tell(self._name, f"the {self._kind} waits", waits)]

    def _read_pod(self, pod: Any) -> list[Step]:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        containers = {each.get("name"): each for each in status.get("containerStatuses") or ()}
        state = containers.get(CONTAINER, {}).get("state", {})
        steps: list[Step] = []
        if ("running" in state or "terminated" in state) and name not in self._followed:
            self._followed.add(name)
            steps.append(FollowLogs(name))
        if "running" in state:
            self.running.add(name)
        if ended := state.get("terminated"):
            self._codes[name] = (ended.get("finishedAt") or "", int(ended.get("exitCode", FAILED)))
        return [*steps, *self._tell(name, f"Pod {name} waits", _trouble(status, state))]

    def _tell(self, name: str, what: str, why: str) -> list[Step]:
        """Return what to tell about an object, unless the user knows it."""
        if why == self._told.get(name, ""):
            return []
        self._told[name] = why
        return [Tell(f"{what}: {why}")] if why else []

    def _exit_code(self) -> int:
        """Return the exit code of the Pod that failed first; of one that was lost only if no other has failed."""
        codes = [code for _, code in sorted(self._codes.values()) if code]
        failures = [code for code in codes if code not in REPLACED]
        losses = [code for code in codes if code != LOST]
        return next(iter([*failures, *losses, FAILED]))


def _reason(condition: Any) -> str:
    return ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))


def _trouble(status: Any, state: Any) -> str:
    """Return why the Pod does not start; empty if it has, or is about to."""
    waiting = state.get("waiting") or {}
    if waiting.get("reason") and waiting["reason"] not in _STARTING:
        return _reason(waiting)
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _reason(condition)
    return ""
