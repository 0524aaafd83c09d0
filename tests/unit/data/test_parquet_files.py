"""Parquet files as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ronde.data.parquet_files import ParquetReader, find_row_groups, spans_of
from ronde.errors import UsageError
from ronde.parquet.batches import equal_range

pa: Any = pytest.importorskip("pyarrow", reason="PyArrow is not installed here")


def write(path: Path, rows: range, group_rows: int = 4) -> None:
    from pyarrow import parquet

    features = [[float(row), float(-row)] for row in rows]
    parquet.write_table(pa.table({"x": features, "y": list(rows)}), path, row_group_size=group_rows)


def test_row_groups_are_found_and_read_in_part(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", range(10))
    write(tmp_path / "b.parquet", range(10, 13))
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "c.parquet").touch()
    groups = find_row_groups(str(tmp_path), ["x", "y"])
    assert [group.rows for group in groups] == [4, 4, 2, 3]
    reader = ParquetReader(str(tmp_path), ["x", "y"])
    tables = [reader.read(span) for span in spans_of(groups, equal_range(13, 1, 2))]
    assert np.concatenate([table["y"] for table in tables]).tolist() == list(range(6, 13))
    x = np.concatenate([table["x"] for table in tables])
    assert x.shape == (7, 2)
    assert x[0].tolist() == [6.0, -6.0]


def test_files_of_another_file_system(tmp_path: Path) -> None:
    import fsspec

    write(tmp_path / "a.parquet", range(10))
    url = f"memory:/{tmp_path}"
    with fsspec.open(f"{url}/a.parquet", "wb") as file:
        file.write((tmp_path / "a.parquet").read_bytes())
    groups = find_row_groups(url, ["y"])
    reader = ParquetReader(url, ["y"])
    found = [reader.read(span)["y"].tolist() for span in spans_of(groups, range(5, 9))]
    assert found == [[5, 6, 7], [8]]


def test_a_folder_without_the_files_or_columns_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no Parquet file"):
        find_row_groups(str(tmp_path), ["x"])
    write(tmp_path / "a.parquet", range(3))
    with pytest.raises(UsageError, match=r"lacks the columns \['z'\]: it has \['x', 'y'\]"):
        find_row_groups(str(tmp_path), ["x", "z"])
    (group,) = find_row_groups(str(tmp_path), ["x"])
    reader = ParquetReader(str(tmp_path), ["x"])
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(UsageError, match="must be in a file system that the driver and all workers share"):
        reader.read(spans_of([group], range(3))[0])
