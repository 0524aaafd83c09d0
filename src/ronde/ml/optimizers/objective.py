"""What an optimizer minimizes: an `Objective` as its user writes it, `LinearObjective`, and its sum over all tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep
from ronde.errors import UsageError
from ronde.ml.losses import Loss

__all__ = ["LinearObjective", "Objective", "SummedObjective", "row_chunks", "transposed"]

Array = NDArray[Any]

CHUNK_BYTES = 512 << 10
LEAST_ROWS, LEAST_ROWS_OF_OUTPUTS = 64, 256  # of a chunk, with one output and with several


class Objective(ABC):
    """A function of weights w that is a sum over rows, and penalties on w. Derive from it and write one method.

        class Poisson(Objective):                      # counts y with the mean exp(X w)
            def loss_and_gradient(self, block, w):
                scores = block.X @ w
                means = np.exp(scores)
                return (means - block.y * scores).sum(), block.X.T @ (means - block.y)

        LBFGS().minimize(Poisson(), {"X": X, "y": y}, start=np.zeros(5), on="local:2").w

    The optimizers minimize

        sum of the rows' losses / sum of the rows' weights + l1 * sum |f_j w_j| + l2 * sum (f_j w_j)^2

    where the factors f are those of `penalty_factors`, usually 1. A block has consecutive rows of the data: an array,
    or for data given as a dict its arrays as attributes. Objects of the class travel to the tasks, by pickle.

    Attributes:
        l1: The factor of the sum of absolute values (0).
        l2: The factor of the sum of squares (0).
    """

    l1: float = 0.0
    l2: float = 0.0

    @abstractmethod
    def loss_and_gradient(self, block: Any, w: Array) -> tuple[float, Array]:
        """Return the sum of the losses of the block's rows, each times its weight, and the gradient of this sum.

        Args:
            block: Some rows of the data.
            w: The weights, float64, of any shape. Leave them as they are.

        Returns:
            A number, and an array of the shape of w. Both without penalties.

        Raises:
            Exception: Any. `minimize` ends with a RemoteError that shows it.
        """

    def losses(self, block: Any, points: Array) -> Array:
        """Return the sums of the losses at several points: a line search asks for them.

        Args:
            block: Some rows of the data.
            points: Several w, along the first axis.

        Raises:
            Exception: As of `loss_and_gradient`.
        """
        return np.array([self.loss_and_gradient(block, point)[0] for point in points])

    def total_weight(self, block: Any) -> float:
        """Return the sum of the weights of the block's rows; unless overridden, their number.

        Args:
            block: Some rows of the data.

        Raises:
            Exception: As of `loss_and_gradient`.
        """
        rows = next(iter(vars(block).values())) if isinstance(block, SimpleNamespace) else block
        return float(rows.shape[0] if hasattr(rows, "shape") else len(rows))

    def penalty_factors(self, w: Array) -> Array:
        """Return the factors of the weights in the penalties, not negative: 1, and 0 for an intercept.

        Args:
            w: The weights.

        Returns:
            An array of the shape of w.

        Raises:
            Exception: As of `loss_and_gradient`.
        """
        return np.ones_like(w)

    def gradient_norm(self, gradient: Array) -> float:
        """Return the number that `tol` limits, and that records have: unless overridden, the largest component.

        Args:
            gradient: Of the objective with its penalties, of the shape of w.

        Raises:
            Exception: As of `loss_and_gradient`.
        """
        return float(np.max(np.abs(gradient), initial=0.0))

    def hessian(self, block: Any, w: Array) -> Array:
        """Return the matrix of second derivatives of the sum of losses. Only `Newton` asks for it, if w is small.

        Args:
            block: Some rows of the data.
            w: The weights.

        Returns:
            Shape (w.size, w.size), in the order of `w.ravel()`.

        Raises:
            NotImplementedError: The objective has none.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method hessian: write it, or use LBFGS, which needs only gradients"
        )

    def hessian_product(self, block: Any, w: Array, direction: Array) -> Array:
        """Return the product of this matrix with a direction. Only `Newton` asks for it, if w is large.

        Args:
            block: Some rows of the data.
            w: The weights.
            direction: Of the shape of w, as the product.

        Raises:
            NotImplementedError: The objective has none.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no method hessian_product: write it, or use LBFGS, which needs only gradients"
        )


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
        """Return the predictions for some rows, shape (rows,) or (rows, outputs), float64. Raises nothing.

        Args:
            X: The rows, shape (rows, columns): an array or a SciPy CSR matrix.
            w: The weights.
        """
        factors = w[..., :-1] if self.fit_intercept else w
        scores: Array = np.asarray(X @ factors.T.astype(_float_type(X), copy=False), dtype=np.float64)
        if self.fit_intercept:
            scores += w[..., -1]
        return scores

    def add_gradient(self, gradient: Array, X: Any, slopes: Array) -> None:
        """Add to a gradient by w that of a function of the scores of some rows. Raises nothing.

        Args:
            gradient: The array to add to, with the shape of w.
            X: The rows, as of `scores`.
            slopes: The derivatives of the function by the scores, with the shape of these.
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
    """Yield the rows of a block in chunks that depend only on its shape. A sparse block is one chunk.

    A chunk stays in the core's cache: its scores, losses and gradient take its rows from memory once. Products are
    formed in the dtype of X, sums of losses in float64.
    """
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


class SummedObjective:
    """An objective in one step of an iteration, over the rows of all tasks: mean loss and penalties.

    Sums are formed block by block in one fixed order, so they have the same bits for any number of tasks. All tasks
    call the same methods in the same order, and get the same numbers.

    Attributes:
        total_weight: The sum of the weights of all rows.
        num_rows: The number of all rows.

    Args:
        objective: The user's.
        c: The step.
        total_weight: As it was in the first step (None: this is the first, compute it).
    """

    def __init__(self, objective: Objective, c: IterationStep, total_weight: float | None) -> None:
        self._objective, self._c = objective, c
        if total_weight is None:
            total_weight = float(c.sum_blocks(objective.total_weight))
            if not total_weight > 0:
                raise UsageError(f"the weights of all rows add up to {total_weight}: expected a sum above 0")
        self.total_weight, self.num_rows = total_weight, c.num_rows

    def loss_and_gradient(self, w: Array) -> tuple[float, Array]:
        """Return mean loss with all penalties, and the gradient of all but the penalty l1."""
        loss, gradient = self._c.sum_blocks(lambda block: self._block_loss_and_gradient(block, w))
        return self._penalized(loss, gradient, self.total_weight, w)

    def gradient_norm(self, gradient: Array) -> float:
        """Return what is compared with the tolerance."""
        return self._objective.gradient_norm(gradient)

    def losses(self, points: Array) -> list[float]:
        """Return mean loss with all penalties at several points."""
        losses = self._c.sum_blocks(
            lambda block: np.asarray(self._objective.losses(block, points), np.float64)
        )
        return [float(loss / self.total_weight + self._penalty(w)) for loss, w in zip(losses, points)]

    def hessian(self, w: Array) -> Array:
        """Return the second derivatives of all but the penalty l1, shape (w.size, w.size)."""
        total = self._c.sum_blocks(lambda block: self._objective.hessian(block, w)) / self.total_weight
        total[np.diag_indices(w.size)] += self._penalty_curvature(w).ravel()
        return np.asarray(total)

    def hessian_product(self, w: Array, direction: Array) -> Array:
        """Return the product of these second derivatives with a direction."""
        total = self._c.sum_blocks(lambda block: self._objective.hessian_product(block, w, direction))
        return np.asarray(total / self.total_weight + self._penalty_curvature(w) * direction)

    def batch_loss_and_gradient(self, w: Array, rows_of: Callable[[int, int], Array]) -> tuple[float, Array]:
        """Return `loss_and_gradient` of some rows instead of all.

        `rows_of`: from a block's number and its number of rows to the indices of those that count. Their sum is divided
        by the mean weight of as many rows, so that a row counts the same in whatever batch it is.
        """
        numbers = iter(self._c.block_range)

        def of_batch(block: Any) -> tuple[float, Array, int]:
            batch = _selected(block, rows_of(next(numbers), _row_count(block)))
            if not _row_count(batch):
                return 0.0, np.zeros(w.shape), 0
            return *self._block_loss_and_gradient(batch, w), _row_count(batch)

        loss, gradient, rows = self._c.sum_blocks(of_batch)
        weight = self.total_weight * (int(rows) or 1) / self.num_rows
        return self._penalized(loss, gradient, weight, w)

    def l1_factors(self, w: Array) -> Array:
        """Return the factor of the absolute value of each weight: 0 where no penalty counts."""
        return self._objective.l1 * self._objective.penalty_factors(w)

    def _block_loss_and_gradient(self, block: Any, w: Array) -> tuple[float, Array]:
        loss, gradient = self._objective.loss_and_gradient(block, w)
        gradient = np.asarray(gradient, np.float64)
        if gradient.shape != w.shape or np.ndim(loss):
            raise UsageError(
                f"{type(self._objective).__name__}.loss_and_gradient returned a loss of shape {np.shape(loss)} and a "
                f"gradient of shape {gradient.shape}: expected a number, and the shape of w, {w.shape}"
            )
        return float(loss), gradient

    def _penalized(self, loss: float, gradient: Array, weight: float, w: Array) -> tuple[float, Array]:
        return float(loss / weight + self._penalty(w)), gradient / weight + self._penalty_curvature(w) * w

    def _penalty(self, w: Array) -> float:
        l1, l2 = self._objective.l1, self._objective.l2
        counted = w * self._objective.penalty_factors(w)
        return float(l1 * np.abs(counted).sum() + l2 * np.square(counted).sum())

    def _penalty_curvature(self, w: Array) -> Array:
        """Return the second derivative of the penalty l2 by each weight."""
        return 2 * self._objective.l2 * np.square(self._objective.penalty_factors(w))


def _row_count(block: Any) -> int:
    rows = next(iter(vars(block).values())) if isinstance(block, SimpleNamespace) else block
    return int(rows.shape[0]) if hasattr(rows, "shape") else len(rows)


def _selected(block: Any, rows: Array) -> Any:
    """Return a block of the rows with these indices."""
    if isinstance(block, SimpleNamespace):
        return SimpleNamespace(**{name: _selected(value, rows) for name, value in vars(block).items()})
    if hasattr(block, "iloc"):
        return block.iloc[rows]
    return [block[row] for row in rows] if isinstance(block, list) else block[rows]
