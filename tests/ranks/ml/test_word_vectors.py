"""Word2Vec in 1 to 4 processes: the number of tasks changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from ronde.ml import Word2Vec

WORDS = np.array([f"word{number}" for number in range(60)])
SENTENCES = [WORDS[row].tolist() for row in np.random.default_rng(0).geometric(0.1, size=(400, 9)) % 60]


@pytest.mark.parametrize(
    "tasks", [pytest.param(tasks, marks=[] if tasks == 3 else pytest.mark.slow) for tasks in (1, 2, 3, 4)]
)
@pytest.mark.parametrize("algorithm", ["skip-gram", "cbow"])
def test_processes_give_the_bits_of_one_thread(
    tasks: int, algorithm: Literal["skip-gram", "cbow"], tmp_path: Path
) -> None:
    path = tmp_path / "sentences.txt"
    path.write_text("".join(" ".join(sentence) + "\n" for sentence in SENTENCES))
    fits = [
        Word2Vec(16, algorithm=algorithm, epochs=2, random_state=0, on=on).fit(path)
        for on in (f"local:{tasks}", "threads:1")
    ]
    assert fits[0].vectors_.tobytes() == fits[1].vectors_.tobytes()
    assert fits[0].word_bytes_.tobytes() == fits[1].word_bytes_.tobytes()
    assert fits[0].history_ == fits[1].history_
