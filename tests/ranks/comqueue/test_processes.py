"""Queues whose tasks are processes: of this machine, of a cluster, or the ranks of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.ranks.comqueue import kmeans

from ronde.comqueue import Barrier, ComContext, IterationStep, IterativeComQueue, iterate
from ronde.errors import RemoteError
from ronde.launch.clusters.local import LocalCluster
from ronde.testing import ranks


def iris() -> NDArray[Any]:
    points: NDArray[Any] = pytest.importorskip("sklearn.datasets").load_iris().data
    return points


def blobs() -> NDArray[Any]:
    rng = np.random.default_rng(1)
    return np.concatenate([rng.normal(center, size=(40, 4)) for center in (0, 4, 8)])


def test_processes_threads_and_clusters_give_the_same_bits_in_both_forms() -> None:
    points = blobs()
    start = points[[0, 40, 80]]
    steps, centers, sums = kmeans.queue_of(points, start).exec("threads:2")[0]
    for result in kmeans.queue_of(points, start).exec("local:2"):
        assert result[0] == steps
        assert np.array_equal(result[1], centers)
        assert np.array_equal(result[2], sums)
    places: list[Any] = ["local:2", LocalCluster(2)]
    for place in places:
        found = iterate(kmeans.step, data=points, state={"centers": start}, max_iter=50, on=place)
        assert (found.steps, found.stopped) == (steps, True)
        assert np.array_equal(found.state.centers, centers)
    for in_a_job in ranks.run(kmeans.centers_in_a_job, 2, points, start):
        assert np.array_equal(in_a_job, centers)


@pytest.mark.parametrize("num_tasks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sums_over_row_blocks_have_the_bits_of_one_thread(num_tasks: int) -> None:
    rows = np.random.default_rng(0).normal(size=(20, 3)) * 10.0 ** np.arange(-9, 9, 6)

    def found(on: str) -> list[bytes]:
        state = {"small": None, "large": None}
        result = iterate(kmeans.sum_blocks_step, data=rows, state=state, max_iter=2, on=on).state
        return [result.small["rows"].tobytes(), result.small["n"].to_bytes(), result.large.tobytes()]

    assert found(f"local:{num_tasks}") == found("threads:1")


@pytest.mark.parametrize("on", ["threads:1", "threads:4", pytest.param("local:3", marks=pytest.mark.slow)])
def test_the_centroids_of_iris_are_those_of_scikit_learn(on: str) -> None:
    points = iris()
    start = points[[0, 50, 100]]
    theirs = pytest.importorskip("sklearn.cluster").KMeans(3, init=start, n_init=1, tol=0).fit(points)
    _, centers, sums = kmeans.queue_of(points, start).exec(on)[0]
    assert np.allclose(centers, theirs.cluster_centers_, rtol=0, atol=1e-9)
    assert sums.shape == (3, 5)
    assert sums[:, 4].tolist() == np.bincount(theirs.labels_).tolist()
    assert np.allclose(sums[:, :4] / sums[:, 4:], centers)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (kmeans.fail_on_task_1, r"rank 1 .*fail_on_task_1 failed on task 1 in step 2: ValueError: no luck"),
        pytest.param(kmeans.die_on_task_1, r"rank 1 .*SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_failed_task_ends_all(function: Callable[[ComContext], None], message: str) -> None:
    queue = IterativeComQueue().set_max_iter(3).add(function).add(Barrier())
    with pytest.raises(RemoteError, match=message) as caught:
        queue.exec("local:2")
    assert caught.value.rank == 1


def test_a_killed_task_changes_no_bit_of_the_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flag = tmp_path / "died"
    flag.touch()
    expected, _ = kmeans.noisy_queue(str(flag)).exec("local:2")[0]
    flag.unlink()
    mean, steps = kmeans.noisy_queue(str(flag)).set_checkpoint(every=5).exec("local:2")[0]
    assert flag.exists()
    assert steps == 20
    assert np.array_equal(mean, expected)
    assert "SIGKILL" in caplog.text
    assert "start again from their last checkpoint (restart 1 of 3)" in caplog.text


def test_a_task_killed_in_step_7_of_20_changes_no_bit_of_k_means(tmp_path: Path) -> None:
    expected = kmeans.centers_after_loss(tmp_path, "threads:2")  # no loss: the path exists
    assert expected[1] == 20
    assert kmeans.centers_after_loss(tmp_path / "died", "local:2") == expected
    assert (tmp_path / "died").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "lose"])
@pytest.mark.parametrize("has_folder", [True, False], ids=["folder", "driver"])
def test_a_lost_task_on_a_cluster(tmp_path: Path, how: str, has_folder: bool) -> None:
    flag, folder, steps = tmp_path / "died", tmp_path / "checkpoints", tmp_path / "steps"
    expected, _ = kmeans.noisy_queue(str(tmp_path)).exec("local:2")[0]
    queue = kmeans.noisy_queue(str(flag), how=how).add(kmeans.StepLog(str(steps)))
    queue.set_checkpoint(every=2, folder=str(folder) if has_folder else None)
    mean, _ = queue.exec(LocalCluster(2))[0]
    assert flag.exists()
    assert np.array_equal(mean, expected)
    done = list(map(int, steps.read_text().split()))
    again = done[6:]  # six steps were complete; the checkpoint of the last one may be missing
    assert again in ([*range(7, 21)], [*range(5, 21)])
    if has_folder:
        assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_without_restarts_left_the_death_is_the_error(tmp_path: Path) -> None:
    queue = kmeans.noisy_queue(str(tmp_path / "died")).set_checkpoint(every=5, max_restarts=0)
    with pytest.raises(RemoteError, match=r"rank 1 .*SIGKILL"):
        queue.exec("local:2")


def note_origin(c: IterationStep) -> None:
    """Note of which process this task is a copy, and where it runs."""
    c.state.origin, c.state.folder = os.getppid(), os.getcwd()
    if c.state.fails:
        raise ValueError


def test_later_iterations_fork_tasks_from_the_process_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(fails: bool = False) -> Any:
        start = {"origin": 0, "folder": "", "fails": fails}
        return iterate(note_origin, data=[1], state=start, max_iter=1, on="local:1").state

    first = state()
    assert state().origin == first.origin
    monkeypatch.chdir(tmp_path)
    moved = state()
    assert moved.folder == str(tmp_path)
    assert moved.origin != first.origin
    os.kill(moved.origin, signal.SIGKILL)
    os.waitid(os.P_PID, moved.origin, os.WEXITED | os.WNOWAIT)
    after_death = state()
    assert after_death.origin not in (first.origin, moved.origin)
    with pytest.raises(RemoteError, match="ValueError"):
        state(fails=True)
    assert not Path(f"/proc/{after_death.origin}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["local:2", LocalCluster(2)], ids=["processes", "one cluster object"])
def test_two_runs_at_once_do_not_disturb_each_other(place: Any) -> None:
    def centers(rows: NDArray[Any]) -> bytes:
        state = {"centers": rows[[0, 40, 80]]}
        result = iterate(kmeans.step, data=rows, state=state, max_iter=50, on=place)
        return bytes(result.state.centers.tobytes())

    both = [blobs(), blobs() * 3]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(centers, both)) == [centers(rows) for rows in both]


INTERRUPTED = """
    import os, signal, sys
    from ronde.comqueue import iterate

    def step(c):
        c.sum(1.0)
        if (c.step_no, c.task_id) == (5, 1):
            os.kill(c.state.driver, signal.SIGINT)

    if __name__ == "__main__":
        try:
            state = {"driver": os.getpid()}
            iterate(step, data=[1, 2], state=state, max_iter=10**8, on="local:2", checkpoint_every=1000)
        except KeyboardInterrupt:
            fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
            print("memory:", [os.readlink(fd) for fd in fds if os.path.exists(fd) and "memfd" in os.readlink(fd)])
            input()  # leaves the test time to look for processes
"""


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(INTERRUPTED))
    command = [sys.executable, "script.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "memory: []\n"
        assert (
            subprocess.run(["ps", "--ppid", str(script.pid)], check=False, capture_output=True).returncode
            == 1
        )
        script.communicate("\n", timeout=60)
    assert script.returncode == 0


SCRIPT = """
    from ronde.comqueue import AllReduce, ComQueue

    class Count:
        def __call__(self, context):
            context.put_obj("n", len(context.get_obj("rows")))

    def result(context):
        return context.get_obj("n")

    if __name__ == "__main__":
        queue = ComQueue().init_with_partitioned_data("rows", [1, 2, 3]).add(Count()).add(AllReduce("n"))
        print(queue.close_with(result).exec(on="local:2"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import sys; sys.modules['cloudpickle'] = None\n"])
def test_functions_of_a_script_need_no_cloudpickle(tmp_path: Path, before: str) -> None:
    (tmp_path / "script.py").write_text(before + textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[3, 3]\n", done.stderr
