"""The rows of a fit as its tasks get them: checked, mapped and counted.

A source is that of `ronde.comqueue.read`, or another `RowSource`. Its rows are a 2-d array, or have the attributes `X`,
and perhaps `y` and `sample_weight`: `read("clicks/", columns={"X": None, "y": "clicked"})`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ronde.comqueue import IterationStep, LocatedRows, RowSource, TaskGroup, iterate
from ronde.data.rows import NamedArrays, StreamedSource
from ronde.ml.tasks import place_of

if TYPE_CHECKING:
    from ronde.launch.clusters.cluster import Cluster

__all__ = [
    "ClassWeights",
    "HeldRows",
    "SparseRows",
    "checked_parts",
    "is_sparse",
    "mapped_rows",
    "survey",
    "weights_by_class",
    "without_duplicates",
]

Array = NDArray[Any]
Parts = dict[str, Any]

PARTS = ("X", "y", "sample_weight", "qid")
ClassWeights = tuple[Array, Array]  # the classes, sorted, and the sum of the rows' weights of each


class MappedRows:
    """A source whose rows are those of another one, mapped.

    Args:
        source: The other one.
        function: Gets and returns the parts of some rows by name. It travels to the tasks.
    """

    def __init__(self, source: RowSource, function: Callable[[Parts], Parts]) -> None:
        self.num_rows = source.num_rows
        self.in_memory = getattr(source, "in_memory", True)
        self._source, self._function = source, function

    def __repr__(self) -> str:
        return f"<MappedRows of {self._source!r}>"

    def load(self, begin: int, end: int) -> Any:
        """Return rows with the attributes X, y and sample_weight."""
        return self._mapped(self._source.load(begin, end))

    def stream(self, blocks: Sequence[range]) -> Iterator[Any]:
        """Yield the rows of consecutive ranges."""
        if isinstance(self._source, StreamedSource):
            yield from map(self._mapped, self._source.stream(blocks))
        else:
            for block in blocks:
                yield self.load(block.start, block.stop)

    def check_memory(self, rows: int, tasks_here: int) -> str:
        """Return why a task cannot hold this number of rows in memory; "" if it can."""
        if isinstance(self._source, StreamedSource):
            return self._source.check_memory(rows, tasks_here)
        return "" if self.in_memory else "`in_memory` of their source is False"

    def _mapped(self, rows: Any) -> NamedArrays:
        return NamedArrays(self._function(vars(rows) if isinstance(rows, NamedArrays) else {"X": rows}))


class HeldRows:
    """A source of rows in the memory of this process. Tasks that are its threads share them, and must not change them.

    Args:
        parts: Arrays or sparse matrices by name.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts
        self.num_rows = int(next(iter(parts.values())).shape[0])

    def load(self, begin: int, end: int) -> NamedArrays:
        """Return rows with the parts as attributes. Arrays are views."""
        if (begin, end) == (0, self.num_rows):  # some of a sparse matrix would be a copy
            return NamedArrays(self._parts)
        return NamedArrays({name: part[begin:end] for name, part in self._parts.items()})


class SparseRows(MappedRows):
    """A source whose rows are those of a source of sparse matrices, as CSR without duplicates.

    Args:
        source: The other one.
        dtype: The dtype of the rows.
    """

    def __init__(self, source: RowSource, dtype: np.dtype[Any]) -> None:
        super().__init__(source, dict)
        self._dtype = dtype

    def _mapped(self, rows: Any) -> Any:
        return without_duplicates(rows.astype(self._dtype, copy=False))


class MappedLocatedRows:
    """Rows that lie on a cluster, mapped there. Args: as of `MappedRows`."""

    def __init__(self, rows: LocatedRows, function: Callable[[Parts], Parts]) -> None:
        self._rows, self._function = rows, function

    def __repr__(self) -> str:
        return f"<MappedLocatedRows of {self._rows!r}>"

    def place(self, cluster: Cluster) -> None:
        """Have the tasks of the cluster run where the rows are."""
        self._rows.place(cluster)

    def opener(self) -> Callable[[TaskGroup], RowSource]:
        """Return a function that each task calls for its rows."""
        return partial(_open_mapped, self._rows.opener(), self._function)


def _open_mapped(
    open_rows: Callable[[TaskGroup], RowSource], function: Callable[[Parts], Parts], group: TaskGroup
) -> MappedRows:
    return MappedRows(open_rows(group), function)


def mapped_rows(
    source: RowSource | LocatedRows, function: Callable[[Parts], Parts]
) -> MappedRows | MappedLocatedRows:
    """Return the rows of a source, mapped by the tasks. `function`: as of `MappedRows`."""
    if isinstance(source, LocatedRows):
        return MappedLocatedRows(source, function)
    return MappedRows(source, function)


def checked_parts(parts: Parts, X_is_finite: bool = True) -> Parts:
    """Return X, y and sample_weight of some rows, X as a C-contiguous array or a CSR matrix without duplicates.

    `X_is_finite`: whether X must not contain NaN or infinity. Raises ValueError if they are invalid.
    """
    if unknown := set(parts) - set(PARTS):
        raise ValueError(
            f"the rows have the parts {sorted(unknown)}: expected X, and perhaps y, sample_weight and qid"
        )
    for name, part in parts.items():
        if part.dtype.kind == "c":
            raise ValueError(
                f"{name} has the dtype {part.dtype}: expected real numbers, so pass the real part"
            )
    X = parts["X"]
    dtype = np.float32 if X.dtype == np.float32 else np.float64
    if isinstance(X, np.ndarray):
        X = np.ascontiguousarray(X, dtype)
    elif is_sparse(X):
        X = without_duplicates(X.astype(dtype, copy=False))
    if X.ndim != 2:
        raise ValueError(f"X has the shape {X.shape}: expected (rows, features)")
    for name, part in {**parts, "X": X}.items():
        values = part if isinstance(part, np.ndarray) else part.data
        if name == "X" and not X_is_finite:
            continue
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"{name} contains NaN or infinity: remove or replace these rows")
    if "sample_weight" in parts and (parts["sample_weight"] < 0).any():
        raise ValueError("sample_weight contains a negative number: expected 0 or more")
    return {**parts, "X": X}


@dataclass(frozen=True)
class RowSurvey:
    """What a fit needs to know of all rows before it starts.

    `is_sparse`: whether X is, in some of them. `class_weights`: None unless the targets are classes.
    """

    parts: tuple[str, ...]
    num_rows: int
    num_features: int
    dtype: np.dtype[Any]
    is_sparse: bool
    total_weight: float
    class_weights: ClassWeights | None


def survey(source: MappedRows | MappedLocatedRows, are_classes: bool, on: Any) -> RowSurvey:
    """Read all rows once; return what a fit needs to know of them. Raises RemoteError if some are invalid."""
    state = {"found": None, "are_classes": are_classes}
    ended = iterate(
        _survey_step, data=source, state=state, max_iter=1, on=place_of(on, getattr(source, "num_rows", 0))
    )
    blocks: list[RowSurvey] = ended.state.found
    weights = [each.class_weights for each in blocks if each.class_weights is not None]
    return RowSurvey(
        blocks[0].parts,
        sum(each.num_rows for each in blocks),
        blocks[0].num_features,
        np.result_type(*(each.dtype for each in blocks)),
        any(each.is_sparse for each in blocks),
        sum(each.total_weight for each in blocks),
        added_class_weights(weights) if are_classes else None,
    )


def _survey_step(c: IterationStep) -> None:
    def of_block(block: Any) -> RowSurvey:
        parts = vars(block)
        X = parts["X"]
        rows, features = X.shape
        weight = (
            float(parts["sample_weight"].sum(dtype=np.float64)) if "sample_weight" in parts else float(rows)
        )
        by_class = weights_by_class(parts) if c.state.are_classes and "y" in parts else None
        return RowSurvey(tuple(parts), rows, features, X.dtype, is_sparse(X), weight, by_class)

    c.state.found = [each for found in c.gather(c.map_blocks(of_block)) for each in found]


def is_sparse(rows: Any) -> bool:
    """Return whether rows are those of a sparse matrix or array."""
    return hasattr(rows, "tocsr")


def without_duplicates(rows: Any) -> Any:
    """Return the rows as CSR, with the sum of the numbers that are stored for one place. Leaves `rows` unchanged.

    SciPy allows such duplicates, but code that squares the stored numbers would get wrong results.
    """
    rows = rows.tocsr()
    if not rows.has_canonical_format:
        rows = rows.copy()
        rows.sum_duplicates()
    return rows


def weights_by_class(parts: Mapping[str, Any]) -> ClassWeights:
    """Return the classes in `y`, and the sum of `sample_weight`, or the number of rows, of each."""
    classes, numbers = np.unique(parts["y"], return_inverse=True)
    return classes, np.bincount(numbers.ravel(), parts.get("sample_weight"), len(classes)).astype(np.float64)


def added_class_weights(parts: Iterable[ClassWeights]) -> ClassWeights:
    """Return the classes of all parts, and the sums over the parts, formed in their order."""
    parts = list(parts)
    classes = np.unique(np.concatenate([each for each, _ in parts]))
    sums = np.zeros(len(classes))
    for each, weights in parts:
        sums[np.searchsorted(classes, each)] += weights
    return classes, sums
