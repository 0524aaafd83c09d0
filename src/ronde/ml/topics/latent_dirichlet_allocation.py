"""`LatentDirichletAllocation`: topics of documents, by sampling or by online variational Bayes.

Its steps are in `sampling` and `inference`, which tasks import without scikit-learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted

from ronde.comqueue import iterate
from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.fitted_forms import ArrayForm, FittedForm, NumberForm
from ronde.ml.tasks import SingleThreadedStep, can_lose_a_task, place_of
from ronde.ml.topics.documents import Entries, check_counts, entries_of
from ronde.ml.topics.evaluation import npmi_coherence, umass_coherence, with_halves
from ronde.ml.topics.inference import OnlineStep, first_components, infer, log_likelihoods, word_shares
from ronde.ml.topics.sampling import SamplingStep, components_of, forget_topics
from ronde.ml.training_data import TrainingData, check_in_memory, training_data

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = ["LatentDirichletAllocation"]

Array = NDArray[Any]

SAMPLING_STEPS, ONLINE_PASSES = 100, 10  # of max_iter=None
WORK_OF_AN_ENTRY = 16  # as of so many numbers of k-means: for `place_of`
ENTRIES_OF_BLOCK = 1 << 13
STEPS_OF_CHECKPOINT = 10
MOST_TOPICS = (1 << 16) - 1
SMALLEST_PRIOR = 1e-12  # products of smaller ones may be 0 in float32


class LatentDirichletAllocation(ClassNamePrefixFeaturesOutMixin, TransformerMixin, DistributedEstimator):
    """Finds topics of documents: each topic is a distribution of words, each document a mixture of topics.

        model = LatentDirichletAllocation(n_components=20, random_state=0, on="local:2").fit(counts)
        model.top_words(10, names), model.transform(counts)

    `counts` are those of words by document, as scikit-learn's `CountVectorizer` makes them. With
    `learning_method="sampling"`, each step draws a topic for each word of all documents, and tasks exchange counts once
    in a step. The result has the same bits for any number of tasks and wherever they run.

    Args:
        n_components: The number of topics (10).
        doc_topic_prior: The prior of each topic in a document, often called alpha; `"auto"` learns one for each topic
            (None: 1 / n_components). At least 1e-12, as the next one.
        topic_word_prior: The prior of each word in a topic, often called eta or beta; `"auto"` learns it (None:
            1 / n_components).
        learning_method: `"sampling"`; or `"online"`, online variational Bayes, which reads a batch of documents in a
            step and finds somewhat worse topics; `"batch"`, the same with all documents in each step (`"sampling"`).
        learning_decay: Of `"online"`: the exponent with which steps become smaller, in (0.5, 1] (0.7).
        learning_offset: Of `"online"`: how much the first steps are made smaller (10.0).
        max_iter: How many steps there are, or how many passes over the documents with `"online"` (None: 100, or 10).
        batch_size: Of `"online"`: how many documents a step reads (128).
        total_samples: Of `partial_fit`: how many documents there are in all (1e6).
        mean_change_tol: Of `"online"`: the topics of a document are found when they change by less (1e-3).
        max_doc_update_iter: Of `"online"`: how often the topics of a document are improved at most (100).
        verbose: Whether to print a line for each step to standard error (0).
        random_state: An int for the same result in each fit; or a `numpy.random.RandomState`.
        on: Where the tasks run, as of `ronde.comqueue.iterate`: `"local:2"`, `"spark:8"` (None: the ranks of this job,
            or threads of this process).

    Attributes:
        components_: The weights of words in topics, an array of shape (n_components, n_features): how often a word has
            a topic, on average over the last fifth of the steps, and the prior. Divide each row by its sum for
            probabilities.
        doc_topic_prior_: The prior of topics in a document: a number, or an array of shape (n_components,) if it was
            learnt.
        topic_word_prior_: The prior of words in a topic.
        n_iter_: The number of steps, or of passes with `"online"`.
        n_batch_iter_: The number of batches that `"online"` and `partial_fit` have read.
        history_: A record for each step of the last `fit`: `step`, `loss`, the mean over words of the negative
            logarithm of their probability. With `"sampling"` a word's probability is that given the topics of the other
            words of its document. With `"online"` the record also has `moved`.
        n_features_in_: The number of columns of X.
        feature_names_in_: Their names, if X is a data frame, or what `ronde.comqueue.read` makes of a table or of
            files, and all names are strings.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **DistributedEstimator._parameter_constraints,
        "n_components": [Interval(Integral, 1, MOST_TOPICS, closed="both")],
        "doc_topic_prior": [None, StrOptions({"auto"}), Interval(Real, SMALLEST_PRIOR, None, closed="left")],
        "topic_word_prior": [None, StrOptions({"auto"}), Interval(Real, SMALLEST_PRIOR, None, closed="left")],
        "learning_method": [StrOptions({"sampling", "online", "batch"})],
        "learning_decay": [Interval(Real, 0, 1, closed="both")],
        "learning_offset": [Interval(Real, 1, None, closed="left")],
        "max_iter": [Interval(Integral, 1, None, closed="left"), None],
        "batch_size": [Interval(Integral, 1, None, closed="left")],
        "total_samples": [Interval(Real, 0, None, closed="neither")],
        "mean_change_tol": [Interval(Real, 0, None, closed="left")],
        "max_doc_update_iter": [Interval(Integral, 1, None, closed="left")],
        "random_state": ["random_state"],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **DistributedEstimator._fitted_forms,
        "components_": ArrayForm(("topics", "features"), ("float64",), is_needed=True),
        "doc_topic_prior_": ArrayForm(("topics",), ("float64",), least_axes=0, is_needed=True),
        "topic_word_prior_": NumberForm(is_int=False, is_needed=True),
        "n_batch_iter_": NumberForm(),
    }

    components_: Array
    doc_topic_prior_: float | Array
    topic_word_prior_: float

    def __init__(
        self,
        n_components: int = 10,
        *,
        doc_topic_prior: float | Literal["auto"] | None = None,
        topic_word_prior: float | Literal["auto"] | None = None,
        learning_method: Literal["sampling", "online", "batch"] = "sampling",
        learning_decay: float = 0.7,
        learning_offset: float = 10.0,
        max_iter: int | None = None,
        batch_size: int = 128,
        total_samples: float = 1e6,
        mean_change_tol: float = 1e-3,
        max_doc_update_iter: int = 100,
        verbose: int = 0,
        random_state: int | np.random.RandomState | None = None,
        on: str | Cluster | None = None,
    ) -> None:
        self.n_components = n_components
        self.doc_topic_prior = doc_topic_prior
        self.topic_word_prior = topic_word_prior
        self.learning_method = learning_method
        self.learning_decay = learning_decay
        self.learning_offset = learning_offset
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.total_samples = total_samples
        self.mean_change_tol = mean_change_tol
        self.max_doc_update_iter = max_doc_update_iter
        self.verbose = verbose
        self.random_state = random_state
        self.on = on

    @fitting
    def fit(self, X: Any, y: object = None) -> Self:
        """Find the topics, independent of an earlier fit; return the estimator.

        Args:
            X: Documents: counts of words, an array, a data frame or a sparse matrix of shape (n_samples, n_features),
                with numbers from 0; or the path of Parquet files, a Spark data frame, or what `ronde.comqueue.read`
                returns. Numbers that are not whole count in proportion.
            y: Has no effect.

        Raises:
            ValueError: X or a parameter is invalid.
            RemoteError: A task failed, or has ended.
        """
        data = self._documents(X)
        if self.learning_method == "sampling":
            self._fit_by_sampling(data, {"X": X, "y": y})
        else:
            self._fit_online(data, {"X": X, "y": y})
        return self

    def _fit_by_sampling(self, data: TrainingData, for_callbacks: dict[str, Any]) -> None:
        max_iter = self.max_iter or SAMPLING_STEPS
        progress = self._progress(max_iter, for_callbacks)
        step = SamplingStep(
            type(self).__name__,
            self.n_components,
            data.num_features,
            self._prior(self.doc_topic_prior),
            self._prior(self.topic_word_prior),
            self.doc_topic_prior == "auto",
            self.topic_word_prior == "auto",
            max_iter,
            self._seed(),
            progress,
        )
        place = place_of(self.on, WORK_OF_AN_ENTRY * data.size)
        result = iterate(
            SingleThreadedStep(step),
            data=data.rows,
            state=step.first_state(),
            max_iter=max_iter,
            on=place,
            checkpoint_every=STEPS_OF_CHECKPOINT if can_lose_a_task(place) else None,
            finish=forget_topics,
            rows_per_block=rows_per_block(data),
        )
        state = result.state
        self.components_ = components_of(state)
        self.doc_topic_prior_ = (
            state.doc_topic_prior if self.doc_topic_prior == "auto" else self._prior(self.doc_topic_prior)
        )
        self.topic_word_prior_ = state.topic_word_prior
        self.n_iter_ = result.steps
        self.__dict__.pop("n_batch_iter_", None)  # of an earlier fit
        self._end_fit(progress, state.records)

    def _fit_online(self, data: TrainingData, for_callbacks: dict[str, Any]) -> None:
        is_batch = self.learning_method == "batch"
        batches = 1 if is_batch else -(-data.num_rows // self.batch_size)
        max_steps = (self.max_iter or ONLINE_PASSES) * batches
        progress = self._progress(max_steps, for_callbacks)
        step = self._online_step(data.num_features, progress)
        if is_batch:
            step = replace(step, batch_size=data.num_rows, decay=0.0)
        place = place_of(self.on, WORK_OF_AN_ENTRY * data.size // batches)
        result = iterate(
            SingleThreadedStep(step),
            data=data.rows,
            state=step.first_state(),
            max_iter=max_steps,
            on=place,
            checkpoint_every=STEPS_OF_CHECKPOINT if can_lose_a_task(place) else None,
            rows_per_block=rows_per_block(data),
        )
        self.components_ = result.state.components
        self._set_priors()
        self.n_batch_iter_ = result.steps
        self.n_iter_ = -(-result.steps // batches)
        self._end_fit(progress, result.state.records)

    @fitting
    def partial_fit(self, X: Any, y: object = None) -> Self:
        """Move the topics towards those of some documents, by online variational Bayes in this process.

        Args:
            X: Documents, an array or a sparse matrix of shape (n_samples, n_features).
            y: Has no effect.

        Raises:
            ValueError: X or a parameter is invalid.
        """
        check_in_memory(
            X, "partial_fit", "read some at a time, as by ronde.comqueue.read(path).load(0, 1000)"
        )
        is_first = not hasattr(self, "components_")
        data = self._documents(X, reset=is_first)
        step = self._online_step(
            data.num_features,
            self._progress(None, {"X": X, "y": y}),
            None if is_first else self.components_,
            self.total_samples,
        )
        batches = -(-data.num_rows // self.batch_size)
        result = iterate(
            SingleThreadedStep(step),
            data=data.rows,
            state=step.first_state(),
            max_iter=batches,
            on="threads:1",
            rows_per_block=rows_per_block(data),
        )
        self.components_ = result.state.components
        self._set_priors()
        self.n_batch_iter_ = getattr(self, "n_batch_iter_", 0) + result.steps
        return self

    def _online_step(
        self, words: int, progress: Any, components: Array | None = None, total: float | None = None
    ) -> OnlineStep:
        seed = self._seed()
        return OnlineStep(
            type(self).__name__,
            self._prior(self.doc_topic_prior),
            self._prior(self.topic_word_prior),
            first_components(seed, self.n_components, words) if components is None else components,
            self.learning_decay,
            self.learning_offset,
            self.batch_size,
            total,
            0 if components is None else getattr(self, "n_batch_iter_", 0),
            self.max_doc_update_iter,
            self.mean_change_tol,
            seed,
            progress,
        )

    def fit_transform(self, X: Any, y: object = None, *, normalize: bool = True) -> Array:
        """Fit, and return the topics of the documents.

        Args:
            X: Documents, an array, a data frame or a sparse matrix.
            y: Has no effect.
            normalize: As of `transform`.

        Raises:
            ValueError: As of `fit`.
            RemoteError: As of `fit`.
        """
        return self.fit(X).transform(X, normalize=normalize)

    def transform(self, X: Any, *, normalize: bool = True) -> Array:
        """Return the share of each topic in each document, an array of shape (n_samples, n_components).

        Args:
            X: Documents, an array, a data frame or a sparse matrix of shape (n_samples, n_features).
            normalize: Whether the shares of a document add up to 1; False: to its number of words and the priors.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X is invalid.
        """
        check_is_fitted(self)
        gammas = infer(self._entries(X), word_shares(self.components_), self._topic_priors())
        return gammas / gammas.sum(axis=1, keepdims=True) if normalize else gammas

    def score(self, X: Any, y: object = None) -> float:
        """Return the sum over held-out words of the logarithm of their probability, by document completion.

        One half of the words of each document, drawn at random, tells its topics. The others are held out: their
        probability is that in the mixture of these topics.

        Args:
            X: As of `transform`; documents that the fit has not seen.
            y: Has no effect.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X is invalid.
        """
        return self._completion(X)[0]

    def perplexity(self, X: Any) -> float:
        """Return the perplexity of held-out words, exp(-score / their number), by document completion as of `score`.

        Args:
            X: As of `score`.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X is invalid, or has no words to hold out.
        """
        total, words = self._completion(X)
        if not words > 0:
            raise ValueError("the documents have no words to hold out: expected some with at least two words")
        return float(np.exp(-total / words))

    def top_words(self, n: int = 10, names: Sequence[str] | None = None) -> list[list[Any]]:
        """Return the most frequent words of each topic, the most frequent first.

        Args:
            n: How many of each topic (10).
            names: The words by column, as of `get_feature_names_out` of a vectorizer (None: `feature_names_in_`, or
                the numbers of columns).

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: There are not as many names as columns.
        """
        top = self._top(n)
        if names is None:
            names = getattr(self, "feature_names_in_", None)
        if names is None:
            return [[int(word) for word in own] for own in top]
        if len(names) != self.n_features_in_:
            raise ValueError(
                f"there are {len(names)} names: expected {self.n_features_in_}, one for each column"
            )
        return [[names[word] for word in own] for own in top]

    def coherence(self, X: Any, n: int = 10, measure: Literal["npmi", "umass"] = "npmi") -> Array:
        """Return how well the most frequent words of each topic go together, an array of shape (n_components,).

        Args:
            X: Documents whose words are counted: a word is in a document, or is not.
            n: How many words of each topic (10).
            measure: `"npmi"`, the mean over pairs of words of the normalized pointwise mutual information, from -1 to
                1; or `"umass"`, of the logarithm of the share of documents with the more frequent word that have both.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: X or an argument is invalid.
        """
        check_is_fitted(self)
        measures = {"npmi": npmi_coherence, "umass": umass_coherence}
        if measure not in measures or n < 2:
            raise ValueError(
                f'measure is {measure!r} and n is {n}: expected "npmi" or "umass", and 2 or more'
            )
        entries = self._entries(X)
        rows = csr_array(
            (entries.counts, entries.words, entries.offsets), shape=(entries.num_rows, self.n_features_in_)
        )
        return measures[measure](rows, self._top(n))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.sparse = True
        return tags

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _top(self, n: int) -> Array:
        check_is_fitted(self)
        return np.argsort(-self.components_, axis=1, kind="stable")[:, :n]

    def _completion(self, X: Any) -> tuple[float, float]:
        """Return the log-likelihood of the held-out words, and their number."""
        check_is_fitted(self)
        seen, held_out = with_halves(self._entries(X), seed=0)
        shares = word_shares(self.components_)
        gammas = infer(seen, shares, self._topic_priors())
        return float(log_likelihoods(held_out, shares, gammas).sum()), float(held_out.counts.sum())

    def _topic_priors(self) -> Array:
        return np.array(np.broadcast_to(self.doc_topic_prior_, len(self.components_)), np.float64)

    def _entries(self, X: Any) -> Entries:
        check_in_memory(X, f"a prediction of {type(self).__name__}", "give an array or a sparse matrix")
        return entries_of(self._documents(X, reset=False).rows["X"])

    def _documents(self, X: Any, *, reset: bool = True) -> TrainingData:
        """Return checked documents; those in memory as a CSR matrix of float64. Raises ValueError."""
        data = training_data(self, X, reset=reset, accept_sparse="csr", dtype=np.float64)
        if not isinstance(data.rows, dict):
            return data
        rows = csr_array(data.rows["X"])
        check_counts(rows.data, type(self).__name__)
        return replace(data, rows={"X": rows})

    def _prior(self, prior: float | str | None) -> float:
        return 1 / self.n_components if prior is None or prior == "auto" else float(prior)

    def _set_priors(self) -> None:
        self.doc_topic_prior_ = self._prior(self.doc_topic_prior)
        self.topic_word_prior_ = self._prior(self.topic_word_prior)

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))


def rows_per_block(data: TrainingData) -> int:
    """Return how many rows a row block has at least, for `iterate`. It does not depend on the tasks."""
    return max(1, ENTRIES_OF_BLOCK * data.num_rows // max(1, data.size))
