"""The manifest of a job on Kubernetes: valid for the API of several versions, and what a reader of it relies on."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.launch.kubernetes.manifest import JOB_SET, Manifest, PodJob, build_manifest, patch_manifest

VERSIONS = ("1.31", "1.34", "1.37")
KEY = JobKey.generate()
JOB = PodJob(
    name="digits",
    image="lab/train:1",
    command=("ronde", "run", "--nnodes", "4", "train.py", "$HOME", "$(HOME)"),
    least=4,
    most=4,
    key=KEY,
    namespace="lab",
    gpus=8,
    cpus="64",
    memory="512Gi",
    shared_memory="64Gi",
    variables={"TOKEN": "hidden"},
)
JOBS = {
    "fixed": JOB,
    "elastic": replace(JOB, least=2),
    "small": PodJob("digits", "lab/train:1", ("ronde", "run", "train.py"), 1, 1, KEY),
}


def pod_of(manifest: Manifest) -> Any:
    return manifest[0]["spec"]["template"]["spec"]


def check(manifest: Manifest, version: str) -> None:
    """Raise an error where the objects do not fit the API; unknown fields are an error."""
    validate = pytest.importorskip("kubernetes_validate").validate
    for each in manifest:
        validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("job", JOBS.values(), ids=list(JOBS))
def test_the_manifest_fits_the_schema(job: PodJob, version: str) -> None:
    check(build_manifest(job), version)


def test_the_check_finds_what_does_not_fit() -> None:
    validation_error = pytest.importorskip("kubernetes_validate").ValidationError
    misspelt = build_manifest(JOB)
    misspelt[0]["spec"]["completion"] = 4
    with pytest.raises(validation_error, match="completion"):
        check(misspelt, VERSIONS[0])


# The fields of a JobSet (jobset.x-k8s.io/v1alpha2) that are used, each with its type or its own fields.
JOB_SET_FIELDS = {
    "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "failurePolicy": {
        "maxRestarts": int,
        "rules": {"name": str, "action": str, "onJobFailureReasons": str},
    },
    "ttlSecondsAfterFinished": int,
    "replicatedJobs": {"name": str, "replicas": int, "template": {"spec": dict}},
}


def fits(value: Any, fields: Any) -> bool:
    """Whether a value has such fields, and no others; of a list, whether each item has."""
    if isinstance(value, list):
        return all(fits(item, fields) for item in value)
    if isinstance(fields, dict) and isinstance(value, dict):
        return value.keys() <= fields.keys() and all(fits(value[name], fields[name]) for name in value)
    return isinstance(fields, type) and isinstance(value, fields)


def test_a_job_set_contains_a_job_that_fits() -> None:
    job_set, secret = build_manifest(replace(JOB, kind=JOB_SET))
    assert (job_set["apiVersion"], job_set["kind"], secret["kind"]) == (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        "Secret",
    )
    assert fits(job_set["spec"], JOB_SET_FIELDS)
    assert not fits({**job_set["spec"], "replicas": 1}, JOB_SET_FIELDS)
    template = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    # The JobSet makes the Service of this name, and gives it to the Pods.
    assert job_set["spec"]["network"]["subdomain"] == "digits"
    check([{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": template}], "1.34")


def test_the_key_and_variables_are_in_the_secret_alone() -> None:
    job, service, secret = build_manifest(JOB)
    assert secret["stringData"] == {"job.key": KEY.hex(), "TOKEN": "hidden"}
    for each in (job, service):
        assert KEY.hex() not in str(each)
        assert "hidden" not in str(each)
    volume = next(each for each in pod_of([job])["volumes"] if each["name"] == "job-key")
    assert volume["secret"]["defaultMode"] == 0o400
    assert [item["key"] for item in volume["secret"]["items"]] == ["job.key"]
    assert KEY.hex() not in repr(JOB)
    assert "hidden" not in repr(JOB)


def test_kubernetes_leaves_the_dollars_of_arguments() -> None:
    container = pod_of(build_manifest(JOB))["containers"][0]
    assert container["command"][-2:] == ["$$HOME", "$$(HOME)"]


def test_pods_are_replaced_but_not_if_a_worker_has_failed() -> None:
    spec = build_manifest(JOB)[0]["spec"]
    ignore, fail = spec["podFailurePolicy"]["rules"]
    assert (ignore["action"], ignore["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (fail["action"], fail["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    assert fail["onExitCodes"]["values"] == [75, 137, 143]
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (3, 0)
    assert "successPolicy" not in spec
    elastic = build_manifest(replace(JOB, least=2))[0]["spec"]
    assert elastic["maxFailedIndexes"] == 2
    assert elastic["successPolicy"] == {"rules": [{"succeededCount": 1}]}


@pytest.mark.parametrize("name", ["Digits", "-digits", "digits-", "1digits", "di_gits", "a.b", ""])
def test_names_that_no_host_can_have_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"the job's name .* is invalid.*RFC 1123"):
        build_manifest(replace(JOB, name=name))


def test_names_leave_room_for_the_numbers_of_pods() -> None:
    build_manifest(replace(JOB, name="d" * 61))
    with pytest.raises(UsageError, match=r"has 62 characters.*at most 61"):
        build_manifest(replace(JOB, name="d" * 62))
    with pytest.raises(UsageError, match="at most 45"):
        build_manifest(replace(JOB, name="d" * 62, kind=JOB_SET))


# Patches


def test_a_patch_adds_what_has_no_option() -> None:
    before = build_manifest(JOB)
    untouched = copy.deepcopy(before)
    pod = {
        "kind": "Pod",
        "metadata": {"annotations": {"team": "vision"}},
        "spec": {
            "nodeSelector": {"gpu": "h200"},
            "terminationGracePeriodSeconds": None,
            "containers": [
                {
                    "name": "ronde",
                    "imagePullPolicy": "Always",
                    "env": [{"name": "HF_HOME", "value": "/data/hf"}],
                    "volumeMounts": [{"mountPath": "/data", "name": "data"}],
                },
                {"name": "sidecar", "image": "lab/sidecar"},
            ],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        },
    }
    queue = {"kind": "Job", "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "lab"}}}
    after = patch_manifest(before, [pod, queue], "pods.yaml")
    assert before == untouched
    check(after, "1.34")
    assert after[0]["metadata"]["labels"].keys() > before[0]["metadata"]["labels"].keys()
    assert after[0]["spec"]["template"]["metadata"]["annotations"] == {"team": "vision"}
    spec = pod_of(after)
    assert "terminationGracePeriodSeconds" not in spec
    assert [each["name"] for each in spec["volumes"]] == ["job-key", "shm", "data"]
    ours, sidecar = spec["containers"]
    assert sidecar == {"name": "sidecar", "image": "lab/sidecar"}
    assert (ours["image"], ours["imagePullPolicy"]) == ("lab/train:1", "Always")
    assert [each["name"] for each in ours["env"]] == ["RONDE_JOB_KEY_FILE", "TOKEN", "HF_HOME"]
    assert [each["mountPath"] for each in ours["volumeMounts"]] == ["/run/ronde", "/dev/shm", "/data"]


def test_a_patch_of_pods_reaches_those_of_a_job_set() -> None:
    patch = {"kind": "Pod", "spec": {"priorityClassName": "high"}}
    (workers,) = patch_manifest(build_manifest(replace(JOB, kind=JOB_SET)), [patch], "p.yaml")[0]["spec"][
        "replicatedJobs"
    ]
    assert workers["template"]["spec"]["template"]["spec"]["priorityClassName"] == "high"
    assert workers["template"]["spec"]["completions"] == 4


@pytest.mark.parametrize("patch", [{"kind": "Deployment"}, {"spec": {}}, ["kind"], None])
def test_a_patch_of_anything_else_is_refused(patch: Any) -> None:
    with pytest.raises(UsageError, match=r"p\.yaml: kind .* one of the kinds Pod, Job, Service, Secret"):
        patch_manifest(build_manifest(JOB), [patch], "p.yaml")
