"""Draws the pictures of the pages about estimators: boosting, forests, topics, words, or all of them.

    python benchmarks/estimator_pictures.py [NAME ...]

They are in docs/static. `topics` and `words` are of the manual pages of this machine (Debian installs thousands).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from topic_fits import manual_texts
from word_fits import first_words, manual_sentences

from ronde import ml

FOLDER = Path(__file__).parents[1] / "docs/static"
NUM_TREES = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300)
PAIRS = "file files|option options|command commands|user users|process processes|line lines|key keys|number numbers"


def boosting() -> Figure:
    """Sums of 1, 5 and 50 trees beside the targets, and the loss of each step."""
    random = np.random.default_rng(0)
    column = np.sort(random.uniform(0, 10, 400))
    truth = np.sin(column) + (column > 6)
    y = truth + random.normal(0, 0.25, len(truth))
    test_y = truth + random.normal(0, 0.25, len(truth))
    model = ml.GradientBoostingRegressor(max_iter=300, max_leaf_nodes=8, early_stopping=False).fit(
        column[:, np.newaxis], y
    )
    sums = list(model.staged_predict(column[:, np.newaxis]))
    figure: Figure
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=(3, 2), layout="constrained")
    left.plot(column, y, ".", color="0.75", markersize=3)
    for count in (1, 5, 50):
        left.plot(column, sums[count - 1], label="1 tree" if count == 1 else f"{count} trees", linewidth=1.5)
    left.set(xlabel="the column", ylabel="target and predictions")
    left.legend(frameon=False)
    for targets, label in (y, "rows of the fit"), (test_y, "other rows"):
        right.plot([((each - targets) ** 2).mean() for each in sums], label=label)
    right.set(xlabel="trees", ylabel="mean squared error", ylim=(0, 0.3))
    right.legend(frameon=False)
    return figure


def forests() -> Figure:
    """Log loss and accuracy of forests of digits over the number of trees."""
    digits = load_digits()
    rows, test_rows, y, test_y = train_test_split(digits.data, digits.target, random_state=0)
    figure: Figure
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    kinds: list[tuple[str, Any]] = [
        ("random forest", ml.RandomForestClassifier),
        ("extremely randomized trees", ml.ExtraTreesClassifier),
    ]
    for label, kind in kinds:
        model = kind(NUM_TREES[0], random_state=0, warm_start=True)
        losses, errors = [], []
        for count in NUM_TREES:
            shares = model.set_params(n_estimators=count).fit(rows, y).predict_proba(test_rows)
            losses.append(log_loss(test_y, shares))
            errors.append(100 * (shares.argmax(axis=1) != test_y).mean())
        left.plot(NUM_TREES, losses, "o-", markersize=3, label=label)
        right.plot(NUM_TREES, errors, "o-", markersize=3, label=label)
    for axes, name in (left, "log loss"), (right, "errors of other rows, %"):
        axes.set(xlabel="trees", ylabel=name, xscale="log")
        axes.set_ylim(bottom=0)
    left.set_ylim(top=3)
    right.legend(frameon=False)
    return figure


def topics() -> Figure:
    """The most probable words of six of twenty topics of manual pages."""
    vectorizer = CountVectorizer(stop_words="english", min_df=20, max_df=0.2)
    counts = vectorizer.fit_transform(manual_texts(4000))
    model = ml.LatentDirichletAllocation(20, topic_word_prior=0.01, max_iter=100, random_state=0).fit(counts)
    words = vectorizer.get_feature_names_out()
    coherent = np.argsort(-model.coherence(counts))[:6]
    figure: Figure
    figure, panels = plt.subplots(2, 3, figsize=(9, 4.4), layout="constrained")
    for topic, axes in zip(coherent, panels.flat, strict=True):
        shares = model.components_[topic] / model.components_[topic].sum()
        best = np.argsort(-shares)[:8]
        axes.barh(words[best][::-1], 100 * shares[best][::-1], color="C0")
        axes.set_title(f"topic {topic}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[1]:
        axes.set_xlabel("share of the topic's words, %")
    return figure


def words() -> Figure:
    """Vectors of singulars and plurals in a plane, whose first axis separates the two."""
    sentences = first_words((text.split() for text in manual_sentences()), 3_000_000)
    model = ml.Word2Vec(vector_size=100, epochs=5, algorithm="cbow", random_state=0).fit(sentences)
    pairs = [pair.split() for pair in PAIRS.split("|")]
    vectors = np.array([model.transform(pair) for pair in pairs], dtype=np.float64)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    plural = (vectors[:, 1] - vectors[:, 0]).mean(axis=0)
    plural /= np.linalg.norm(plural)
    rest = vectors.mean(axis=1)
    rest = rest - rest.mean(axis=0) - np.outer((rest - rest.mean(axis=0)) @ plural, plural)
    meaning = np.linalg.svd(rest, full_matrices=False)[2][0]
    figure: Figure
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (singular, several), ends in zip(pairs, vectors, strict=True):
        x, y = ends @ plural, ends @ meaning
        axes.plot(x, y, "-", color="0.8", zorder=0)
        axes.plot(x, y, "o", color="C0", markersize=4)
        axes.annotate(singular, (x[0], y[0]), (-5, 0), textcoords="offset points", ha="right", va="center")
        axes.annotate(several, (x[1], y[1]), (5, 0), textcoords="offset points", va="center")
    axes.margins(0.2, 0.1)
    axes.set(
        xlabel="mean direction from singular to plural", ylabel="direction in which the pairs differ most"
    )
    axes.set(xticks=[], yticks=[])
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "boosting": boosting,
    "forests": forests,
    "topics": topics,
    "words": words,
}

if __name__ == "__main__":
    plt.rcParams["svg.hashsalt"] = "ronde"  # the same file for the same picture
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]().savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
