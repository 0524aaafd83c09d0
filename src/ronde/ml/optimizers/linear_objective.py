"""`LinearObjective`: a loss of the scores `X @ w`, dense or sparse.

A block is worked through in chunks that stay in the core's cache: scores, losses and the gradient of a chunk take its
rows from memory once. Products are formed in the dtype of X, sums of losses in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.ml.losses import Loss
from ronde.ml.optimizers.objective import Objective

__all__ = ["LinearObjective", "RowChunk", "row_chunks", "transposed"]

CHUNK_BYTES = 512 << 10
LEAST_ROWS, LEAST_ROWS_OF_OUTPUTS = 64, 256  # of a chunk, with one output and with several

Array = NDArray[Any]


class LinearObjective(Objective):
    """The weighted mean loss of linear predictions, with penalties.

        LinearObjective(LogisticLoss(), l2=1e-4)

    The data are a dict: `X`, shape (rows, features), an array or a SciPy CSR matrix; `y`, as the loss says; and
    perhaps `sample_weight`, shape (rows,), not negative.

    w has the shape (features,), or (outputs, features) for a loss with several scores. With an intercept it has one
    column more, the last; no penalty is on it.

    Args:
        loss: What a prediction costs.
        l1: The factor of the sum of absolute values.
        l2: The factor of the sum of squares.
        fit_intercept: Whether w has an intercept.
    """

    def __init__(self, loss: Loss, *, l1: float = 0.0, l2: float = 0.0, fit_intercept: bool = True) -> None:
        self.loss, self.l1, self.l2, self.fit_intercept = loss, l1, l2, fit_intercept

    def loss_and_gradient(self, block: Any, w: Array) -> tuple[float, Array]:
        total, gradient = 0.0, np.zeros(w.shape)
        for chunk in row_chunks(block, _least_rows(w)):
            values, slopes = self.loss.values_and_slopes(chunk.y, self.scores(chunk.X, w))
            total += chunk.sum(values)
            self.add_gradient(gradient, chunk.X, chunk.weighted(slopes))
        return total, gradient

    def losses(self, block: Any, points: Array) -> Array:
        totals = np.zeros(len(points))
        for chunk in row_chunks(block):
            for number, point in enumerate(points):
                totals[number] += chunk.sum(self.loss.values(chunk.y, self.scores(chunk.X, point)))
        return totals

    def total_weight(self, block: Any) -> float:
        self.loss.check_targets(np.asarray(block.y))
        weights = getattr(block, "sample_weight", None)
        return float(block.X.shape[0] if weights is None else np.sum(weights, dtype=np.float64))

    def penalty_factors(self, w: Array) -> Array:
        mask = np.ones_like(w)
        if self.fit_intercept:
            mask[..., -1] = 0
        return mask

    def hessian(self, block: Any, w: Array) -> Array:
        features = w.shape[-1]
        outputs = w.size // features
        result = np.zeros((outputs, features, outputs, features))
        for chunk in row_chunks(block):
            scores = self.scores(chunk.X, w)
            for one in range(outputs):
                direction = np.zeros_like(scores)
                direction.reshape(len(scores), outputs)[:, one] = 1
                product = chunk.weighted(self.loss.curvature_product(chunk.y, scores, direction))
                for other, curvatures in enumerate(product.reshape(len(scores), outputs).T):
                    result[one, :, other] += self._gram(chunk.X, curvatures)
        return result.reshape(w.size, w.size)

    def hessian_product(self, block: Any, w: Array, direction: Array) -> Array:
        result = np.zeros(w.shape)
        for chunk in row_chunks(block, _least_rows(w)):
            scores, along = self.scores(chunk.X, w), self.scores(chunk.X, direction)
            product = self.loss.curvature_product(chunk.y, scores, along)
            self.add_gradient(result, chunk.X, chunk.weighted(product))
        return result

    def scores(self, X: Any, w: Array) -> Array:
        """Return the predictions for some rows, shape (rows,) or (rows, outputs), float64.

        Args:
            X: The rows, shape (rows, columns): an array or a SciPy CSR matrix.
            w: The weights.

        Raises:
            Nothing.
        """
        factors = w[..., :-1] if self.fit_intercept else w
        scores: Array = np.asarray(X @ factors.T.astype(_float_type(X), copy=False), dtype=np.float64)
        if self.fit_intercept:
            scores += w[..., -1]
        return scores

    def add_gradient(self, gradient: Array, X: Any, slopes: Array) -> None:
        """Add to a gradient by w that of a function of the scores of some rows.

        Args:
            gradient: The array to add to, with the shape of w.
            X: The rows, as of `scores`.
            slopes: The derivatives of the function by the scores, with the shape of these.

        Raises:
            Nothing.
        """
        typed = slopes.astype(_float_type(X), copy=False)
        # The product of arrays lies in memory like the gradient, which makes adding it faster.
        by_factors = typed.T @ X if isinstance(X, np.ndarray) else (transposed(X) @ typed).T
        if self.fit_intercept:
            gradient[..., :-1] += by_factors
            gradient[..., -1] += slopes.sum(axis=0)
        else:
            gradient += by_factors

    def _gram(self, X: Any, factors: Array) -> Array:
        """Return Z' diag(factors) Z, where Z is X with a last column of ones if there is an intercept."""
        if not isinstance(X, np.ndarray):
            gram = (X.T @ X.multiply(factors[:, None])).toarray()
        else:
            gram = X.T @ (X * factors[:, None])
        if not self.fit_intercept:
            return np.asarray(gram)
        bordered = np.empty((X.shape[1] + 1, X.shape[1] + 1))
        bordered[:-1, :-1] = gram
        bordered[:-1, -1] = bordered[-1, :-1] = X.T @ factors
        bordered[-1, -1] = factors.sum()
        return bordered


class RowChunk(NamedTuple):
    """Some rows of a block."""

    X: Any
    y: Array
    weights: Array | None

    def sum(self, values: Array) -> float:
        """Return the weighted sum of numbers of the rows."""
        return float(values.sum() if self.weights is None else self.weights @ values)

    def weighted(self, slopes: Array) -> Array:
        """Return the slopes of the rows, each times its weight."""
        if self.weights is None:
            return slopes
        return slopes * (self.weights if slopes.ndim == 1 else self.weights[:, None])


def transposed(X: Any) -> Any:
    """Return the transpose of a sparse block, made once: each step needs it, and SciPy checks each matrix it makes."""
    made = vars(X).get("_ronde_transposed")
    if made is None:
        made = X._ronde_transposed = X.T
    return made


def _float_type(X: Any) -> np.dtype[Any]:
    """Return the dtype for products with X. An integer type would cut off the fractions of weights and slopes."""
    return X.dtype if X.dtype.kind == "f" else np.dtype(np.float64)


def _least_rows(w: Array) -> int:
    """Return how many rows a chunk has at least. With several outputs, adding to the gradient takes a while."""
    return LEAST_ROWS if w.ndim == 1 else LEAST_ROWS_OF_OUTPUTS


def row_chunks(block: Any, least_rows: int = LEAST_ROWS) -> Iterator[RowChunk]:
    """Yield the rows of a block in chunks that depend only on its shape. A sparse block is one chunk."""
    X, y, weights = block.X, block.y, getattr(block, "sample_weight", None)
    rows = X.shape[0]
    if not isinstance(X, np.ndarray):
        if rows:
            yield RowChunk(X, y, weights)
        return
    size = max(least_rows, CHUNK_BYTES // max(1, X.shape[1] * X.itemsize))
    for begin in range(0, rows, size):
        part = slice(begin, begin + size)
        yield RowChunk(X[part], y[part], None if weights is None else weights[part])
