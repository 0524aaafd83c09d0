"""All checks of scikit-learn for estimators, for all estimators of `ronde.ml`. None is skipped or expected to fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")
pytest.importorskip("pandas", reason="pandas is not installed here, which some of the checks need")

from sklearn.utils.estimator_checks import parametrize_with_checks

import ronde.ml
from ronde.ml import ESTIMATORS

pytestmark = pytest.mark.slow


@parametrize_with_checks([getattr(ronde.ml, name)() for name in sorted(ESTIMATORS)])  # type: ignore[untyped-decorator]
def test_scikit_learns_checks(
    estimator: Any, check: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")  # else a check is skipped
    try:
        check(estimator)
    except SkipTest as skipped:
        pytest.fail(f"scikit-learn skips the check: {skipped}")
