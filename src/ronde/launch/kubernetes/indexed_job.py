"""A Pod of an Indexed Job of Kubernetes, read from the variables and the names that Kubernetes gives it. Pure.

The Pods of an Indexed Job are numbered: JOB_COMPLETION_INDEX is 0, 1, 2, ..., and the host name of a Pod is the name of
the Job, a dash and this number. With a headless Service as its subdomain, a Pod has the stable name
`JOB-INDEX.SERVICE.NAMESPACE.svc.DOMAIN`, which its successor inherits. The Pods of a JobSet are named alike.
Kubernetes does not tell a Pod how many others there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ronde.errors import UsageError
from ronde.launch.agent.decisions import FAILED, UNREACHABLE

__all__ = ["INDEX", "LOST", "REPLACED", "IndexedPod", "find_pod", "pod_exit_code"]

INDEX = "JOB_COMPLETION_INDEX"
# The exit code of an agent that ended because it has lost the others, and not because of a worker: a new Pod in its
# place may find them. (EX_TEMPFAIL of sysexits.h)
LOST = 75
# Exit codes of Pods that get a successor: also those of killed and ended ones.
REPLACED = (LOST, 128 + 9, 128 + 15)


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
