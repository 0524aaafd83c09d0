"""Latent Dirichlet allocation: known topics are found again, tasks change no bit, and what its methods return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from scipy.sparse import csr_array

from ronde._native import infer_topics
from ronde.errors import UsageError
from ronde.ml import LatentDirichletAllocation, load
from ronde.ml.topics import inference

Array = NDArray[Any]

TOPICS, WORDS = 4, 40


def documents(rows: int, seed: int = 0, length: int = 60) -> csr_array:
    """Return documents of four topics with ten words each; a document has few of them."""
    random = np.random.default_rng(seed)
    shares = np.kron(np.eye(TOPICS), np.full(WORDS // TOPICS, TOPICS / WORDS))
    mixtures = random.dirichlet(np.full(TOPICS, 0.2), size=rows)
    return csr_array(np.array([random.multinomial(length, each) for each in mixtures @ shares], float))


X, LATER = documents(300), documents(100, seed=1)


def fitted(on: str = "threads:1", **params: Any) -> LatentDirichletAllocation:
    return LatentDirichletAllocation(TOPICS, random_state=0, on=on, **params).fit(X)


def bits(model: LatentDirichletAllocation) -> tuple[Any, ...]:
    return model.components_.tobytes(), np.asarray(model.doc_topic_prior_).tobytes(), model.history_


def found_topics(model: LatentDirichletAllocation) -> list[list[int]]:
    """Return the groups of ten words that have the same topic, in the order of words."""
    return sorted(sorted(words) for words in model.top_words(WORDS // TOPICS))


@pytest.mark.parametrize(
    "params",
    [
        {"topic_word_prior": 0.01},
        {"doc_topic_prior": "auto", "topic_word_prior": "auto"},
        {"learning_method": "batch", "max_iter": 40},
    ],
)
def test_known_topics_are_found_again(params: Any) -> None:
    assert found_topics(fitted(**params)) == np.arange(WORDS).reshape(TOPICS, -1).tolist()


def test_priors_are_learnt() -> None:
    model = fitted(doc_topic_prior="auto", topic_word_prior="auto")
    assert np.shape(model.doc_topic_prior_) == (TOPICS,)
    np.testing.assert_allclose(model.doc_topic_prior_, 0.2, atol=0.06)
    assert np.isscalar(fitted(max_iter=1).doc_topic_prior_)


@pytest.mark.parametrize("tasks", [2, 3, 4])
@pytest.mark.parametrize(
    "params",
    [
        {"doc_topic_prior": "auto", "topic_word_prior": "auto", "max_iter": 15},
        {"learning_method": "online", "batch_size": 70, "max_iter": 2},
    ],
)
def test_the_number_of_tasks_changes_no_bit(tasks: int, params: Any) -> None:
    assert bits(fitted(f"threads:{tasks}", **params)) == bits(fitted(**params))


def test_counts_that_are_not_whole_count_in_proportion() -> None:
    tenth = LatentDirichletAllocation(TOPICS, doc_topic_prior=0.02, topic_word_prior=0.01, random_state=0)
    tenth.fit(X / 10)
    assert found_topics(tenth) == np.arange(WORDS).reshape(TOPICS, -1).tolist()
    assert tenth.components_.sum() == pytest.approx(X.sum() / 10 + 0.01 * TOPICS * WORDS, rel=1e-3)


def test_arrays_and_sparse_matrices_give_the_same_model() -> None:
    dense = LatentDirichletAllocation(TOPICS, random_state=0, max_iter=5).fit(X.toarray())
    assert bits(dense) == bits(fitted(max_iter=5))
    np.testing.assert_array_equal(dense.transform(LATER), dense.transform(LATER.toarray()))


def test_shares_of_topics_add_up_to_one() -> None:
    model = fitted(topic_word_prior=0.01)
    shares, counts = model.transform(LATER), model.transform(LATER, normalize=False)
    assert shares.shape == (100, TOPICS)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    np.testing.assert_allclose(counts.sum(axis=1), 60 + TOPICS * model.doc_topic_prior_, rtol=1e-6)
    one_word = np.zeros((1, WORDS))
    one_word[0, 3] = 100
    assert model.transform(one_word).max() > 0.98
    np.testing.assert_allclose(model.transform(np.zeros((1, WORDS))), 1 / TOPICS)
    np.testing.assert_array_equal(
        LatentDirichletAllocation(TOPICS, random_state=0, topic_word_prior=0.01).fit_transform(X),
        model.transform(X),
    )
    assert model.get_feature_names_out().tolist() == [f"latentdirichletallocation{k}" for k in range(TOPICS)]


def test_ctrl_c_can_end_a_prediction_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def recorded(offsets: Array, *arguments: Any) -> None:
        sizes.append(len(offsets) - 1)
        infer_topics(offsets, *arguments)

    model = fitted(max_iter=5)
    expected = model.transform(LATER)
    monkeypatch.setattr(inference, "infer_topics", recorded)
    monkeypatch.setattr(inference, "DOCUMENTS_AT_ONCE", 30)
    np.testing.assert_array_equal(model.transform(LATER), expected)
    assert sizes == [30, 30, 30, 10]


def test_the_documents_of_a_pass_are_ordered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], np.random.default_rng

    def counted(seed: Any) -> np.random.Generator:
        made.append(seed)
        return make(seed)

    monkeypatch.setattr(np.random, "default_rng", counted)
    model = fitted(learning_method="online", batch_size=50, max_iter=2)
    assert model.n_batch_iter_ == 12
    assert len(made) == 3  # of the first components and of two passes


def test_the_perplexity_of_documents_with_known_topics() -> None:
    """A document of one topic has ten equally likely words; one of all topics, 40."""
    model = fitted(topic_word_prior=0.01)
    assert 10 < model.perplexity(LATER) < 20
    assert model.score(LATER) == pytest.approx(-3000 * np.log(model.perplexity(LATER)), rel=0.1)
    with pytest.raises(ValueError, match="the documents have no words to hold out"):
        model.perplexity(np.zeros((3, WORDS)))
    model.components_ = np.ones((TOPICS, WORDS))
    assert model.perplexity(LATER) == pytest.approx(WORDS)


def test_coherence_prefers_words_that_occur_together() -> None:
    good, bad = fitted(topic_word_prior=0.01), fitted(max_iter=1)
    order = np.random.default_rng(0).permutation(WORDS)
    bad.components_ = good.components_[:, order]
    for measure in ("npmi", "umass"):
        values = good.coherence(LATER, measure=measure)
        assert values.shape == (TOPICS,)
        assert values.min() > bad.coherence(LATER, measure=measure).max()
    with pytest.raises(ValueError, match='expected "npmi" or "umass"'):
        good.coherence(LATER, measure="c_v")  # type: ignore[arg-type]


def test_coherence_by_hand() -> None:
    model = LatentDirichletAllocation(1, random_state=0).fit([[3.0, 2.0]])
    rows = np.array([[1, 1], [1, 0], [2, 5], [0, 0]])
    assert model.coherence(rows, 2, "umass") == pytest.approx(np.log(3 / 3))
    assert model.coherence(rows, 2, "npmi") == pytest.approx(np.log(0.5 / (0.75 * 0.5)) / -np.log(0.5))


def test_top_words_have_names() -> None:
    names = [f"w{word}" for word in range(WORDS)]
    model = fitted(topic_word_prior=0.01)
    assert model.top_words(3, names) == [[f"w{word}" for word in topic] for topic in model.top_words(3)]
    with pytest.raises(ValueError, match="there are 2 names: expected 40, one for each column"):
        model.top_words(3, ["a", "b"])


def test_partial_fits_find_the_topics() -> None:
    model = LatentDirichletAllocation(TOPICS, random_state=0, total_samples=300, batch_size=100)
    for _ in range(20):
        model.partial_fit(X)
    assert model.n_batch_iter_ == 60
    assert found_topics(model) == np.arange(WORDS).reshape(TOPICS, -1).tolist()


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_loaded_model_predicts_the_same(tmp_path: Path, is_partial: bool) -> None:
    model = LatentDirichletAllocation(TOPICS, doc_topic_prior="auto", random_state=0, max_iter=15)
    (model.partial_fit if is_partial else model.fit)(X).save(tmp_path / "model")
    other = load(tmp_path / "model")
    np.testing.assert_array_equal(other.transform(LATER), model.transform(LATER))
    assert vars(other).keys() == vars(model).keys()
    model.components_ = model.components_[0]
    with pytest.raises(UsageError, match="components_ has 1 dimensions: expected 2"):
        model.save(tmp_path / "wrong")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.array([[1.0, -1.0]]), "Negative values in data passed to LatentDirichletAllocation"),
        (np.array([[2.0**30, 1.0]]), "X contains 1073741825 words, and the sampler counts up to 1073741824"),
        (np.array([[np.nan, 1.0]]), "contains NaN"),
        (
            np.array([[1e-9, 3e-9]]),
            "the counts in X have a mean of 2e-09, .* in units of 9.53674e-07: multiply",
        ),
        (np.array([[1e-310, 0.0]]), "the counts in X have a mean of 1e-310"),
    ],
)
def test_counts_that_cannot_be_are_errors(rows: Array, message: str) -> None:
    with pytest.raises(Exception, match=message):
        LatentDirichletAllocation(2, on="threads:1").fit(rows)


def test_small_priors() -> None:
    with pytest.raises(ValueError, match="'topic_word_prior' parameter"):
        fitted(topic_word_prior=1e-40)
    model = fitted(topic_word_prior=1e-12, doc_topic_prior=1e-12, max_iter=30)
    assert np.isfinite([record["loss"] for record in model.history_]).all()
    assert np.isfinite(model.transform(LATER)).all()


def test_an_empty_document_and_a_topic_without_words() -> None:
    model = LatentDirichletAllocation(50, doc_topic_prior="auto", topic_word_prior="auto", random_state=0)
    model.fit(np.array([[0.0, 0.0], [3.0, 1.0], [0.0, 0.0]]))
    assert np.isfinite(model.components_).all()
    assert np.isfinite(model.transform([[0.0, 0.0], [1.0, 1.0]])).all()
