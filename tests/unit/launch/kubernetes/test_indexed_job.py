"""What follows from the answers of Kubernetes about a job."""

from __future__ import annotations

from typing import Any

from ronde.launch.kubernetes.indexed_job import FollowLogs, JobEnded, JobProgress, Tell

SECOND = 10**9


def pod(name: str, state: Any = None, **status: Any) -> Any:
    containers = [{"name": "sidecar", "state": {"running": {}}}]
    if state is not None:
        containers.append({"name": "ronde", "state": state})
    return {"kind": "Pod", "metadata": {"name": name}, "status": {"containerStatuses": containers, **status}}


def job(*conditions: Any, kind: str = "Job") -> Any:
    return {"kind": kind, "metadata": {"name": "digits"}, "status": {"conditions": list(conditions)}}


def condition(type: str, status: str = "True", **more: str) -> Any:
    return {"type": type, "status": status, **more}


def ended(code: int, at: str = "2026-01-01T00:00:00Z") -> Any:
    return {"terminated": {"exitCode": code, "finishedAt": at}}


def test_the_output_of_each_pod_is_followed_once_it_runs() -> None:
    progress = JobProgress("Job", "digits")
    assert progress.read(0, [job(), pod("a"), pod("b", {"waiting": {"reason": "ContainerCreating"}})]) == []
    assert progress.read(0, [job(), pod("a", {"running": {}}), pod("b", ended(0))]) == [
        FollowLogs("a"),
        FollowLogs("b"),
    ]
    assert progress.running == {"a"}
    assert progress.read(0, [job(), pod("a", ended(0)), pod("c", {"running": {}})]) == [FollowLogs("c")]
    assert progress.running == {"c"}


def test_what_keeps_a_pod_from_starting_is_told_once() -> None:
    progress = JobProgress("Job", "digits")
    full = condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes have a GPU")
    waits = [job(), pod("a", conditions=[full])]
    assert progress.read(0, waits) == [Tell("Pod a waits: Unschedulable: 0/3 nodes have a GPU")]
    assert progress.read(0, waits) == []
    pull = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    scheduled = [condition("PodScheduled")]
    assert progress.read(0, [job(), pod("a", pull, conditions=scheduled)]) == [
        Tell("Pod a waits: ImagePullBackOff: no such image")
    ]
    assert progress.read(0, [job(), pod("a", {"running": {}}, conditions=scheduled)]) == [FollowLogs("a")]


def test_a_job_ends_with_the_exit_code_of_the_pod_that_failed_first() -> None:
    assert JobProgress("Job", "digits").read(0, [job(condition("Complete"))]) == [JobEnded(0, "")]
    assert JobProgress("JobSet", "digits").read(0, [job(condition("Completed"), kind="JobSet")]) == [
        JobEnded(0, "")
    ]
    progress = JobProgress("Job", "digits")
    lost, killed = pod("a", ended(75, "2026-01-01T00:00:01Z")), pod("d", ended(137))
    first, second = pod("b", ended(3, "2026-01-01T00:00:02Z")), pod("c", ended(4, "2026-01-01T00:00:03Z"))
    progress.read(0, [job(condition("FailureTarget")), lost, killed, second, first])
    why = condition("Failed", reason="PodFailurePolicy", message="exit code 3")
    assert progress.read(0, [job(condition("Complete", "False"), why)]) == [
        JobEnded(3, "PodFailurePolicy: exit code 3")
    ]
    assert JobProgress("Job", "digits").read(0, [job(why), lost])[-1] == JobEnded(
        1, "PodFailurePolicy: exit code 3"
    )
    reading = JobProgress("Job", "digits").read(0, [job(why), lost, killed])
    assert reading[-1] == JobEnded(137, "PodFailurePolicy: exit code 3")


def test_a_job_that_is_gone_has_been_deleted() -> None:
    deleted = JobEnded(1, "the Job has been deleted")
    progress = JobProgress("Job", "digits")
    assert progress.read(0, []) == []  # it may not be there yet
    assert progress.read(SECOND, [job()]) == []
    assert progress.read(2 * SECOND, []) == [deleted]
    never_there = JobProgress("Job", "digits")
    assert never_there.read(0, []) == []
    assert never_there.read(31 * SECOND, []) == [deleted]


def test_a_job_without_pods_is_explained() -> None:
    progress = JobProgress("Job", "digits")
    assert progress.read(0, [job()]) == progress.read(29 * SECOND, [job()]) == []
    said = "the Job waits: Kubernetes makes no Pods; kubectl describe job/digits says why"
    assert progress.read(31 * SECOND, [job()]) == [Tell(said)]
    assert progress.read(33 * SECOND, [job()]) == []
    in_a_queue = job(condition("Suspended", reason="JobSuspended", message="Job suspended"))
    assert JobProgress("Job", "digits").read(0, [in_a_queue]) == [
        Tell("the Job waits: JobSuspended: Job suspended")
    ]
