"""The objects of Kubernetes that make up a job: an Indexed Job or a JobSet, its Service and its Secret. Pure.

Every Pod runs `ronde run`, which finds its place from what Kubernetes tells the Pods of an Indexed Job
(`launch/kubernetes/indexed_job`), so the job does not need the machine that has submitted it. The agents in the Pods
start failed workers again, as often as --max-restarts says. The Job only replaces Pods:

- without limit those that Kubernetes has evicted or preempted (condition DisruptionTarget);
- a few times those that were killed or have lost the others;
- never one whose workers have failed for good, or whose job is over because Pods have come and gone too often
  (--reset-limit), which ends the Job.

`patch_manifest` merges a user's fields into the objects, because Kubernetes has more fields than there are options.
Mappings are merged. Lists whose items have names, such as containers and variables, are merged by name; any other list
is replaced. `null` removes a field. The kind Pod stands for the template of the job's Pods.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ronde.errors import UsageError
from ronde.launch.kubernetes.indexed_job import CONTAINER, REPLACED

if TYPE_CHECKING:
    from ronde.job_key import JobKey

__all__ = [
    "JOB",
    "JOB_SET",
    "KEY_FILE",
    "Manifest",
    "PodJob",
    "build_manifest",
    "patch_manifest",
    "selector",
]

Object = dict[str, Any]
Manifest = list[Object]
JOB, JOB_SET = "Job", "JobSet"  # the kinds of the object that makes Pods
KEY_FILE = "/run/ronde/job.key"
REPLICATED = "workers"  # the one replicated Job of a JobSet
REPLACEMENTS = 3  # of the Pod of each index; also how often a JobSet starts again
KEPT_S = 24 * 3600  # how long a finished job stays, with its logs
LONGEST_NAME = 63  # of a host (RFC 1123)
OWN_GROUP = "app.kubernetes.io/instance"
# The lists whose items have names, and the field with the name.
_NAMED = {
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "replicatedJobs": "name",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
_OF_POD = {"apiVersion", "kind"}


@dataclass(frozen=True)
class PodJob:
    """A job of `least` to `most` Pods.

    `kind`: JOB or JOB_SET. `command`: what each Pod's container runs, word by word. `namespace`: empty for the one that
    kubectl chooses. `gpus`: NVIDIA GPUs of each Pod; `cpus`, `memory`, `shared_memory`: quantities of Kubernetes for
    each Pod, empty for its defaults. `variables`: variables of the container, whose values are secrets.
    `grace_s`: how long a Pod that is deleted may take to end.
    """

    name: str
    image: str
    command: tuple[str, ...]
    least: int
    most: int
    key: JobKey
    kind: str = JOB
    namespace: str = ""
    gpus: int = 0
    cpus: str = ""
    memory: str = ""
    shared_memory: str = ""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    grace_s: int = 45


def selector(name: str) -> str:
    """Return the selector of the labels that all objects of the job have."""
    return f"{OWN_GROUP}={name}"


def build_manifest(job: PodJob) -> Manifest:
    """Return the objects of the job; the first one makes the Pods. Raises UsageError if the name is too long."""
    _check_name(job)
    if job.kind == JOB_SET:  # which makes the Service
        return [_job_set(job), _secret(job)]
    return [_job(job), _service(job), _secret(job)]


def _check_name(job: PodJob) -> None:
    added = f"-{REPLICATED}-0-{job.most - 1}-12345" if job.kind == JOB_SET else f"-{job.most - 1}"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name):
        raise UsageError(
            f"the job's name {job.name!r} is invalid, because Pods get it as a host name (RFC 1123): expected "
            "lowercase letters, digits and dashes, a letter first and no dash last"
        )
    if len(job.name) > (longest := LONGEST_NAME - len(added)):
        raise UsageError(
            f"the job's name {job.name!r} has {len(job.name)} characters, too many for the host names of {job.most} "
            f"Pods: expected at most {longest}"
        )


def _object(job: PodJob, version: str, kind: str) -> Object:
    namespace = {"namespace": job.namespace} if job.namespace else {}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": job.name, **namespace, "labels": _labels(job)},
    }


def _labels(job: PodJob) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "ronde",
        OWN_GROUP: job.name,
        "app.kubernetes.io/managed-by": "ronde",
    }


def _secret(job: PodJob) -> Object:
    values = {"job.key": job.key.hex(), **job.variables}
    return {**_object(job, "v1", "Secret"), "type": "Opaque", "immutable": True, "stringData": values}


def _service(job: PodJob) -> Object:
    """Return the headless Service that gives each Pod a name, also before the Pod is ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {OWN_GROUP: job.name}}
    return {**_object(job, "v1", "Service"), "spec": spec}


def _job(job: PodJob) -> Object:
    spec = _job_spec(job)
    spec["ttlSecondsAfterFinished"] = KEPT_S
    spec["template"]["spec"]["subdomain"] = job.name
    return {**_object(job, "batch/v1", JOB), "spec": spec}


def _job_set(job: PodJob) -> Object:
    workers = {"name": REPLICATED, "replicas": 1, "template": {"spec": _job_spec(job)}}
    final = {"name": "workerFailed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": REPLACEMENTS, "rules": [final]},
        "ttlSecondsAfterFinished": KEPT_S,
        "replicatedJobs": [workers],
    }
    return {**_object(job, "jobset.x-k8s.io/v1alpha2", JOB_SET), "spec": spec}


def _job_spec(job: PodJob) -> Object:
    disrupted = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    failed = {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": CONTAINER,
            "operator": "NotIn",
            "values": sorted(REPLACED),  # in another order they would be refused
        },
    }
    # As soon as one Pod of an elastic job succeeds, all its workers have; those that wait for room are not needed.
    elastic = {"successPolicy": {"rules": [{"succeededCount": 1}]}} if job.least < job.most else {}
    return {
        "completionMode": "Indexed",
        "completions": job.most,
        "parallelism": job.most,
        "backoffLimitPerIndex": REPLACEMENTS,
        "maxFailedIndexes": job.most - job.least,
        "podFailurePolicy": {"rules": [disrupted, failed]},
        **elastic,
        "template": {"metadata": {"labels": _labels(job)}, "spec": _pod_spec(job)},
    }


def _pod_spec(job: PodJob) -> Object:
    size = {"sizeLimit": job.shared_memory} if job.shared_memory else {}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # variables named after Services, like RONDE_PORT, would be taken for settings
        "containers": [_container(job)],
        "volumes": [
            {
                "name": "job-key",
                "secret": {
                    "secretName": job.name,
                    "defaultMode": 0o400,
                    "items": [{"key": "job.key", "path": "job.key"}],
                },
            },
            {"name": "shm", "emptyDir": {"medium": "Memory", **size}},
        ],
    }


def _container(job: PodJob) -> Object:
    variables = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": name}}}
        for name in sorted(job.variables)
    ]
    return {
        "name": CONTAINER,
        "image": job.image,
        # Kubernetes replaces $(NAME) by a variable, and $$ by $.
        "command": [word.replace("$", "$$") for word in job.command],
        "env": [{"name": "RONDE_JOB_KEY_FILE", "value": KEY_FILE}, *variables],
        "resources": _resources(job),
        "volumeMounts": [
            {"name": "job-key", "mountPath": KEY_FILE.rpartition("/")[0], "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _resources(job: PodJob) -> Object:
    """Return the resources of the container. A limit of processor time would only slow the job down."""
    requests = {"cpu": job.cpus} if job.cpus else {}
    limits = {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    if job.memory:
        requests["memory"] = limits["memory"] = job.memory
    return {name: amounts for name, amounts in (("requests", requests), ("limits", limits)) if amounts}


# The user's patches


def patch_manifest(manifest: Manifest, patches: Sequence[Any], origin: str) -> Manifest:
    """Return the objects with the fields of the patches. `origin` names the file of the patches.

    Raises UsageError for a patch without a kind, or of a kind that is not in the manifest.
    """
    for patch in patches:
        kinds = ["Pod", *(each["kind"] for each in manifest)]
        kind = patch.get("kind") if isinstance(patch, dict) else None
        if kind not in kinds:
            raise UsageError(
                f"{origin}: kind {kind!r} is invalid: each document needs one of the kinds {', '.join(kinds)}, and the "
                "fields to add to it"
            )
        if kind == "Pod":
            kind = manifest[0]["kind"]
            fields = {name: value for name, value in patch.items() if name not in _OF_POD}
            patch = _around_pod(kind, fields, manifest)
        manifest = [_merge(each, patch) if each["kind"] == kind else each for each in manifest]
    return manifest


def _around_pod(kind: str, template: Any, manifest: Manifest) -> Any:
    """Return the patch of the Job or JobSet that changes the template of its Pods."""
    of_job = {"spec": {"template": template}}
    if kind == JOB:
        return of_job
    assert kind == JOB_SET
    name = manifest[0]["spec"]["replicatedJobs"][0]["name"]
    return {"spec": {"replicatedJobs": [{"name": name, "template": of_job}]}}


def _merge(base: Any, patch: Any, field: str = "") -> Any:
    if isinstance(patch, dict):
        merged = dict(base) if isinstance(base, dict) else {}
        for name, value in patch.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = _merge(merged.get(name), value, name)
        return merged
    name_field = _NAMED.get(field, "")
    if isinstance(patch, list) and isinstance(base, list) and _are_named(patch, name_field):
        merged_items = {item[name_field]: item for item in base}
        for item in patch:
            name = item[name_field]
            merged_items[name] = _merge(merged_items.get(name), item)
        return list(merged_items.values())
    return patch


def _are_named(items: list[Any], name_field: str) -> bool:
    return bool(name_field) and all(isinstance(item, dict) and name_field in item for item in items)
