"""Training with data and store in S3, served by moto (`pip install 'moto[server]' s3fs`)."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.spark_session import until_it_listens
from tests.ports import free_port

import ronde
from ronde.errors import RemoteError
from ronde.parquet import RunStore, fit_on_parquet
from ronde.testing import ranks

pytest.importorskip("torch")
pytest.importorskip("pyarrow", reason="PyArrow is not installed here")
pytest.importorskip("moto", reason="moto, the S3 server of this test, is not installed here")
s3fs: Any = pytest.importorskip("s3fs", reason="s3fs is not installed here")

from tests.ranks.torch.test_parquet import Fails, regression, write  # noqa: E402 (it skips itself without PyTorch and PyArrow)

pytestmark = pytest.mark.slow


@contextmanager
def s3_server() -> Iterator[str]:
    """Serve S3 on this machine; yield its URL."""
    port = free_port("127.0.0.1")
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            until_it_listens("127.0.0.1", port)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with s3_server() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield


# In ranks, because s3fs keeps a thread and connections in a process that uses it


def upload(folder: str) -> None:
    files = s3fs.S3FileSystem()
    files.mkdir("lab")
    files.put(folder, "lab/train", recursive=True)


def stored(run_id: str) -> tuple[list[int], list[str]]:
    """Return the complete epochs of a run, and the files of unfinished writes."""
    run = RunStore("s3://lab/store").run(run_id)
    files, folder = run.filesystem()
    return run.epochs(), [path for path in files.ls(folder, detail=False) if "draft-" in path]


def fit_in_s3(content: bytes, run_id: str) -> list[Any]:
    training = pickle.loads(content)
    history = fit_on_parquet(training, "s3://lab/train", store=RunStore("s3://lab/store"), run_id=run_id)
    ronde.shutdown()
    return [(entry["epoch"], entry["train"]["loss"]) for entry in history]


def fit(run_id: str, **options: Any) -> Any:
    """Return the history, which is the same on both ranks."""
    first, second = ranks.run(fit_in_s3, 2, pickle.dumps(regression(**options)), run_id)
    assert first == second
    return first


@pytest.mark.fresh_ranks
@pytest.mark.usefixtures("server")
def test_data_and_store_may_be_in_s3(tmp_path: Path) -> None:
    ranks.run(upload, 1, write(tmp_path / "train"))
    whole = fit("whole")
    assert whole[-1][1] < whole[0][1]
    with pytest.raises(RemoteError, match="the machine is lost"):
        fit("parts", callbacks=[Fails(1)])
    assert ranks.run(stored, 1, "parts") == [([0, 1], [])]
    assert fit("parts") == whole
