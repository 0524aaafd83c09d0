"""Converts the options of `ronde run --cluster kubernetes` to a manifest, and writes or submits it.

The Pods run `ronde run` with the same options, but for those of this group. Their contradictions are found here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from ronde.cli import show
from ronde.cli.options import Given, words_of
from ronde.cli.run_arguments import OPTIONS, RunArguments
from ronde.cli.run_config import configure
from ronde.cli.run_here import Here
from ronde.cli.run_options import INFORMATION, KUBERNETES
from ronde.errors import UsageError
from ronde.job_key import JobKey
from ronde.launch.config import LaunchConfig
from ronde.launch.kubernetes.indexed_job import IndexedPod
from ronde.launch.kubernetes.manifest import JOB, JOB_SET, Manifest, PodJob, build_manifest, patch_manifest

__all__ = ["describe_pods", "run_on_kubernetes"]

# Options that say how machines find each other, or that are for this machine.
_ELSEWHERE = (
    *("--hosts", "--hostfile", "--host-discovery-script", "--standalone", "--launcher", "--local-addr"),
    *("--rdzv-backend", "--rdzv-endpoint", "--node-rank", "--master-addr", "--master-port"),
)
_KINDS = {"job": JOB, "jobset": JOB_SET}
_HIDDEN = "(secret)"
_GRACE_S = 5  # for the agent, after its workers
_RANDOM_BYTES = 3


def run_on_kubernetes(asked: RunArguments, variables: Mapping[str, str]) -> int:
    """Print, write or submit the manifest; return the exit code, after submission that of the job.

    Raises UsageError for contradictions, and if kubectl fails.
    """
    job = describe_pods(asked, variables)
    manifest = _patched(asked, build_manifest(job))
    if asked.has("--dry-run"):
        show(_text(_without_secrets(manifest)))
        return 0
    if asked.has("--manifest"):
        _write(manifest, asked.value("--manifest"))
        return 0
    from ronde.launch.kubernetes.kubectl import submit_and_follow

    return submit_and_follow(manifest, job, detach=asked.has("--detach"))


def describe_pods(asked: RunArguments, variables: Mapping[str, str]) -> PodJob:
    """Return what the options ask for. `variables`: of this process, for those that the Pods get."""
    for name in _ELSEWHERE:
        if asked.has(name):
            raise UsageError(
                f"{asked.origin(name)} and --cluster kubernetes contradict each other, because the Pods meet at the "
                "first one: leave it out"
            )
    if not asked.has("--image"):
        raise UsageError(
            "--cluster kubernetes needs an image with Ronde and the program: add --image REGISTRY/NAME:TAG"
        )
    name = asked.value("--job-name") or _new_name(asked.name)
    in_pod = RunArguments(asked.name, asked.arguments, _pod_options(asked))
    exported = {each: variables[each] for each in asked.value("--export", ()) if each in variables}
    config = _configure_pod(in_pod, name, exported)
    least, most = asked.value("--nnodes", (1, 1))
    return PodJob(
        name=name,
        image=asked.value("--image").strip(),
        command=("ronde", "run", *words_of(in_pod.given, OPTIONS), asked.name, *asked.arguments),
        least=least,
        most=most,
        key=JobKey.generate(),
        kind=_KINDS[asked.value("--kubernetes-kind", "job")],
        namespace=asked.value("--namespace", ""),
        gpus=asked.value("--gpus", 0),
        cpus=asked.value("--cpus", ""),
        memory=asked.value("--memory", ""),
        shared_memory=asked.value("--shm-size", ""),
        variables=exported,
        grace_s=config.worker.longest_end_ns() // 10**9 + _GRACE_S,
    )


def _pod_options(asked: RunArguments) -> dict[str, Given]:
    """Return the options of `ronde run` in each Pod: all that are not for this machine."""
    given = {"--nnodes": Given((1, 1), "--nnodes", "1"), **asked.given}
    gpus = asked.value("--gpus", 0)
    if gpus and not asked.has("--nproc-per-node", "--num-proc"):
        given["--nproc-per-node"] = Given(gpus, asked.origin("--gpus"), str(gpus))
    ours = {option.name for option in OPTIONS if option.group in (KUBERNETES, INFORMATION)}
    return {name: each for name, each in given.items() if name not in ours}


def _configure_pod(in_pod: RunArguments, name: str, exported: Mapping[str, str]) -> LaunchConfig:
    """Return the configuration of the first Pod's agent. Raises UsageError where that agent would."""
    gpus = {"gpu", "auto"} & {in_pod.value("--nproc-per-node"), in_pod.value("--num-proc")}
    here = Here(exported, cores=1, gpus=len(gpus), pod=IndexedPod(name, 0, name))
    return configure(in_pod, [in_pod.name, *in_pod.arguments], here)


def _new_name(program: str) -> str:
    """Return a name that begins like the program's; no other job has it."""
    stem = os.path.basename(program).partition(".")[0].lower()
    stem = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:30].strip("-")
    return f"{stem if stem[:1].isalpha() else f'job-{stem}'.strip('-')}-{os.urandom(_RANDOM_BYTES).hex()}"


# The manifest


def _patched(asked: RunArguments, manifest: Manifest) -> Manifest:
    if not asked.has("--patch"):
        return manifest
    path = asked.value("--patch")
    return patch_manifest(manifest, _documents(path), path)


def _documents(path: str) -> list[Any]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the patch {path}: {getattr(error, 'strerror', 'it is not text')}"
        ) from None
    if path.endswith(".json"):
        try:
            return [json.loads(text)]
        except ValueError as error:
            raise UsageError(f"{path} is not JSON: {error}") from None
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f"reading {path} needs PyYAML, which is not installed: pip install 'ronde[yaml]', or write it as JSON into "
            "a file whose name ends in .json"
        ) from None
    try:
        return [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _text(manifest: Manifest) -> str:
    """Return the manifest as kubectl reads it: JSON, so that writing it needs no package."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": manifest}, indent=2) + "\n"


def _without_secrets(manifest: Manifest) -> Manifest:
    return [
        {**each, "stringData": dict.fromkeys(each["stringData"], _HIDDEN)} if "stringData" in each else each
        for each in manifest
    ]


def _write(manifest: Manifest, path: str) -> None:
    """Write the manifest into a file that only this user may read."""
    if path == "-":
        show(_text(manifest))
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, 0o600)
            file.write(_text(manifest))
    except OSError as error:
        raise UsageError(f"cannot write the manifest {path}: {error.strerror}") from None
    print(
        f"ronde: {path} has the job's key in it; submit it by: kubectl create -f {path}",
        file=sys.stderr,
    )
