"""`read`: Parquet files, tables and arrays as rows, and what they must not be."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ronde import comqueue
from ronde.comqueue import IterationStep, iterate
from ronde.data.columns import ColumnsOption
from ronde.errors import RemoteError, UsageError

pa: Any = pytest.importorskip("pyarrow", reason="PyArrow is not installed here")

read: Any = comqueue.read  # the type of what it returns depends on the source
ROWS = 50
TABLE = pa.table(
    {
        "a": np.arange(ROWS) + 0.5,
        "n": np.arange(ROWS),
        "name": [f"row {number}" for number in range(ROWS)],
        "pair": [[number, -number] for number in range(ROWS)],
    }
)
A, N = TABLE["a"].to_numpy(), TABLE["n"].to_numpy()


def write(table: Any, path: str | Path, group_rows: int = 7) -> None:
    import fsspec
    from pyarrow import parquet

    with fsspec.open(str(path), "wb", auto_mkdir=True) as file:
        parquet.write_table(table, file, row_group_size=group_rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The table in two files, whose order is not that in which they were written."""
    write(TABLE.slice(30), tmp_path / "year=2024" / "0.parquet")
    write(TABLE.slice(0, 30), tmp_path / "year=2023" / "1.parquet")
    return tmp_path


@pytest.mark.parametrize("path", ["", "year=*", "*/*.parquet", "files", "url"])
def test_files_of_all_paths(path: str, folder: Path) -> None:
    source: Any = folder / path if "*" in path else folder
    if path == "files":
        source = [folder / "year=2023", folder / "year=2024" / "0.parquet"]
    elif path == "url":
        source = f"file://{folder}"
    rows = pickle.loads(pickle.dumps(read(source)))
    assert rows.num_rows == ROWS
    assert rows.load(0, ROWS).tolist() == np.c_[A, N].tolist()
    assert rows.load(25, 40).tolist() == np.c_[A, N][25:40].tolist()
    assert rows.load(4, 4).shape == (0, 2)


def test_files_of_another_file_system_in_the_given_order() -> None:
    write(TABLE.slice(0, 9), "memory://rows/a.parquet")
    write(TABLE.slice(9), "memory://rows/b.parquet")
    order = ["memory://rows/b.parquet", "memory://rows/a.parquet"]
    assert read(order, "n").load(39, 43).tolist() == [48, 49, 0, 1]


def test_arrays_by_name(folder: Path) -> None:
    rows = read(folder, {"X": ["pair", "a", "year"], "y": "n", "p": "pair"})
    some = rows.load(28, 33)
    assert some.X.tolist() == [[n, -n, n + 0.5, 2023 + (n >= 30)] for n in range(28, 33)]
    assert some.y.tolist() == [28, 29, 30, 31, 32]
    assert some.p[1:3].tolist() == [[29, -29], [30, -30]]
    assert (some.X.dtype, some.y.dtype) == (np.float64, np.int64)
    assert some[1:3].y.tolist() == [29, 30]
    assert len(some) == 5


def test_matrices_are_of_float32_where_that_is_enough() -> None:
    table = pa.table({"a": pa.array([0.5], pa.float32()), "b": pa.array([7], pa.int16()), "c": [True]})
    assert read(table).load(0, 1).tolist() == [[0.5, 7, 1]]
    assert read(table).load(0, 1).dtype == np.float32
    assert read(table, "c").load(0, 1).dtype == np.bool_
    assert read(table, {"X": None, "y": "b"}).load(0, 1).X.tolist() == [[0.5, 1]]


def test_streamed_blocks_are_those_that_are_loaded(folder: Path) -> None:
    rows = read(folder, {"X": ["a"], "y": "n"})
    blocks = [range(3, 4), range(4, 29), range(29, 50)]
    found = list(rows.stream(blocks))
    assert [each.y.tolist() for each in found] == [list(block) for block in blocks]
    assert list(rows.stream([])) == []
    first = rows.stream(blocks)
    assert next(first).y.tolist() == [3]
    first.close()  # its thread ends, which a fixture checks


def test_streamed_blocks_that_are_kept_stay_as_they_are(tmp_path: Path) -> None:
    count, rows_each = 40, 5_000
    numbers = np.arange(count * rows_each)
    write(pa.table({"a": numbers * 0.5, "n": numbers, "b": numbers % 2 == 0}), tmp_path / "0.parquet", 7_000)
    rows = read(tmp_path, {"b": "b", "X": ["a", "n"], "n": "n"})
    blocks = [range(number * rows_each, (number + 1) * rows_each) for number in range(count)]
    kept = []
    for number, block in enumerate(rows.stream(blocks)):
        if number in (3, 4, 17):
            kept.append((blocks[number], block.b, block.X[:, 1]))  # views keep a block
    for expected, b, n in kept:
        assert n.tolist() == list(expected)
        assert b.tolist() == [each % 2 == 0 for each in expected]


def test_the_limit_decides_what_is_streamed(folder: Path) -> None:
    rows = read(folder, memory_limit=16 * 20)
    assert rows.check_memory(20, 1) == ""
    assert "21 rows of" in rows.check_memory(21, 1)
    rows = read(folder)
    assert rows.check_memory(20, 2) == ""
    assert "half of the free memory" in rows.check_memory(1 << 50, 2)


def add_up(c: IterationStep) -> None:
    assert [len(block.y) for block in c.blocks] == [len(block.X) for block in c.blocks]
    c.state.sums = c.sum_blocks(lambda rows: {"X": rows.X.sum(axis=0), "y": rows.y.sum(), "rows": len(rows)})


@pytest.mark.parametrize("memory_limit", [None, 0])
def test_tasks_read_files(memory_limit: int | None, folder: Path) -> None:
    rows = read(folder, {"X": ["a", "n"], "y": "n"}, memory_limit=memory_limit)
    found = iterate(add_up, data=rows, state={}, max_iter=2, checkpoint_every=1, on="local:2").state.sums
    assert found["X"].tolist() == [A.sum(), N.sum()]
    assert (found["y"], found["rows"]) == (N.sum(), ROWS)


def test_rows_that_are_streamed_are_no_data(folder: Path) -> None:
    rows = read(folder, memory_limit=3)
    with pytest.raises(RemoteError, match=r"not in memory, because 25 rows of .* need 0.000381 MiB"):
        iterate(lambda c: c.data, data=rows, state={}, max_iter=1, on="threads:2")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("name", r"column 'name' in .*1.parquet has the type string"),
        (["a", "b"], r"1.parquet lacks the columns \['b'\]: it has \['a', 'n', 'name', 'pair', 'year'\]"),
        ({"X": []}, r"selects no columns of numbers of .*1.parquet"),
        ("year", r"are in no file of .*, only in paths"),
    ],
)
def test_columns_that_cannot_be_read(columns: ColumnsOption, message: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read(folder, columns)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": ["x"]}, r"column 'a' has the type string in .*2.parquet and double in .*1.parquet"),
        ({"n": [1]}, r"2.parquet lacks the columns \['a'\], which .*1.parquet has"),
        ({"a": [1.0, None]}, r"column 'a' in .*2.parquet has 1 missing values"),
    ],
)
def test_a_file_that_differs_is_named(other: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(pa.table({"a": [0.5]}), tmp_path / "1.parquet")
    write(pa.table(other), tmp_path / "2.parquet")
    with pytest.raises(UsageError, match=message):
        read(tmp_path).load(0, 3)


def test_lists_of_another_length_in_a_later_file(tmp_path: Path) -> None:
    write(pa.table({"a": [[0.5]]}), tmp_path / "1.parquet")
    write(pa.table({"a": [[0.5, 1.5]]}), tmp_path / "2.parquet")
    with pytest.raises(
        UsageError, match=r"'a' in .*2.parquet holds lists of 2 float64 and, .*, lists of 1 float64"
    ):
        read(tmp_path, ["a"]).load(0, 2)


def test_no_rows_and_no_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no Parquet file: expected a file, a folder"):
        read(tmp_path)
    write(TABLE.slice(0, 0), tmp_path / "1.parquet")
    with pytest.raises(UsageError, match=f"{tmp_path} has no rows"):
        read(tmp_path)
    (tmp_path / "2.parquet").write_bytes(b"text")
    with pytest.raises(UsageError, match=r"2\.parquet cannot be read as a Parquet file"):
        read(tmp_path)


def frame_of_pandas() -> Any:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed here")
    return pandas.DataFrame({"a": A, "name": "x", "n": N}, index=[f"label {number}" for number in N])


def frame_of_polars() -> Any:
    return pytest.importorskip("polars", reason="Polars is not installed here").DataFrame({"a": A, "n": N})


def frame_of_narwhals() -> Any:
    narwhals = pytest.importorskip("narwhals", reason="Narwhals is not installed here")
    return narwhals.from_native(TABLE)


@pytest.mark.parametrize("table", [lambda: TABLE, frame_of_pandas, frame_of_polars, frame_of_narwhals])
def test_read_takes_tables_of_other_libraries(table: Callable[[], Any]) -> None:
    rows = pickle.loads(pickle.dumps(read(table())))
    assert rows.num_rows == ROWS
    assert rows.load(3, 5).tolist() == np.c_[A, N][3:5].tolist()
    assert read(table(), {"y": "n"}).load(3, 5).y.tolist() == [3, 4]


@pytest.mark.slow
def test_arrays_are_not_copied() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here")
    tensor = torch.zeros(4, 2)
    rows = read(tensor).load(1, 3)
    tensor[1, 0] = 7
    assert rows.tolist() == [[7, 0], [0, 0]]


def test_sparse_matrices() -> None:
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed here")
    rows = read(sparse.coo_matrix(np.eye(3))).load(1, 3)
    assert rows.format == "csr"
    assert rows.toarray().tolist() == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("source", "columns", "message"),
    [
        (3, None, "the source of type int has no rows of numbers: expected a path, a table, or an array"),
        (["a", 3.5], None, "the source of type list has no rows"),
        (np.zeros((0, 2)), None, "the source of type ndarray has no rows"),
        (
            np.ma.masked_array([1.0], [True]),
            None,
            "the source is a masked array, whose mask would have no effect",
        ),
        (np.zeros(3), "a", "columns='a' needs names"),
        (TABLE.slice(0, 0), None, "the table of type Table has no rows"),
        (TABLE, "b", r"the table of type Table lacks the columns \['b'\]"),
        (pa.table({"a": [1, None]}), None, "'a' in the table of type Table has 1 missing values"),
        (pa.chunked_array([[1]]), None, "type ChunkedArray is not a table"),
    ],
)
def test_what_is_no_source(source: Any, columns: ColumnsOption, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(source, columns)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pyarrow is not installed, .*: run pip install 'ronde\[data\]'"):
        read(TABLE)


def test_options_of_files_only() -> None:
    with pytest.raises(
        UsageError,
        match="memory_limit is for files, and for data frames and tables on a cluster, not for a Table",
    ):
        read(TABLE, memory_limit=1)
    with pytest.raises(UsageError, match="are for files, and the source is of type Table"):
        read(TABLE, options={"anon": True})
