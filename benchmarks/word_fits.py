"""Measures Word2Vec against gensim's: time, CPU time, and how good the vectors are.

    python benchmarks/word_fits.py --words 5000000 --threads 1 2      # with the extra `ml`, and gensim

The text is what the packages of a Debian system ship as documentation and manual pages: sentences of lower-case words,
each sentence once, in random order. `--file` takes another one, with a sentence on each line. Both libraries get the
same lists of words and the same parameters; counting the words is part of the fit.

The table shows the ratios to gensim with one thread, and two measures of quality. `plural`: the share of analogies such
as "file files option options" that the vectors solve, of 2,000 drawn among frequent words that occur with and without
an "s". `wordsim`: Spearman's correlation of the cosines with the similarities of WordSim-353, which gensim brings.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np
from case_tables import print_load
from fit_times import measure_fits
from numpy.typing import NDArray
from scipy.stats import spearmanr

from ronde.ml import Word2Vec

ROOTS = ("/usr/share/doc", "/usr/share/man", "/usr/share/perl")
TEXTS = re.compile(r"(\.gz|\.txt|\.html|\.pod|README\w*|copyright|\.\d)$")
FREQUENT, QUESTIONS = 5000, 2000
Algorithm = Literal["skip-gram", "cbow"]
MODELS: dict[str, tuple[Algorithm, int]] = {
    "skip-gram": ("skip-gram", 5),
    "cbow": ("cbow", 5),
    "skip-gram, tree": ("skip-gram", 0),
}

Model = tuple[Sequence[str], NDArray[np.float32]]  # words and vectors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="a sentence on each line (default: this machine's manuals)")
    parser.add_argument("--words", type=int, default=2_000_000, help="at most (default: 2,000,000)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=1, help="timed fits of each contestant (default: 1)")
    options = parser.parse_args()
    lines = options.file.read_text().splitlines() if options.file else sorted(set(manual_sentences()))
    random.Random(0).shuffle(lines)
    sentences = first_words((line.split() for line in lines), options.words)
    print(f"{sum(map(len, sentences)):,} words in {len(sentences):,} sentences")
    print_load()
    for name in options.models:
        compare(name, sentences, options.threads, options.rounds)


def compare(name: str, sentences: list[list[str]], threads: Sequence[int], rounds: int) -> None:
    """Print the table of one model."""
    algorithm, negative = MODELS[name]
    fits: dict[str, Callable[[], Model]] = {}
    for count in threads:
        fits[f"gensim, {count}"] = partial(fit_gensim, sentences, algorithm, negative, count)
        fits[f"ronde, {count}"] = partial(fit_ronde, sentences, algorithm, negative, count)
    times = measure_fits(fits, rounds)
    rival = times[f"gensim, {threads[0]}"]
    print(
        f"\n{name}\n{'threads':14}{'CPU s':>8}{'s':>8}{'CPU /gensim':>14}{'s /gensim':>12}{'plural':>9}{'wordsim':>9}"
    )
    for contestant, (cpu_s, wall_s, (words, vectors)) in times.items():
        print(
            f"{contestant:14}{cpu_s:8.1f}{wall_s:8.1f}{cpu_s / rival.cpu_s:14.2f}{wall_s / rival.wall_s:12.2f}"
            f"{plural_accuracy(words, vectors):9.3f}{word_similarity(words, vectors):9.3f}",
            flush=True,
        )


def fit_gensim(sentences: list[list[str]], algorithm: str, negative: int, threads: int) -> Model:
    model = import_module("gensim.models").Word2Vec(
        sentences,
        vector_size=100,
        epochs=5,
        workers=threads,
        sg=int(algorithm == "skip-gram"),
        hs=int(not negative),
        negative=negative,
        seed=1,
    )
    return model.wv.index_to_key, model.wv.vectors


def fit_ronde(sentences: list[list[str]], algorithm: Algorithm, negative: int, threads: int) -> Model:
    model = Word2Vec(
        100, epochs=5, algorithm=algorithm, negative=negative, random_state=1, on=f"threads:{threads}"
    ).fit(sentences)
    return model.words_, model.vectors_


def plural_accuracy(words: Sequence[str], vectors: NDArray[np.float32]) -> float:
    frequent = words[:FREQUENT]
    known = set(frequent)
    pairs = [(word, f"{word}s") for word in frequent if len(word) > 3 and f"{word}s" in known]
    draw = random.Random(1)
    questions = [(*draw.choice(pairs), *draw.choice(pairs)) for _ in range(QUESTIONS)]
    model = Word2Vec()
    model._set_vectors(
        np.ascontiguousarray(vectors[:FREQUENT]),
        np.frombuffer("".join(f"{word}\x1f" for word in frequent).encode(), np.uint8),
    )
    return model.analogy_accuracy([question for question in questions if question[0] != question[2]])


def word_similarity(words: Sequence[str], vectors: NDArray[np.float32]) -> float:
    numbers = {word: number for number, word in enumerate(words)}
    directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    judged, cosines = [], []
    for line in files("gensim").joinpath("test/test_data/wordsim353.tsv").read_text().lower().splitlines():
        first, second, mean = (line.split("\t") + ["", ""])[:3]
        if first in numbers and second in numbers:
            judged.append(float(mean))
            cosines.append(float(directions[numbers[first]] @ directions[numbers[second]]))
    return float(spearmanr(judged, cosines).statistic)


def manual_sentences() -> Iterator[str]:
    """Yield the sentences of the texts that packages ship."""
    for root in ROOTS:
        for folder, _, names in os.walk(root):
            for path in [Path(folder, name) for name in names if TEXTS.search(name)]:
                if path.is_symlink():
                    continue
                try:
                    content = path.read_bytes()
                    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode(
                        errors="replace"
                    )
                except OSError:
                    continue
                text = re.sub(r"<[^>]*>", " ", text)
                for sentence in re.split(r"[.!?]\s|\n\s*\n", text.lower()):
                    words = re.findall(r"[a-z]+", sentence)
                    if len(words) >= 4:
                        yield " ".join(words)


def first_words(sentences: Iterator[list[str]], count: int) -> list[list[str]]:
    taken, words = [], 0
    for sentence in sentences:
        taken.append(sentence)
        words += len(sentence)
        if words >= count:
            break
    return taken


if __name__ == "__main__":
    main()
