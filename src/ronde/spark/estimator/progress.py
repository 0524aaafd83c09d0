"""Follows a run from the driver: a line for each epoch that rank 0 has written into the folder of the run."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any, TextIO

from ronde.parquet.store import RunFolder

__all__ = ["FollowedRun", "describe_epoch"]

PAUSE_S = 1.0  # a store announces nothing


class FollowedRun:
    """Prints the epochs of a run within a `with` block, if it is talkative."""

    def __init__(self, run: RunFolder, epochs: int, is_talkative: bool, file: TextIO | None = None) -> None:
        self._run, self._epochs, self._file = run, epochs, file or sys.stderr
        self._shown = set(run.epochs())
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ronde-progress", daemon=True)
        self._is_talkative = is_talkative

    def __enter__(self) -> None:
        if not self._is_talkative:
            return
        begun = f" after epoch {len(self._shown)}" if self._shown else ""
        print(f"Ronde: run {self._run.run_id} begins{begun}", file=self._file)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        if self._is_talkative:
            self._thread.join()

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._has_ended.wait(PAUSE_S)
            try:
                for epoch in self._run.epochs():
                    if epoch not in self._shown:
                        self._shown.add(epoch)
                        text = describe_epoch(self._run.metrics(epoch))
                        print(
                            f"Ronde: epoch {epoch + 1} of {self._epochs}: {text}", file=self._file, flush=True
                        )
            except OSError:  # the ranks report what is wrong with the store
                continue


def describe_epoch(metrics: dict[str, Any]) -> str:
    """Return metrics in a line: `loss 0.31, validation loss 0.4 (2.1 s)`."""
    values = [f"{name} {value:.4g}" for name, value in metrics["train"].items()]
    values += [f"validation {name} {value:.4g}" for name, value in metrics.get("validation", {}).items()]
    return f"{', '.join(values)} ({metrics['seconds']:.1f} s)"
