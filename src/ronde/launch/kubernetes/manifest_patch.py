"""Merges a user's fields into the objects of a job, where Kubernetes has more fields than there are options. Pure.

Mappings are merged. Lists whose items have names, such as containers and variables, are merged by name; any other list
is replaced. `null` removes a field. The kind Pod stands for the template of the job's Pods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ronde.errors import UsageError
from ronde.launch.kubernetes.manifest import JOB, JOB_SET, Manifest

__all__ = ["patch_manifest"]

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
