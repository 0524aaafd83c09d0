"""How good topics are: what held-out words are, and how well the most frequent words of a topic go together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from ronde.ml.topics.documents import Entries

__all__ = ["npmi_coherence", "umass_coherence", "with_halves"]

Array = NDArray[Any]


def with_halves(entries: Entries, seed: int) -> tuple[Entries, Entries]:
    """Return the documents with about one half of their words, drawn at random, and with the others.

    A count that is no whole number keeps one half of what exceeds the whole number.
    """
    whole = np.floor(entries.counts)
    drawn = np.random.default_rng(seed).binomial(whole.astype(np.int64), 0.5)
    first = drawn + (entries.counts - whole) / 2
    return entries._replace(counts=first), entries._replace(counts=entries.counts - first)


def umass_coherence(X: Any, top: Array) -> Array:
    """Return the UMass coherence of each topic (Mimno et al., 2011): the mean over pairs of its words of
    log((documents with both + 1) / documents with the more frequent one in the topic).

    `X`: documents x words, an array or a sparse matrix. `top`: of each topic, columns of X, the most frequent first.
    """

    def score(both: Array, single: Array) -> Array:
        later, earlier = np.tril_indices(len(single), -1)
        return np.log((both[later, earlier] + 1) / np.maximum(single[earlier], 1))

    return _means(X, top, score)


def npmi_coherence(X: Any, top: Array) -> Array:
    """Return the NPMI coherence of each topic: the mean over pairs of its words of the normalized pointwise mutual
    information of the events that a document contains them; -1 for words that no document has together.

    Arguments as of `umass_coherence`.
    """
    rows = X.shape[0]

    def score(both: Array, single: Array) -> Array:
        later, earlier = np.tril_indices(len(single), -1)
        joint = both[later, earlier] / rows
        separate = single[later] * single[earlier] / rows**2
        scores = np.full(len(joint), -1.0)
        scores[joint == 1] = 1.0
        known = (joint > 0) & (joint < 1)
        scores[known] = np.log(joint[known] / separate[known]) / -np.log(joint[known])
        return scores

    return _means(X, top, score)


def _means(X: Any, top: Array, score: Any) -> Array:
    columns, places = np.unique(top, return_inverse=True)
    present = csr_array(csr_array(X)[:, columns] > 0, dtype=np.float64)
    both = (present.T @ present).toarray()
    places = places.reshape(top.shape)
    return np.array([score(both[np.ix_(own, own)], both[own, own]).mean() for own in places])
