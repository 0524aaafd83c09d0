"""The step of Word2Vec: counts the words of all shards, then trains on a part of each shard and adds up the changes.

Between two exchanges each shard is trained alone, from the same vectors. The changes are integers, so their sum does
not depend on which task has which shards. Only rows that a shard has changed are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ronde._native import WordTable, WordTrainer
from ronde.comqueue import IterationStep
from ronde.ml.history import Progress

__all__ = [
    "LANES",
    "SEPARATOR",
    "WordOptions",
    "WordStep",
    "drop_outputs",
    "parts_of_epoch",
    "word_that_is_not_utf8",
]

Array = NDArray[Any]

LANES: int = WordTrainer.lanes
SEPARATOR = b"\x1f"
LOSS_UNIT = 2.0**-20
MOST_WORDS_PER_STEP, LEAST_WORDS_PER_STEP, STEPS_OF_EPOCH = 100_000, 1_000, 50  # by default


@dataclass(frozen=True)
class WordOptions:
    """The parameters of `Word2Vec` of the same names."""

    vector_size: int
    window: int
    min_count: int
    negative: int
    algorithm: str
    epochs: int
    learning_rate: float
    min_learning_rate: float
    sample: float
    ns_exponent: float
    shrink_windows: bool
    words_per_step: int | None


@dataclass(eq=False)
class WordStep:
    """The first step counts the words; each further one trains on a part of the sentences of each shard.

    Attributes:
        options: Of the estimator.
        is_lines: Whether the shards are lines of a file.
        seed: Of all random numbers.
        progress: Gets the record of each step, on task 0.
    """

    options: WordOptions
    is_lines: bool
    seed: int
    progress: Progress
    _trainer: WordTrainer | None = field(default=None, repr=False)  # of this task

    @staticmethod
    def first_state() -> dict[str, Any]:
        """Return the state with which the iteration begins. `words`: in UTF-8, each with a separator behind it."""
        return dict(seed=None, words=None, counts=None, vectors=None, outputs=None, done=0, records=[])

    def __call__(self, c: IterationStep) -> None:
        state = c.state
        if state.counts is None:
            state.seed = c.broadcast(self.seed)  # the ranks of a job may have drawn different ones
            state.words, state.counts = self._vocabulary(c)
            can_train = len(state.counts) > 0 and word_that_is_not_utf8(state.words) is None
            if can_train:
                self._make_vectors(state)
            c.stop_if(not can_train)
            return
        if self._trainer is None:
            self._trainer = self._make_trainer(c)
        parts = parts_of_epoch(int(state.counts.sum()), self.options.words_per_step)
        epoch, part = divmod(state.done, parts)
        rate, last_rate = (
            self._rate(done / (parts * self.options.epochs)) for done in (state.done, state.done + 1)
        )
        found = np.array(self._trainer.train(epoch, part, parts, rate, last_rate))
        vectors, outputs = (_exchange(c, self._trainer, is_outputs) for is_outputs in (False, True))
        self._trainer.apply(vectors, outputs, rate)
        loss, count = c.sum(found).tolist()
        state.done += 1
        record = dict(
            step=state.done,
            loss=loss * LOSS_UNIT / count if count else 0.0,
            epoch=epoch + 1,
            learning_rate=rate,
        )
        state.records.append(record)
        should_stop = c.task_id == 0 and self.progress(record)
        c.stop_if(should_stop or state.done == parts * self.options.epochs)

    def _vocabulary(self, c: IterationStep) -> tuple[Array, Array]:
        """Return the words of all tasks that occur often enough, and their counts, in descending order of these."""
        counted = WordTable()
        for text in c.data:
            counted.add_text(text, self.is_lines)
        merged = WordTable()
        for words, counts in c.gather((counted.words(), _counts_of(counted))):
            merged.add_counts(np.frombuffer(words, np.uint8), counts)
        return _frequent_words(merged, self.options.min_count)

    def _make_vectors(self, state: Any) -> None:
        words, size = len(state.counts), self.options.vector_size
        width = -(-size // LANES) * LANES
        random = np.random.default_rng(state.seed)
        state.vectors = np.zeros((words, width), np.float32)
        state.vectors[:, :size] = (random.random((words, size), np.float32) - np.float32(0.5)) / np.float32(
            size
        )
        has_tree = not self.options.negative and words > 1
        state.outputs = np.zeros((words - has_tree, width), np.float32)

    def _make_trainer(self, c: IterationStep) -> WordTrainer:
        state, options = c.state, self.options
        trainer = WordTrainer(
            state.counts,
            state.vectors,
            state.outputs,
            window=options.window,
            negative=options.negative,
            is_cbow=options.algorithm == "cbow",
            shrinks_window=options.shrink_windows,
            sample=options.sample,
            ns_exponent=options.ns_exponent,
            seed=state.seed,
            shards=c.num_rows,
        )
        table = WordTable()
        table.add_counts(state.words, state.counts)
        for number, text in zip(c.row_range, c.data):
            trainer.add_shard(table, text, self.is_lines, number)
        return trainer

    def _rate(self, done: float) -> float:
        first, last = self.options.learning_rate, self.options.min_learning_rate
        return first + (last - first) * done


def parts_of_epoch(num_words: int, words_per_step: int | None) -> int:
    """Return in how many steps an epoch is trained. `words_per_step`: of all shards; None: a default."""
    if words_per_step is None:
        words_per_step = min(MOST_WORDS_PER_STEP, max(LEAST_WORDS_PER_STEP, num_words // STEPS_OF_EPOCH))
    return max(1, -(-num_words // words_per_step))


def drop_outputs(c: IterationStep) -> None:
    """Take out of the state what only training needs."""
    c.state.outputs = None


def _counts_of(table: WordTable) -> Array:
    counts = np.empty(len(table), np.int64)
    table.counts(counts)
    return counts


def _frequent_words(table: WordTable, min_count: int) -> tuple[Array, Array]:
    counts = _counts_of(table)
    words: Sequence[bytes] = table.words().split(SEPARATOR)
    kept = np.flatnonzero(counts >= min_count)
    by_word = sorted(kept.tolist(), key=words.__getitem__)
    order = np.array(by_word, np.int64)
    order = order[np.argsort(-counts[order], kind="stable")]
    joined = b"".join([words[number] + SEPARATOR for number in order])
    return np.frombuffer(joined, np.uint8), counts[order]


def word_that_is_not_utf8(words: Array) -> bytes | None:
    """Return the first word whose bytes are not UTF-8, or None. `words`: as in the state."""
    text = words.tobytes()
    try:
        text.decode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        begin = text.rfind(SEPARATOR, 0, error.start) + 1
        return text[begin : text.find(SEPARATOR, begin)]
    return None


def _exchange(c: IterationStep, trainer: WordTrainer, is_outputs: bool) -> Array:
    """Let the trainer of each task have the sums of all tasks; return the numbers of the rows that have changed."""
    changed = np.empty(len(c.state.outputs if is_outputs else c.state.vectors), np.uint8)
    trainer.changed(is_outputs, changed)
    if c.num_tasks == 1:
        return np.flatnonzero(changed)
    rows = np.flatnonzero(c.max(changed))
    sums = np.empty((len(rows), trainer.sums_per_row()), np.int32)
    trainer.take(is_outputs, rows, sums)
    trainer.put(is_outputs, rows, c.sum(sums))
    return rows
