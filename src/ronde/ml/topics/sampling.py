"""The step of latent Dirichlet allocation by sampling: a new topic for each token of all documents.

It is collapsed Gibbs sampling with delayed counts, as in WarpLDA (Chen et al., VLDB 2016): within a step, a token sees
the topics of its document as they are, and those of other documents as they were at the end of the last step. So
documents are independent, and tasks exchange counts once in a step. These are integers: the number of tasks changes no
bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import psi

from ronde._native import TopicWeights, count_tokens
from ronde.comqueue import IterationStep
from ronde.ml.history import Progress
from ronde.ml.topics.documents import Entries, entries_of, survey_counts

__all__ = ["SamplingStep", "components_of", "forget_topics"]

Array = NDArray[Any]

FIXED_POINT = 1 << 20  # of the sums that the native code gives
BURN_IN = 10  # steps before priors are learnt
STEPS_BETWEEN_WORD_PRIORS = 5
FIRST_PASSES = 1 << 40  # what their numbers begin with
# One of how many documents is read before the first step, and in how many passes.
FIRST_LEVELS = ((64, 20), (16, 12), (4, 8), (2, 4))
TOKENS_OF_A_TOPIC = 200  # that a part has to have
NO_TOPIC = 0xFFFF  # of a token that has none yet
LEAST_PRIOR = 1e-6
AVERAGED = 5  # the counts of the last steps are averaged: one of this number of steps


@dataclass(frozen=True, eq=False)
class SamplingStep:
    """Draws a topic for each token.

    Attributes:
        estimator: The name of the estimator, for errors.
        topics: How many there are.
        words: How many different words there are.
        doc_topic_prior: Of each topic in a document.
        topic_word_prior: Of each word in a topic.
        learns_topics: Whether the former is learnt, for each topic.
        learns_words: Whether the latter is learnt.
        max_iter: The number of steps.
        seed: Of the draws.
        progress: Called on task 0 after each step.
    """

    estimator: str
    topics: int
    words: int
    doc_topic_prior: float
    topic_word_prior: float
    learns_topics: bool
    learns_words: bool
    max_iter: int
    seed: int
    progress: Progress

    def first_state(self) -> dict[str, Any]:
        """Return the state with which the iteration begins.

        `_topics` has the topics of this task's tokens, an array for each row block; the others are the same everywhere.
        """
        return dict(
            seed=None,
            counts=None,
            doc_topic_prior=np.full(self.topics, self.doc_topic_prior),
            topic_word_prior=self.topic_word_prior,
            survey=None,
            total=None,
            num_averaged=0,
            records=[],
            _topics=None,
        )

    def __call__(self, c: IterationStep) -> None:
        state = c.state
        if state.counts is None:
            self._start(c)
        sums = self._sampled(c, c.step_no)
        state.counts = sums["counts"]
        loss = -float(sums["log_likelihood"][0]) / FIXED_POINT / max(state.survey.occurrences, 1e-300)
        self._learn(c, sums)
        self._average(c)
        record = dict(step=c.step_no, loss=loss)
        state.records.append(record)
        c.stop_if(c.task_id == 0 and self.progress(record, lambda: attributes_of(state)))

    def _start(self, c: IterationStep) -> None:
        """Find first topics, in passes over a part of the documents, which grows."""
        state = c.state
        state.seed = c.broadcast(self.seed)  # the ranks of a job may have drawn different ones
        state.survey = survey_counts(c, self.estimator)
        state.counts = self._no_counts()
        state._topics = [
            np.full(count_tokens(*entries, self.words, state.survey.scale), NO_TOPIC, np.uint16)
            for _, entries in documents_of(c)
        ]
        for number, every in enumerate(first_passes(state.survey.occurrences, self.topics)):
            state.counts = self._sampled(c, FIRST_PASSES + number, every)["counts"]

    def _sampled(self, c: IterationStep, number: int, every: int = 1) -> dict[str, Array]:
        """Return the sums over the documents of all tasks. `number`: of the random numbers; `every`: which of them."""
        state = c.state
        weights = TopicWeights(
            state.counts, state.doc_topic_prior, state.topic_word_prior, state.survey.scale
        )
        sums = {"counts": self._no_counts(), "log_likelihood": np.zeros(1, np.int64)}
        if self.learns_topics and BURN_IN < number < FIRST_PASSES:
            sums["priors"] = np.zeros(self.topics + 1, np.int64)
        for (first_row, entries), tokens in zip(documents_of(c), state._topics, strict=True):
            weights.sample(
                *entries,
                state.seed,
                number,
                first_row,
                every,
                tokens,
                sums["counts"],
                sums["log_likelihood"],
                sums.get("priors"),
            )
        total: dict[str, Array] = c.sum(sums)
        return total

    def _learn(self, c: IterationStep, sums: dict[str, Array]) -> None:
        """Take a step of Minka's fixed-point iteration with each prior that is learnt."""
        state = c.state
        if "priors" in sums and sums["priors"][-1] > 0:
            ratios = sums["priors"][:-1] / sums["priors"][-1]
            state.doc_topic_prior = np.maximum(state.doc_topic_prior * ratios, LEAST_PRIOR)
        if self.learns_words and c.step_no > BURN_IN and c.step_no % STEPS_BETWEEN_WORD_PRIORS == 0:
            state.topic_word_prior = next_word_prior(state.counts, state.survey.scale, state.topic_word_prior)

    def _average(self, c: IterationStep) -> None:
        state = c.state
        if c.step_no > self.max_iter - max(1, self.max_iter // AVERAGED):
            state.total = state.counts.astype(np.int64) if state.total is None else state.total + state.counts
            state.num_averaged += 1

    def _no_counts(self) -> Array:
        return np.zeros((self.words, self.topics), np.int32)


def documents_of(c: IterationStep) -> Iterator[tuple[int, Entries]]:
    """Yield the documents of each of this task's row blocks, with the number of the first one."""
    row = c.row_range.start
    for block in c.blocks:
        entries = entries_of(block.X)
        yield row, entries
        row += entries.num_rows


def first_passes(occurrences: float, topics: int) -> list[int]:
    """Return which documents each of the first passes reads: those whose number is a multiple of the number.

    Passes over a part cost little, and find topics with which all documents then begin: as good as those after many
    passes over all. `occurrences`: of words in all documents.
    """
    enough = TOKENS_OF_A_TOPIC * topics
    return [every for every, passes in FIRST_LEVELS if occurrences >= enough * every for _ in range(passes)]


def next_word_prior(counts: Array, scale: float, prior: float) -> float:
    """Return the prior of words in topics after a step of Minka's fixed-point iteration.

    `counts`: of words x topics, in units; `scale`: units of an occurrence.
    """
    values, repeats = np.unique(counts[counts > 0], return_counts=True)
    gained = float(repeats @ (psi(values / scale + prior) - psi(prior)))
    all_prior = prior * len(counts)
    lost = float((psi(counts.sum(axis=0, dtype=np.int64) / scale + all_prior) - psi(all_prior)).sum())
    return max(prior * gained / (len(counts) * lost), LEAST_PRIOR) if lost > 0 else prior


def components_of(state: SimpleNamespace) -> Array:
    """Return the weights of words in topics: the mean counts of the last steps with their prior, topics x words."""
    counts = state.counts if state.total is None else state.total / state.num_averaged
    return np.ascontiguousarray((counts / state.survey.scale + state.topic_word_prior).T)


def attributes_of(state: SimpleNamespace) -> dict[str, Any]:
    """Return what the estimator would have as attributes if the fit ended with this state."""
    return {
        "components_": components_of(state),
        "doc_topic_prior_": state.doc_topic_prior,
        "topic_word_prior_": state.topic_word_prior,
    }


def forget_topics(c: IterationStep) -> None:
    """Remove the topics of tokens from the state before it travels: the `finish` of `iterate`."""
    c.state._topics = None
