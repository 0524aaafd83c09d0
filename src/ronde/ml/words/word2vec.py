"""`Word2Vec`: vectors of words. Its step is in `training`, which tasks import without scikit-learn."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import check_is_fitted

from ronde.comqueue import iterate
from ronde.errors import UsageError
from ronde.ml.base import DistributedEstimator, fitting
from ronde.ml.fitted_forms import ArrayForm, FittedForm
from ronde.ml.tasks import SingleThreadedStep, can_lose_a_task, place_of
from ronde.ml.words.sentences import as_shards
from ronde.ml.words.training import SEPARATOR, WordOptions, WordStep, drop_outputs, word_that_is_not_utf8
from ronde.ml.words.vector_files import read_vectors, write_vectors

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = ["Word2Vec"]

Vectors = NDArray[np.float32]
Word = str | Vectors

TEXT_OF_WORK = (
    32  # bytes for a number of `place_of`: with less than 16 MB, exchanges cost what a second thread saves
)
MOST_STEPS = (1 << 31) - 1  # the fit ends itself after its epochs
STEPS_OF_CHECKPOINT = 50  # it contains the vectors and outputs: an epoch of a small text
QUESTIONS_AT_ONCE = 256
RISE_OF_LOSS = 1.05  # that is no noise


class Word2Vec(DistributedEstimator):
    """Finds a vector for each word, such that words that occur near the same words have similar vectors.

        model = Word2Vec(vector_size=100, random_state=0, on="local:2").fit(sentences)
        model.most_similar("king"), model.similarity("king", "queen"), model.transform(["king"])

    A logistic model predicts from the vectors of the words around a word which word it is (`"cbow"`), or from each of
    them alone (`"skip-gram"`), as in Mikolov et al., "Distributed representations of words and phrases" (2013).

    The sentences are divided into `n_shards` shards. In each step, all shards are trained on some of their sentences
    from the same vectors, and the changes are added up. The result has the same bits for any number of tasks, up to one
    for each shard, and wherever they run.

    Args:
        vector_size: The number of dimensions of a vector (100).
        window: How many words before and after a word count at most (5).
        min_count: Words that occur less often are left out (5).
        negative: How many words that do not occur are drawn for each one that does (5). 0: hierarchical softmax, where
            a word is a sequence of decisions in a Huffman tree.
        algorithm: `"skip-gram"` or `"cbow"` (`"skip-gram"`).
        epochs: How often each sentence is read (5).
        learning_rate: The size of a step at the begin (0.025), from which it falls evenly
        min_learning_rate: to this one (0.0001).
        sample: Words whose share of all words is larger than about this are left out at random, the more frequent the
            more often (0.001). 0: none.
        ns_exponent: Words are drawn for `negative` by their frequency to this power (0.75).
        shrink_windows: Whether the window of each word has a random size from 1 to `window`, so that near words count
            more (True).
        n_shards: The number of shards, at most; a fit has no use for more tasks (8).
        words_per_step: After how many words of all shards the changes are added up (None: 100,000, or fewer for few
            sentences). With more, less is sent, and the vectors are slightly worse.
        random_state: An int for the same result in each fit; or a `numpy.random.RandomState`.
        verbose: Whether to print a line for each step to standard error (0).
        on: Where the tasks run, as of `ronde.comqueue.iterate`: `"local:2"`, `"spark:8"` (None: the ranks of this job,
            or threads of this process).

    Attributes:
        vectors_: The vectors, a float32 array of shape (n_words, vector_size), the most frequent word first.
        words_: The words, as a list in that order.
        vocabulary_: The row of each word in `vectors_`, as a dict.
        counts_: How often each word occurs, an int64 array. Missing in models of `load_vectors`.
        history_: A record for each step: `step`, `loss` (the mean loss of a prediction, from a sample of the words),
            `epoch`, `learning_rate`.
        word_bytes_: The words in UTF-8, each with the byte 0x1F behind it: what `save` writes.
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **DistributedEstimator._parameter_constraints,
        "vector_size": [Interval(Integral, 1, None, closed="left")],
        "window": [Interval(Integral, 1, 10_000, closed="both")],
        "min_count": [Interval(Integral, 1, None, closed="left")],
        "negative": [Interval(Integral, 0, 1000, closed="both")],
        "algorithm": [StrOptions({"skip-gram", "cbow"})],
        "epochs": [Interval(Integral, 1, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "min_learning_rate": [Interval(Real, 0, None, closed="neither")],
        "sample": [Interval(Real, 0, None, closed="left")],
        "ns_exponent": [Interval(Real, None, None, closed="neither")],
        "shrink_windows": ["boolean"],
        "n_shards": [Interval(Integral, 1, 4096, closed="both")],
        "words_per_step": [None, Interval(Integral, 1, None, closed="left")],
        "random_state": ["random_state"],
    }
    _fitted_forms: ClassVar[dict[str, FittedForm]] = {
        **{name: form for name, form in DistributedEstimator._fitted_forms.items() if "features" not in name},
        "vectors_": ArrayForm(("words", "dimensions"), ("float32",), is_needed=True),
        "counts_": ArrayForm(("words",), ("int64",)),
        "word_bytes_": ArrayForm(("bytes",), ("uint8",), is_needed=True),
    }

    vectors_: Vectors

    def __init__(
        self,
        vector_size: int = 100,
        *,
        window: int = 5,
        min_count: int = 5,
        negative: int = 5,
        algorithm: Literal["skip-gram", "cbow"] = "skip-gram",
        epochs: int = 5,
        learning_rate: float = 0.025,
        min_learning_rate: float = 0.0001,
        sample: float = 1e-3,
        ns_exponent: float = 0.75,
        shrink_windows: bool = True,
        n_shards: int = 8,
        words_per_step: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
        on: str | Cluster | None = None,
    ) -> None:
        self.vector_size = vector_size
        self.window = window
        self.min_count = min_count
        self.negative = negative
        self.algorithm = algorithm
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.min_learning_rate = min_learning_rate
        self.sample = sample
        self.ns_exponent = ns_exponent
        self.shrink_windows = shrink_windows
        self.n_shards = n_shards
        self.words_per_step = words_per_step
        self.random_state = random_state
        self.verbose = verbose
        self.on = on

    @fitting
    def fit(
        self,
        X: str | os.PathLike[str] | Iterable[Sequence[str]],
        y: object = None,
        column: str | None = None,
    ) -> Self:
        """Find the vectors; return the estimator.

        Args:
            X: Sentences: an iterable of lists of words, which is read once; or the path of a file of UTF-8 with a
                sentence on each line and white space between words. Tasks read the file where they run.
            y: Has no effect.
            column: The name of a column of texts or of lists of words. X is then the path or fsspec URL of Parquet
                files (None: X is no Parquet file).

        Raises:
            ValueError: No word occurs `min_count` times, a word of a file is not UTF-8, or X or a parameter is invalid.
            UsageError: There are no Parquet files, or their column has another type.
            OSError: The file cannot be read.
            RemoteError: A task failed, or has ended.
        """
        shards, is_lines = as_shards(X, self.n_shards, column)
        size = sum(map(len, shards)) if isinstance(shards, list) else shards.size
        progress = self._progress(None, {"X": X, "y": y})
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        step = WordStep(self._options(), is_lines, seed, progress)
        place = place_of(self.on, size // TEXT_OF_WORK)
        state = iterate(
            SingleThreadedStep(step),
            data=shards,
            state=step.first_state(),
            max_iter=MOST_STEPS,
            on=place,
            checkpoint_every=STEPS_OF_CHECKPOINT if can_lose_a_task(place) else None,
            finish=drop_outputs,
        ).state
        if state.vectors is None:
            if (word := word_that_is_not_utf8(state.words)) is not None:
                raise ValueError(f"the word {word!r} is not UTF-8: expected a text in UTF-8")
            raise ValueError(
                f"no word occurs min_count={self.min_count} times: give more sentences, or a smaller min_count"
            )
        self._set_vectors(state.vectors[:, : self.vector_size].copy(), state.words)
        self.counts_ = state.counts
        self._end_fit(progress, state.records)
        warn_if_loss_rose(state.records)
        return self

    @property
    def words_(self) -> list[str]:
        """The words, as a list. Raises NotFittedError, or UsageError if those of a file of `save` are damaged."""
        return list(self.vocabulary_)

    @property
    def vocabulary_(self) -> dict[str, int]:
        """The row of each word in `vectors_`. Raises as `words_` does."""
        check_is_fitted(self, "vectors_")
        if "_vocabulary" not in vars(self):
            try:
                words = self.word_bytes_.tobytes().decode(errors="surrogatepass").split(SEPARATOR.decode())
            except ValueError:
                words = []
            vocabulary = {word: number for number, word in enumerate(words[:-1])}
            if len(vocabulary) != len(self.vectors_):
                raise UsageError(f"word_bytes_ does not contain {len(self.vectors_)} different words")
            self._vocabulary = vocabulary
        return self._vocabulary

    def __contains__(self, word: object) -> bool:
        return word in self.vocabulary_

    def transform(self, X: Iterable[str]) -> Vectors:
        """Return the vectors of words, a float32 array of shape (n_words, vector_size).

        Args:
            X: The words.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: A word is unknown, or X is a single text.
        """
        check_is_fitted(self, "vectors_")
        if isinstance(X, str):
            raise ValueError(f"transform expects a list of words, and X is a text: pass [{X!r}]")
        vectors: Vectors = self.vectors_[self._numbers(X)]
        return vectors

    def similarity(self, word: str, other: str) -> float:
        """Return the cosine of the angle between the vectors of two words.

        Args:
            word: A word.
            other: Another one.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: A word is unknown.
        """
        first, second = self._normed()[self._numbers([word, other])]
        return float(first @ second)

    def most_similar(
        self, positive: Word | Sequence[Word] = (), negative: Word | Sequence[Word] = (), topn: int = 10
    ) -> list[tuple[str, float]]:
        """Return the words with the most similar vectors to a sum, with the cosines, the most similar first.

            model.most_similar(["king", "woman"], ["man"], topn=1)    # [("queen", 0.8)]

        Args:
            positive: A word, or several, whose directions are added up. Vectors may take the place of words.
            negative: Those whose directions are subtracted.
            topn: How many words to return. None of them is one of the given words.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: A word is unknown, or none is given.
        """
        normed = self._normed()
        groups = [
            [each] if isinstance(each, str | np.ndarray) else list(each) for each in (positive, negative)
        ]
        if not any(groups):
            raise ValueError("most_similar expects a word at least: pass it as `positive`")
        target = np.zeros(normed.shape[1], np.float32)
        for group, sign in zip(groups, (1, -1)):
            for each in group:
                target += sign * (
                    _directions(each[None])[0] if isinstance(each, np.ndarray) else self._direction(each)
                )
        cosines = normed @ _directions(target[None])[0]
        given = self._numbers(each for group in groups for each in group if isinstance(each, str))
        cosines[given] = -np.inf
        found = _largest(cosines, min(topn, len(cosines) - len(set(given.tolist()))))
        words = self.words_
        return [(words[number], float(cosines[number])) for number in found]

    def analogy_accuracy(self, questions: str | os.PathLike[str] | Iterable[Sequence[str]]) -> float:
        """Return the share of analogies that the vectors solve: `d` is the nearest word to `b - a + c`.

        Args:
            questions: Tuples of four words (a, b, c, d); or the path of a file with four words on each line, where
                lines that begin with ":" are titles. Those with an unknown word do not count.

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: No question consists of known words.
            OSError: The file cannot be read.
        """
        rows, vocabulary = self._normed(), self.vocabulary_
        quads = [
            [vocabulary[word] for word in question]
            for question in _questions(questions)
            if all(word in vocabulary for word in question)
        ]
        if not quads:
            raise ValueError("no question consists of four known words")
        right = 0
        for begin in range(0, len(quads), QUESTIONS_AT_ONCE):
            a, b, c, d = np.array(quads[begin : begin + QUESTIONS_AT_ONCE]).T
            cosines = (rows[b] - rows[a] + rows[c]) @ rows.T
            for given in (a, b, c):
                cosines[np.arange(len(a)), given] = -np.inf
            right += int((cosines.argmax(axis=1) == d).sum())
        return right / len(quads)

    def save_vectors(self, path: str | os.PathLike[str], binary: bool = False) -> None:
        """Write the vectors to a file in the format of word2vec, which gensim's KeyedVectors and others load.

        Args:
            path: The file. One that exists is replaced when the new one is complete.
            binary: Whether it is the binary format (False: text).

        Raises:
            NotFittedError: `fit` has not been called.
            ValueError: A word is empty or contains white space of ASCII.
            OSError: The file cannot be written.
        """
        write_vectors(path, self.words_, self.vectors_, binary)

    @classmethod
    def load_vectors(cls, path: str | os.PathLike[str], binary: bool = False) -> Self:
        """Return an estimator with the vectors of a file in the format of word2vec.

        Args:
            path: The file.
            binary: Whether it has the binary format (False: text).

        Raises:
            UsageError: The file has another format.
            OSError: The file cannot be read.
        """
        words, vectors = read_vectors(path, binary)
        model = cls(vector_size=vectors.shape[1])
        text = "".join([word + SEPARATOR.decode() for word in words])
        model._set_vectors(vectors, np.frombuffer(text.encode(errors="surrogatepass"), np.uint8))
        return model

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.string = True
        tags.no_validation = True
        return tags

    def _options(self) -> WordOptions:
        return WordOptions(**{name: getattr(self, name) for name in WordOptions.__dataclass_fields__})

    def _set_vectors(self, vectors: Vectors, word_bytes: NDArray[np.uint8]) -> None:
        self.vectors_, self.word_bytes_ = vectors, word_bytes
        for cached in ("_vocabulary", "_directions", "counts_", "history_"):  # of an earlier fit
            self.__dict__.pop(cached, None)

    def _numbers(self, words: Iterable[str]) -> NDArray[np.int64]:
        vocabulary = self.vocabulary_
        try:
            return np.array([vocabulary[word] for word in words], np.int64)
        except KeyError as error:
            raise ValueError(
                f"the word {error.args[0]!r} is unknown: it did not occur min_count={self.min_count} times in the "
                "sentences of the fit"
            ) from None

    def _normed(self) -> Vectors:
        """Return the vectors of length 1 with the same directions."""
        check_is_fitted(self, "vectors_")
        if "_directions" not in vars(self):
            self._directions = _directions(self.vectors_)
        return self._directions

    def _direction(self, word: str) -> Vectors:
        direction: Vectors = self._normed()[self._numbers([word])[0]]
        return direction


def warn_if_loss_rose(records: Sequence[Mapping[str, Any]]) -> None:
    """Warn if the loss of the last step exceeds that of the first one by more than its noise."""
    if not records or records[-1]["loss"] <= RISE_OF_LOSS * records[0]["loss"]:
        return
    first, last = records[0]["loss"], records[-1]["loss"]
    warnings.warn(
        f"the loss rose from {first:.2f} in the first step to {last:.2f} in the last one: the vectors may have no use; "
        "choose fewer n_shards, fewer words_per_step or a smaller learning_rate",
        RuntimeWarning,
        stacklevel=4,
    )


def _directions(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions: Vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return directions


def _largest(values: Vectors, count: int) -> list[int]:
    """Return the numbers of the largest values, in descending order; of equal values, in ascending order."""
    count = max(count, 0)
    if count < len(values):
        candidates = np.flatnonzero(
            values >= np.partition(values, len(values) - count - 1)[len(values) - count - 1]
        )
    else:
        candidates = np.arange(len(values))
    numbers: list[int] = candidates[np.argsort(-values[candidates], kind="stable")][:count].tolist()
    return numbers


def _questions(questions: str | os.PathLike[str] | Iterable[Sequence[str]]) -> Iterator[Sequence[str]]:
    if not isinstance(questions, str | os.PathLike):
        yield from questions
        return
    with open(questions, encoding="utf-8") as file:
        for line in file:
            if not line.startswith(":"):
                yield line.split()
