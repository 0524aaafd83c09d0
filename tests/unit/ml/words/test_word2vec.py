"""Word2Vec on sentences with planted groups of words."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed here")

from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils import estimator_checks

from ronde.errors import RemoteError, UsageError
from ronde.ml import Word2Vec, load
from ronde.ml.words.word2vec import warn_if_loss_rose

GROUPS, WORDS = 8, 6


def planted(count: int = 1200, length: int = 10) -> list[list[str]]:
    """Return sentences each of which has words of one group only: "2:5" is word 5 of group 2."""
    random = np.random.default_rng(0)
    words = np.array([[f"{group}:{word}" for word in range(WORDS)] for group in range(GROUPS)])
    return [words[random.integers(GROUPS), random.integers(0, WORDS, length)].tolist() for _ in range(count)]


SENTENCES = planted()


def made(**params: Any) -> Word2Vec:
    return Word2Vec(**{"vector_size": 24, "epochs": 4, "random_state": 0, "on": "threads:1", **params})


def share_of_right_neighbours(model: Word2Vec) -> float:
    right = [model.most_similar(word, topn=1)[0][0][0] == word[0] for word in model.words_]
    return sum(right) / len(right)


@pytest.fixture(scope="module")
def model() -> Word2Vec:
    return made().fit(SENTENCES)


@pytest.mark.parametrize("algorithm", ["skip-gram", "cbow"])
@pytest.mark.parametrize("negative", [5, 0])
def test_words_of_a_group_are_neighbours_for_any_number_of_tasks(algorithm: str, negative: int) -> None:
    params = dict(algorithm=algorithm, negative=negative, learning_rate=0.05, epochs=6)
    model = made(**params).fit(SENTENCES)
    assert share_of_right_neighbours(model) > 0.95
    for tasks in (2, 3, 4):
        other = made(**params, on=f"threads:{tasks}").fit(SENTENCES)
        assert other.vectors_.tobytes() == model.vectors_.tobytes()
        assert other.history_ == model.history_


def test_the_loss_falls(model: Word2Vec) -> None:
    losses = [record["loss"] for record in model.history_]
    assert losses[-1] < 0.7 * losses[0]
    assert model.history_[-1]["epoch"] == 4
    rates = [record["learning_rate"] for record in model.history_]
    assert rates == sorted(rates, reverse=True)


def test_many_shards_with_few_words_do_not_diverge() -> None:
    random = np.random.default_rng(0)
    sentences = [[f"w{word}" for word in row] for row in random.integers(0, 25, (12_000, 8))]
    model = made(min_count=1, n_shards=1024, words_per_step=10**9, sample=0).fit(sentences)
    assert np.abs(model.vectors_).max() < 4


def test_a_rising_loss_is_a_warning() -> None:
    progress = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.5}]
    with pytest.warns(RuntimeWarning, match=r"the loss rose from 2\.00 .* to 2\.50 .* smaller learning_rate"):
        warn_if_loss_rose(progress)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_loss_rose(progress[::-1])
        warn_if_loss_rose(progress[:1])


def test_seeds_matter(model: Word2Vec) -> None:
    assert made().fit(iter(SENTENCES)).vectors_.tobytes() == model.vectors_.tobytes()
    assert made(random_state=1).fit(SENTENCES).vectors_.tobytes() != model.vectors_.tobytes()


def test_a_file_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "sentences.txt"
    path.write_text("\n".join(" \t".join(sentence) for sentence in SENTENCES))
    fits = [made(on=on).fit(path) for on in ("threads:1", "threads:3")]
    assert fits[0].vectors_.tobytes() == fits[1].vectors_.tobytes()
    assert share_of_right_neighbours(fits[0]) == 1
    path.write_text("".join(f"a{mark}b b\n" for mark in "\x1c\x1d\x1e\x1f"))
    assert dict(zip((model := made(min_count=1).fit(path)).words_, model.counts_.tolist())) == {
        "b": 8,
        "a": 4,
    }
    path.write_bytes(b"caf\xe9 mot " * 5)
    with pytest.raises(ValueError, match=r"the word b'caf\\xe9' is not UTF-8: expected a text in UTF-8"):
        made().fit(path)
    path.write_text("")
    with pytest.raises(ValueError, match="is empty: expected a sentence on each line"):
        made().fit(path)


@pytest.mark.parametrize("has_texts", [False, True])
def test_a_column_of_parquet_files(tmp_path: Path, has_texts: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="PyArrow is not installed here")
    parquet = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("fsspec", reason="fsspec is not installed here")
    column = [" ".join(sentence) for sentence in SENTENCES] if has_texts else SENTENCES
    table = pyarrow.table({"number": range(len(column) + 1), "words": [*column, None]})
    parquet.write_table(table, tmp_path / "sentences.parquet", row_group_size=500)
    fits = [made(on=on).fit(tmp_path, column="words") for on in ("threads:1", "threads:3")]
    assert fits[0].vectors_.tobytes() == fits[1].vectors_.tobytes()
    assert fits[0].counts_.sum() == sum(map(len, SENTENCES))
    assert share_of_right_neighbours(fits[0]) == 1
    if not has_texts:
        parquet.write_table(pyarrow.table({"words": [["a", "b\x1fc"]] * 9}), tmp_path / "sentences.parquet")
        with pytest.raises(RemoteError, match=r"contains the character U\+001E or U\+001F"):
            made().fit(tmp_path, column="words")
        return
    with pytest.raises(
        UsageError, match=r"'number' of .* has the type int64: expected texts or lists of texts"
    ):
        made().fit(tmp_path, column="number")
    with pytest.raises(UsageError, match="has the type None"):
        made().fit(tmp_path, column="none")


def test_the_vocabulary() -> None:
    model = made(min_count=2, sample=0).fit(
        [["b", "a", "a", "rare"], [], ["c c", "b", "c c", "ä"], ["a", "ä"]]
    )
    assert model.words_ == ["a", "b", "c c", "ä"]  # by count, then by their bytes
    assert model.counts_.tolist() == [3, 2, 2, 2]
    assert model.vocabulary_ == {"a": 0, "b": 1, "c c": 2, "ä": 3}
    assert "ä" in model
    assert "rare" not in model


def test_similarity_and_vectors(model: Word2Vec) -> None:
    vectors = model.transform(["0:1", "0:2"])
    assert vectors.shape == (2, 24)
    expected = vectors[0] @ vectors[1] / np.linalg.norm(vectors[0]) / np.linalg.norm(vectors[1])
    assert model.similarity("0:1", "0:2") == pytest.approx(float(expected), abs=1e-6)
    assert model.similarity("0:1", "0:2") > model.similarity("0:1", "5:2") + 0.3
    ((word, cosine),) = model.most_similar(vectors[0], topn=1)
    assert (word, round(cosine, 5)) == ("0:1", 1)


def test_analogies(tmp_path: Path) -> None:
    vectors = np.eye(5, dtype=np.float32)
    words = {
        "man": vectors[0],
        "woman": vectors[1],
        "king": vectors[0] + vectors[2],
        "queen": vectors[1] + vectors[2],
    }
    path = tmp_path / "vectors"
    path.write_text(
        "5 5\n"
        + "".join(f"{word} {' '.join(map(str, vector))}\n" for word, vector in words.items())
        + "noise 0 0 0 0 1\n"
    )
    model = Word2Vec.load_vectors(path)
    assert model.most_similar(["king", "woman"], ["man"], topn=1)[0][0] == "queen"
    assert [word for word, _ in model.most_similar("man", topn=99)] == ["king", "woman", "queen", "noise"]
    questions = tmp_path / "questions"
    questions.write_text(
        ": titles\nman woman king queen\nman king woman queen\nman woman king noise\na b c d\n"
    )
    assert model.analogy_accuracy(questions) == pytest.approx(2 / 3)
    assert model.analogy_accuracy([("man", "woman", "king", "queen")]) == 1
    with pytest.raises(ValueError, match="no question consists of four known words"):
        model.analogy_accuracy([("a", "b", "c", "d")])


@pytest.mark.parametrize("binary", [False, True])
def test_vectors_in_files(model: Word2Vec, tmp_path: Path, binary: bool) -> None:
    path = tmp_path / "vectors"
    model.save_vectors(path, binary=binary)
    other = Word2Vec.load_vectors(path, binary=binary)
    assert other.words_ == model.words_
    assert other.vectors_.tobytes() == model.vectors_.tobytes()
    assert other.most_similar("0:1") == model.most_similar("0:1")
    with pytest.raises(UsageError, match="has not the"):
        Word2Vec.load_vectors(path, binary=not binary)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="has not the"):
        Word2Vec.load_vectors(path, binary=binary)
    path.write_bytes(b"1000000 1000000\n" + whole)
    with pytest.raises(UsageError, match="do not fit into"):
        Word2Vec.load_vectors(path, binary=binary)


def test_words_with_spaces_have_no_file_of_vectors(tmp_path: Path) -> None:
    model = made(min_count=1).fit([["new york", "city"]])
    with pytest.raises(ValueError, match="'new york' is empty or contains white space of ASCII"):
        model.save_vectors(tmp_path / "vectors")
    assert not list(tmp_path.iterdir())
    other_space = made(min_count=1).fit([["20\u00a0km", "à\u2003b"]])  # it separates no words in the format
    for binary in (False, True):
        other_space.save_vectors(tmp_path / "vectors", binary=binary)
        assert Word2Vec.load_vectors(tmp_path / "vectors", binary=binary).words_ == other_space.words_
    model.save(tmp_path / "model")
    assert load(tmp_path / "model").words_ == model.words_


def test_a_saved_model(model: Word2Vec, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    other = load(tmp_path / "model")
    assert other.words_ == model.words_
    assert other.history_ == model.history_
    assert other.get_params() == {**model.get_params(), "on": None}
    assert other.most_similar("0:1") == model.most_similar("0:1")


def test_a_damaged_model(model: Word2Vec, tmp_path: Path) -> None:
    other = clone(model)
    other.vectors_, other.word_bytes_ = model.vectors_, model.word_bytes_[:-5]
    other.save(tmp_path / "model")
    with pytest.raises(UsageError, match="does not contain 48 different words"):
        load(tmp_path / "model").most_similar("0:1")


@pytest.mark.parametrize(
    ("sentences", "error"),
    [
        (["a text"], "a sentence is of type str, and not a list of words"),
        ([[1, 2]], "a sentence is not a list of words"),
        (5, "the sentences are of type int"),
        ([], "there are no sentences"),
        ([["a\x1fb"]], r"contains the character U\+001E or U\+001F"),
        ([["a", "b"]], "no word occurs min_count=5 times"),
    ],
)
def test_wrong_sentences(sentences: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        made().fit(sentences)


def test_wrong_words(model: Word2Vec) -> None:
    with pytest.raises(ValueError, match="the word 'unknown' is unknown: it did not occur min_count=5 times"):
        model.most_similar("unknown")
    with pytest.raises(ValueError, match=r"pass \['0:1'\]"):
        model.transform("0:1")
    with pytest.raises(ValueError, match="expects a word at least"):
        model.most_similar()


def test_the_conventions_of_scikit_learn(model: Word2Vec) -> None:
    with pytest.raises(NotFittedError):
        made().transform(["a"])
    with pytest.raises(NotFittedError):
        made().similarity("a", "b")
    with pytest.raises(NotFittedError):
        _ = made().words_
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    with pytest.raises(ValueError, match="window"):
        made(window=0).fit(SENTENCES)
    before = model.get_params()
    assert model.set_params(window=7).window == 7
    model.set_params(**before)


def test_a_sentence_may_be_any_sequence() -> None:
    def batches() -> Iterator[tuple[str, ...]]:
        yield from map(tuple, SENTENCES)

    assert made().fit(batches()).vectors_.tobytes() == made().fit(SENTENCES).vectors_.tobytes()


# Those that need no X. The others fit arrays of numbers, which are no sentences.
@pytest.mark.parametrize(
    "check",
    [
        "check_estimator_cloneable",
        "check_estimator_repr",
        "check_estimator_tags_renamed",
        "check_estimators_unfitted",
        "check_get_params_invariance",
        "check_mixin_order",
        "check_no_attributes_set_in_init",
        "check_parameters_default_constructible",
        "check_set_params",
        "check_valid_tag_types",
    ],
)
def test_scikit_learns_checks_that_apply_to_sentences(check: str) -> None:
    getattr(estimator_checks, check)("Word2Vec", Word2Vec())
