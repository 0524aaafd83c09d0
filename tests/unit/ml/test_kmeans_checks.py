"""All checks of scikit-learn for estimators, for those of k-means. None is skipped or expected to fail."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")
pytest.importorskip("pandas", reason="pandas is not installed here, which some of the checks need")

from sklearn.utils.estimator_checks import check_estimator

from ronde.ml import KMeans, MiniBatchKMeans


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [KMeans(), MiniBatchKMeans()], ids=["KMeans", "MiniBatchKMeans"])
def test_scikit_learns_checks(estimator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")  # else a check is skipped
    results = check_estimator(estimator, on_fail="raise")
    assert {result["status"] for result in results} == {"passed"}
