"""Time and held-out perplexity of latent Dirichlet allocation: Ronde, scikit-learn, gensim and tomotopy.

    python benchmarks/topic_fits.py --topics 50 --documents 8000        # with the extra `ml`

The documents are the manual pages of this machine (Debian installs thousands), cut into pieces of at most 2,000
characters so that they have different topics. Each contestant finds topics of nine tenths of the documents, with the
same priors and 2 threads, and is stopped several times. Its words' probabilities then tell the perplexity of the
others by document completion, with one function for all (`ronde.ml.topics.inference`): half of the words of a
document, drawn at random, tell its topics, and the other half counts. The time to evaluate does not count.

The first table has the perplexity over time of each contestant, the second the time until Ronde's sampler was as good
as each of the others at its best: CPU time of all processes and threads, time, and the ratios. NPMI coherence is that
of the ten most frequent words of each topic in the held-out documents.
"""

from __future__ import annotations

import argparse
import gzip
import re
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fit_times import cpu_s
from numpy.typing import NDArray

Array = NDArray[Any]

PAGES = Path("/usr/share/man")
PIECE = 2000  # characters
WORD = re.compile(r"[a-z]{3,}")
STEPS = {"ronde": (5, 10, 20, 40, 80, 160, 240, 320), "tomotopy": (5, 10, 20, 40, 80, 160, 320)}
PASSES = (1, 2, 4, 8, 16)


class Point(NamedTuple):
    """A model on the way: CPU time and time so far, in seconds, and the perplexity."""

    iterations: int
    cpu_s: float
    wall_s: float
    perplexity: float
    coherence: float


class Corpus(NamedTuple):
    """Counts of words: documents to fit, and held-out ones."""

    train: Any
    held_out: Any
    topics: int
    threads: int
    doc_topic_prior: float
    topic_word_prior: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topics", type=int, default=50)
    parser.add_argument("--documents", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--limit-s", type=float, default=60, help="CPU time after which a contestant is stopped"
    )
    parser.add_argument("--contestants", nargs="+", default=available())
    options = parser.parse_args()
    counts = manual_pages(options.documents)
    last = counts.shape[0] * 9 // 10
    corpus = Corpus(counts[:last], counts[last:], options.topics, options.threads, 0.1, 0.01)
    print(
        f"{counts.shape[0]} documents, {counts.shape[1]} words, {int(counts.sum())} tokens, {options.topics} topics"
    )
    points = {}
    for name in options.contestants:
        points[name] = list(measured(name, corpus, options.limit_s))
    if points.get("ronde"):
        print_times(points)


def available() -> list[str]:
    """Return the contestants that are installed."""
    others = [name for name in ("gensim", "tomotopy") if find_spec(name)]
    return ["ronde", "ronde online", "scikit-learn", "scikit-learn online", *others]


def manual_pages(count: int) -> Any:
    """Return counts of words in pieces of manual pages, a sparse matrix with the given number of rows."""
    from sklearn.feature_extraction.text import CountVectorizer

    counts = CountVectorizer(min_df=5, max_df=0.2, stop_words="english", dtype=np.float64).fit_transform(
        manual_texts(count)
    )
    return counts[counts.sum(axis=1).A1 >= 10] if hasattr(counts.sum(axis=1), "A1") else counts


def manual_texts(count: int) -> list[str]:
    """Return pieces of manual pages: words of lower-case letters, with spaces between them."""
    pieces: dict[str, None] = {}  # without those that are equal
    paths = sorted(PAGES.glob("man[1-8]/*.gz"))
    for number in np.random.default_rng(0).permutation(len(paths)):
        with gzip.open(paths[number], "rt", encoding="utf-8", errors="ignore") as file:
            text = file.read()
        lines = (
            line for line in text.splitlines() if not line.startswith((".\\", "'\\", ".so", ".if", ".de"))
        )
        words = " ".join(
            WORD.findall(re.sub(r"\\f.|^\.\w+", " ", "\n".join(lines), flags=re.MULTILINE).lower())
        )
        pieces.update(
            (words[begin : begin + PIECE], None) for begin in range(0, min(len(words), 5 * PIECE), PIECE)
        )
        if len(pieces) >= count:
            break
    return list(pieces)[:count]


def measured(name: str, corpus: Corpus, limit_s: float) -> Iterator[Point]:
    """Fit, and print and yield the points."""
    cpu = wall = 0.0
    steps = CONTESTANTS[name](corpus)
    while cpu < limit_s:
        began_cpu_s, began_s = cpu_s(), time.perf_counter()
        try:
            iterations, is_fresh, components = next(steps)
        except StopIteration:
            return
        took_cpu_s, took_s = cpu_s() - began_cpu_s, time.perf_counter() - began_s
        cpu, wall = (took_cpu_s, took_s) if is_fresh else (cpu + took_cpu_s, wall + took_s)
        point = Point(iterations, cpu, wall, *judged(corpus, components))
        print(
            f"{name:20}{point.iterations:5}{point.cpu_s:9.2f} CPU s{point.wall_s:9.2f} s   perplexity "
            f"{point.perplexity:8.1f}   NPMI {point.coherence:6.3f}",
            flush=True,
        )
        yield point


def judged(corpus: Corpus, components: Array) -> tuple[float, float]:
    """Return the perplexity of the held-out documents, and the mean coherence of the topics."""
    from ronde.ml import LatentDirichletAllocation

    model = LatentDirichletAllocation(len(components))
    model.components_, model.doc_topic_prior_ = np.asarray(components, np.float64), corpus.doc_topic_prior
    model.topic_word_prior_, model.n_features_in_ = corpus.topic_word_prior, components.shape[1]
    return model.perplexity(corpus.held_out), float(model.coherence(corpus.held_out).mean())


Steps = Iterator[tuple[int, bool, Array]]  # iterations so far, whether the fit began again, components


def ronde_sampling(corpus: Corpus) -> Steps:
    from ronde.ml import LatentDirichletAllocation

    for steps in STEPS["ronde"]:
        model = LatentDirichletAllocation(
            corpus.topics,
            doc_topic_prior=corpus.doc_topic_prior,
            topic_word_prior=corpus.topic_word_prior,
            max_iter=steps,
            random_state=0,
            on=f"threads:{corpus.threads}",
        )
        yield steps, True, model.fit(corpus.train).components_


def ronde_online(corpus: Corpus) -> Steps:
    from ronde.ml import LatentDirichletAllocation

    for passes in PASSES:
        model = LatentDirichletAllocation(
            corpus.topics,
            doc_topic_prior=corpus.doc_topic_prior,
            topic_word_prior=corpus.topic_word_prior,
            learning_method="online",
            batch_size=512,
            max_iter=passes,
            random_state=0,
            on=f"threads:{corpus.threads}",
        )
        yield passes, True, model.fit(corpus.train).components_


def sklearn(corpus: Corpus, method: str) -> Steps:
    from sklearn.decomposition import LatentDirichletAllocation

    for passes in PASSES:
        model = LatentDirichletAllocation(
            corpus.topics,
            doc_topic_prior=corpus.doc_topic_prior,
            topic_word_prior=corpus.topic_word_prior,
            learning_method=method,
            batch_size=512,
            max_iter=passes,
            random_state=0,
            n_jobs=1,  # which takes less time than 2
        )
        yield passes, True, model.fit(corpus.train).components_


def gensim(corpus: Corpus) -> Steps:
    from gensim.matutils import Sparse2Corpus
    from gensim.models import LdaMulticore

    documents = list(Sparse2Corpus(corpus.train, documents_columns=False))
    documents = [[(int(word), int(count)) for word, count in document] for document in documents]
    model = LdaMulticore(
        num_topics=corpus.topics,
        id2word={word: str(word) for word in range(corpus.train.shape[1])},
        workers=corpus.threads,
        chunksize=512,
        passes=1,
        alpha=[corpus.doc_topic_prior] * corpus.topics,
        eta=corpus.topic_word_prior,
        random_state=0,
        eval_every=None,
    )
    done = 0
    for passes in PASSES:
        for _ in range(passes - done):
            model.update(documents)
        done = passes
        yield passes, False, model.state.get_lambda()


def tomotopy(corpus: Corpus) -> Steps:
    import tomotopy as tp

    model = tp.LDAModel(
        k=corpus.topics, alpha=corpus.doc_topic_prior, eta=corpus.topic_word_prior, seed=0, min_df=0
    )
    rows = corpus.train.tocsr()
    for row in range(rows.shape[0]):
        entries = slice(rows.indptr[row], rows.indptr[row + 1])
        model.add_doc(np.repeat(rows.indices[entries], rows.data[entries].astype(int)).astype(str).tolist())
    model.optim_interval = 0  # the priors stay
    done = 0
    for steps in STEPS["tomotopy"]:
        model.train(steps - done, workers=corpus.threads)
        done = steps
        found = np.array([model.get_topic_word_dist(topic) for topic in range(corpus.topics)])
        components = np.full((corpus.topics, corpus.train.shape[1]), found[found > 0].min())
        components[:, [int(word) for word in model.used_vocabs]] = found
        yield steps, False, components


CONTESTANTS: dict[str, Callable[[Corpus], Steps]] = {
    "ronde": ronde_sampling,
    "ronde online": ronde_online,
    "scikit-learn": lambda corpus: sklearn(corpus, "batch"),
    "scikit-learn online": lambda corpus: sklearn(corpus, "online"),
    "gensim": gensim,
    "tomotopy": tomotopy,
}


def print_times(points: dict[str, list[Point]]) -> None:
    """Print when Ronde's sampler was as good as each of the others was at its best, and the ratios."""
    ours = points["ronde"]
    print(
        f"\n{'as good as':20}{'perplexity':>11}{'its CPU s':>11}{'its s':>9}{'ronde CPU s':>13}{'ronde s':>9}"
        f"{'CPU':>7}{'time':>7}"
    )
    for name, theirs in points.items():
        if name == "ronde" or not theirs:
            continue
        best = min(theirs, key=lambda point: point.perplexity)
        equal = next((point for point in ours if point.perplexity <= best.perplexity), None)
        first = f"{name:20}{best.perplexity:11.1f}{best.cpu_s:11.2f}{best.wall_s:9.2f}"
        if equal is None:
            print(f"{first}   never; its best: {min(point.perplexity for point in ours):.1f}")
            continue
        ratios = f"{best.cpu_s / equal.cpu_s:7.1f}{best.wall_s / equal.wall_s:7.1f}"
        print(f"{first}{equal.cpu_s:13.2f}{equal.wall_s:9.2f}{ratios}")


if __name__ == "__main__":
    main()
