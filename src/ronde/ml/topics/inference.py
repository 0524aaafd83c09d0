"""The topics of documents, given the weights of words in topics; and the step of online variational Bayes.

See Hoffman, Blei, Bach: "Online learning for latent Dirichlet allocation" (2010). The expected occurrences of words and
topics are summed as integers, so the number of tasks changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import psi

from ronde._native import infer_topics
from ronde.comqueue import IterationStep
from ronde.ml.history import Progress
from ronde.ml.topics.documents import Entries, check_counts, entries_of

__all__ = ["OnlineStep", "first_components", "infer", "log_likelihoods", "word_shares"]

Array = NDArray[Any]

FIXED_POINT = 1 << 20  # of the sums that the native code gives
LANES = 16  # the native code takes rows of a multiple of so many numbers
MOST_ITERATIONS = 100  # of a prediction
DOCUMENTS_AT_ONCE = 4096  # of a prediction; between them, Ctrl-C ends it
PIECE = 256  # documents whose words are looked at together
LEAST = 1e-300  # whose logarithm is finite
TOLERANCE = 1e-3  # of a prediction: the mean change of a topic's expected occurrences


def word_shares(components: Array) -> Array:
    """Return the probability of each word in a topic, of shape (words, topics)."""
    return np.ascontiguousarray((components / components.sum(axis=1, keepdims=True)).T)


def infer(entries: Entries, shares: Array, priors: Array) -> Array:
    """Return the expected occurrences of each topic with its prior, of shape (documents, topics).

    `shares`: as of `word_shares`.
    """
    gammas, padded = np.empty((entries.num_rows, shares.shape[1])), _padded(shares)
    for begin in range(0, entries.num_rows, DOCUMENTS_AT_ONCE):
        piece = entries.rows(begin, min(begin + DOCUMENTS_AT_ONCE, entries.num_rows))
        found = gammas[begin : begin + DOCUMENTS_AT_ONCE]
        infer_topics(*piece, padded, priors, MOST_ITERATIONS, TOLERANCE, False, found, None)
    return gammas


def log_likelihoods(entries: Entries, shares: Array, gammas: Array) -> Array:
    """Return for each entry its count times the logarithm of its word's probability, given the document's topics."""
    mixtures = gammas / gammas.sum(axis=1, keepdims=True)
    found = []
    for row in range(0, entries.num_rows, PIECE):
        last = min(row + PIECE, entries.num_rows)
        begin, end = entries.offsets[row], entries.offsets[last]
        rows = np.repeat(np.arange(row, last), np.diff(entries.offsets[row : last + 1]))
        probabilities = np.einsum("ij,ij->i", mixtures[rows], shares[entries.words[begin:end]])
        found.append(entries.counts[begin:end] * np.log(np.maximum(probabilities, LEAST)))
    return np.concatenate(found)


def fixed_point(values: Array) -> int:
    """Return the sum of numbers in multiples of 2^-20, which does not depend on their order."""
    return int(np.rint(values * FIXED_POINT).astype(np.int64).sum())


def first_components(seed: int, topics: int, words: int) -> Array:
    """Return random components with which variational Bayes begins, of shape (topics, words)."""
    return np.random.default_rng(seed).gamma(100.0, 0.01, (topics, words))


@dataclass(eq=False)
class OnlineStep:
    """Moves the components towards those that fit a batch of documents.

    Attributes:
        estimator: The name of the estimator, for errors.
        doc_topic_prior: Of each topic in a document.
        topic_word_prior: Of each word in a topic.
        components: The first ones, of shape (topics, words).
        decay: The exponent with which steps become smaller.
        offset: How much the first steps are made smaller.
        batch_size: How many documents a step reads.
        total_documents: How many documents the components stand for; None: all of this fit.
        steps_before: How many batches there were before this fit.
        max_doc_iterations: As of scikit-learn's `max_doc_update_iter`.
        tolerance: As of scikit-learn's `mean_change_tol`.
        seed: Of the order of documents.
        progress: Called on task 0 after each step.
    """

    estimator: str
    doc_topic_prior: float
    topic_word_prior: float
    components: Array
    decay: float
    offset: float
    batch_size: int
    total_documents: float | None
    steps_before: int
    max_doc_iterations: int
    tolerance: float
    seed: int
    progress: Progress
    _pass_order: tuple[int, Array] | None = field(default=None, init=False, repr=False)  # of this task

    def first_state(self) -> dict[str, Any]:
        """Return the state with which the iteration begins."""
        return dict(seed=None, components=None, records=[])

    def __call__(self, c: IterationStep) -> None:
        state = c.state
        if state.components is None:
            state.seed, state.components = c.broadcast((self.seed, self.components))
        batch = self._batch(c)
        sums = c.sum(self._expected(c, batch))
        occurrences = float(sums["occurrences"][0]) / FIXED_POINT
        share = (self.total_documents or c.num_rows) / len(batch)
        found = self.topic_word_prior + share * (sums["statistics"].T / FIXED_POINT)
        rate = (self.offset + self.steps_before + c.step_no) ** -self.decay
        moved = np.abs(found - state.components).mean() * rate
        state.components = (1 - rate) * state.components + rate * found
        loss = -float(sums["log_likelihood"][0]) / FIXED_POINT / max(occurrences, 1e-300)
        record = dict(step=c.step_no, loss=loss, moved=float(moved))
        state.records.append(record)
        c.stop_if(c.task_id == 0 and self.progress(record, lambda: self._attributes(state)))

    def _batch(self, c: IterationStep) -> Array:
        """Return the numbers of the documents of this step, sorted. Each pass has another order."""
        batches = -(-c.num_rows // self.batch_size)
        passes, number = divmod(c.step_no - 1, batches)
        if batches == 1:
            return np.arange(c.num_rows)
        if self._pass_order is None or self._pass_order[0] != passes:
            order = np.random.default_rng([c.state.seed, passes]).permutation(c.num_rows)
            self._pass_order = passes, order
        return np.sort(self._pass_order[1][number::batches])

    def _expected(self, c: IterationStep, batch: Array) -> dict[str, Array]:
        """Return sums over those documents of the batch that this task has."""
        components: Array = c.state.components
        topics, words = components.shape
        weights = _padded(np.exp(psi(components) - psi(components.sum(axis=1, keepdims=True))).T)
        shares, priors = word_shares(components), np.full(topics, self.doc_topic_prior)
        sums = {
            "statistics": np.zeros((words, topics), np.int64),
            "log_likelihood": np.zeros(1, np.int64),
            "occurrences": np.zeros(1, np.int64),
        }
        for entries in self._documents(c, batch):
            check_counts(entries.counts, self.estimator)
            gammas = np.empty((entries.num_rows, topics))
            infer_topics(
                *entries,
                weights,
                priors,
                max_iterations=self.max_doc_iterations,
                tolerance=self.tolerance,
                is_variational=True,
                gammas=gammas,
                statistics=sums["statistics"],
            )
            sums["log_likelihood"] += fixed_point(log_likelihoods(entries, shares, gammas))
            sums["occurrences"] += fixed_point(entries.counts)
        return sums

    def _documents(self, c: IterationStep, batch: Array) -> Iterator[Entries]:
        begin = c.row_range.start
        for block in c.blocks:
            first, last = np.searchsorted(batch, [begin, begin + block.X.shape[0]])
            if first < last:
                yield entries_of(block.X[batch[first:last] - begin])
            begin += block.X.shape[0]

    def _attributes(self, state: SimpleNamespace) -> dict[str, Any]:
        return {
            "components_": state.components,
            "doc_topic_prior_": self.doc_topic_prior,
            "topic_word_prior_": self.topic_word_prior,
        }


def _padded(weights: Array) -> Array:
    """Return weights of shape (words, topics) with columns of zeros, as the native code takes them."""
    words, topics = weights.shape
    padded = np.zeros((words, -(-topics // LANES) * LANES))
    padded[:, :topics] = weights
    return padded
