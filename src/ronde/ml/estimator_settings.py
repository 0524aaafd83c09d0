"""What `set_output` and `set_fit_request` have set at an estimator, as JSON in the files of `ronde.ml.saving`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sklearn.utils.metadata_routing import MetadataRequest

from ronde.errors import UsageError

__all__ = ["apply_settings", "described_settings"]

OUTPUT, REQUESTS = "output", "metadata_requests"  # keys of a file
OUTPUTS = ("default", "pandas", "polars")


def described_settings(estimator: Any) -> dict[str, Any]:
    """Return the settings of an estimator as JSON; those that it lacks are left out."""
    settings: dict[str, Any] = {}
    # scikit-learn has no public way to read what `set_output` has set.
    if output := vars(estimator).get("_sklearn_output_config"):
        settings[OUTPUT] = output["transform"]
    if "_metadata_request" in vars(estimator):
        requests = _requests_by_method(estimator.get_metadata_routing())
        settings[REQUESTS] = {method: dict(each.requests) for method, each in requests.items()}
    return settings


def apply_settings(estimator: Any, description: Mapping[str, Any]) -> None:
    """Set what `described_settings` has described.

    Raises UsageError for a value that the estimator does not take; AttributeError, TypeError or ValueError for what
    `described_settings` never returns.
    """
    if OUTPUT in description:
        if description[OUTPUT] not in OUTPUTS:
            raise UsageError(f"its output is {description[OUTPUT]!r}: expected one of {', '.join(OUTPUTS)}")
        estimator.set_output(transform=description[OUTPUT])
    if REQUESTS in description:
        estimator._metadata_request = _request_of(estimator, description[REQUESTS])


def _request_of(estimator: Any, requests: Mapping[str, Mapping[str, Any]]) -> MetadataRequest:
    """Return the requests of an estimator. The methods `set_fit_request` need metadata routing to be enabled."""
    request: MetadataRequest = estimator.get_metadata_routing()
    known = _requests_by_method(request)
    for method, aliases in requests.items():
        for name, alias in aliases.items():
            if method not in known or name not in known[method].requests:
                raise UsageError(f"{type(estimator).__name__} takes no metadata {name!r} in {method!r}")
            known[method].add_request(param=name, alias=alias)
    return request


def _requests_by_method(request: MetadataRequest) -> dict[str, Any]:
    return {name: each for name, each in vars(request).items() if hasattr(each, "add_request")}
