"""`horovod.spark.common.backend`: where an estimator's ranks run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ronde.spark.torch_estimator as ours
from ronde.compat.calls import with_horovod, with_horovods_words

__all__ = ["Backend", "SparkBackend"]

Backend = ours.EstimatorBackend


class SparkBackend(ours.SparkBackend):
    """Runs an estimator's ranks as `ronde.spark.SparkBackend` does. In them Ronde is Horovod."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Return the results by rank."""
        with with_horovods_words("Spark tasks"):
            return super().run(with_horovod(fn), args, kwargs, env)
