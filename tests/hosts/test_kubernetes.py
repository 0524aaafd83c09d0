"""Jobs on a simulated Kubernetes: the Pods of the submitted manifest are processes on hosts of their own."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts.kubernetes_cluster import PATIENCE_S, TURN_S, KubernetesCluster

from ronde.testing.hosts import Hosts

HOSTS = 7
REDUCE = """
import os, sys

import numpy
import ronde

ronde.init()
total = ronde.world().allreduce(numpy.array([float(ronde.rank())]))[0]
here = f"{os.uname().nodename}, local {ronde.local_rank()} of {ronde.local_size()}"
print(f"rank {ronde.rank()} of {ronde.size()} on {here}: sum {total:g}, {sys.argv[1:]}", flush=True)
ronde.shutdown()
"""
# Waits until a file of the image says that the job may end.
STAY = """
import os, time

import numpy
import ronde

ronde.init()
assert ronde.world().allreduce(numpy.ones(8))[0] == ronde.size()
print(f"rank {ronde.rank()} of {ronde.size()} reduces", flush=True)
while not os.path.exists("done"):
    time.sleep(0.05)
ronde.shutdown()
"""
FAIL = """
import os, signal, sys, time

if os.environ["RANK"] == "1":
    sys.exit(3)
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
# Shows its place in each world, and in which process it is: ids of processes recur in other Pods.
GO_ON = """
import os, secrets, time

import numpy
import ronde
import ronde.elastic

ronde.init()
process = secrets.token_hex(8)

@ronde.elastic.run
def train(state):
    here = f"{os.uname().nodename} in process {process}"
    print(f"{here}: rank {ronde.rank()} of {ronde.size()} from step {state.step}", flush=True)
    while not state.is_done:
        done = numpy.array([os.path.exists("done")], dtype=numpy.int64)
        state.is_done = bool(ronde.allreduce(done, op=ronde.Max)[0])
        state.step += 1
        state.commit()
        time.sleep(0.01)

train(ronde.elastic.ObjectState(step=0, is_done=False))
"""
SOON = ("--rdzv-conf", "keep_alive_interval=0.5,last_call_timeout=1")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KubernetesCluster]:
    with Hosts(HOSTS) as hosts, KubernetesCluster(hosts, tmp_path) as cluster:
        for name, text in (("reduce.py", REDUCE), ("stay.py", STAY), ("fail.py", FAIL), ("go_on.py", GO_ON)):
            (cluster.image / name).write_text(text)
        yield cluster


def finish(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = job.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        job.kill()
        out, err = job.communicate()
        pytest.fail(f"the job did not end within {PATIENCE_S:.0f} s:\n{out}\n{err}")
    return job.returncode, out, err


def await_lines(cluster: KubernetesCluster, text: str, count: int) -> None:
    """Wait until the Pods have printed so many lines that contain the text."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        printed = "".join(file.read_text() for file in cluster.place.glob("*.log"))
        if printed.count(text) >= count:
            return
        time.sleep(TURN_S)
    raise TimeoutError(f"{count} x {text!r} in:\n{printed}")


def await_pods(cluster: KubernetesCluster, count: int) -> None:
    """Wait until so many Pods have started."""
    deadline = time.monotonic() + PATIENCE_S
    while len(cluster.pods) < count:
        assert time.monotonic() < deadline, cluster.pods
        time.sleep(TURN_S)


def test_the_pods_of_a_submitted_job_find_each_other(cluster: KubernetesCluster) -> None:
    words = ("--job-name", "digits", "--nnodes", "2", "--nproc-per-node", "2", "reduce.py", "$HOME $(HOME)")
    code, out, err = finish(cluster.submit(*words))
    assert code == 0, out + err
    assert sorted(out.splitlines()) == [
        f"[digits-{rank // 2}:{rank}] rank {rank} of 4 on digits-{rank // 2}, local {rank % 2} of 2: sum 6, "
        "['$HOME $(HOME)']"
        for rank in range(4)
    ]
    assert [pod.index for pod in cluster.pods] == [0, 1]
    for kind in ("Service", "Secret"):  # so that Kubernetes deletes them with the Job
        assert cluster.object(kind)["metadata"]["ownerReferences"] == [
            {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "uid": "uid-of-Job"}
        ]
    assert cluster.object("Secret")["stringData"]["job.key"] not in cluster.calls()


def test_lost_pods_are_replaced(cluster: KubernetesCluster) -> None:
    """One is killed, and the first one, which serves the store, has to leave its machine."""
    job = cluster.submit("--nnodes", "2", *SOON, "stay.py")
    await_lines(cluster, "of 2 reduces", 2)
    key = cluster.object("Secret")["stringData"]["job.key"]
    own = Path(f"/proc/{cluster.pod(1).first_process()}")
    assert key not in (own / "environ").read_text() + (own / "cmdline").read_text()

    cluster.pod(1).kill()
    await_lines(cluster, "of 2 reduces", 4)
    cluster.evict(cluster.pod(0))
    await_lines(cluster, "of 2 reduces", 6)
    (cluster.image / "done").touch()
    code, out, err = finish(job)
    assert code == 0, out + err
    assert [pod.index for pod in cluster.pods] == [0, 1, 1, 0]
    assert out.count("of 2 reduces") == 6


def test_workers_of_other_pods_keep_their_processes_when_one_is_lost(cluster: KubernetesCluster) -> None:
    """It is killed, and another one, which serves the store, has to leave its machine. Replacements join."""
    job = cluster.submit("--job-name", "t", "--nnodes", "2:3", *SOON, "go_on.py")
    await_lines(cluster, "of 3 from step 0", 3)
    cluster.pod(2).kill()
    await_lines(cluster, "of 2 from step", 2)
    await_lines(cluster, "of 3 from step", 6)
    cluster.evict(cluster.pod(0))
    await_lines(cluster, "of 3 from step", 9)
    (cluster.image / "done").touch()
    code, out, err = finish(job)
    assert code == 0, out + err
    assert [pod.index for pod in cluster.pods] == [0, 1, 2, 2, 0]
    processes = {name: set(re.findall(rf"{name} in process (\w+)", out)) for name in ("t-0", "t-1", "t-2")}
    assert {name: len(found) for name, found in processes.items()} == {"t-0": 2, "t-1": 1, "t-2": 2}


def test_no_pod_is_replaced_once_pods_have_come_and_gone_too_often(cluster: KubernetesCluster) -> None:
    job = cluster.submit("--nnodes", "2", "--reset-limit", "0", *SOON, "stay.py")
    await_lines(cluster, "of 2 reduces", 2)
    cluster.pod(1).kill()
    code, out, err = finish(job)
    assert code == 1, out + err
    assert "the limit of changes of the nodes (--reset-limit) is 0" in out
    assert "ronde: the job has failed: PodFailurePolicy" in err
    assert [pod.index for pod in cluster.pods].count(0) == 1
    assert out.count("of 2 reduces") == 2


def test_a_job_set_starts_all_pods_again_when_one_was_lost_too_often(cluster: KubernetesCluster) -> None:
    job = cluster.submit("--kubernetes-kind", "jobset", "--nnodes", "2", *SOON, "stay.py")
    await_lines(cluster, "of 2 reduces", 2)
    for losses in range(1, 5):
        cluster.pod(1).kill()
        await_pods(cluster, 2 + losses + (losses == 4))
    await_lines(cluster, "of 2 reduces", 4)
    (cluster.image / "done").touch()
    code, out, err = finish(job)
    assert code == 0, out + err
    assert cluster.restarts == 1
    assert [pod.index for pod in cluster.pods] == [0, 1, 1, 1, 1, 0, 1]


def test_a_failed_worker_ends_a_job_set_with_its_exit_code(cluster: KubernetesCluster) -> None:
    code, out, err = finish(cluster.submit("--kubernetes-kind", "jobset", "--nnodes", "2", "fail.py"))
    assert code == 3, out + err
    assert "ronde: the job has failed: FailedJobs: Container ronde for pod" in err
    assert (len(cluster.pods), cluster.restarts) == (2, 0)


def test_pods_wait_for_the_first_one_and_an_elastic_job_for_no_other(cluster: KubernetesCluster) -> None:
    cluster.held = {0, 2}
    job = cluster.submit("--nnodes", "1:3", *SOON, "stay.py")
    await_lines(cluster, "for the store at tcp:", 1)  # whose name the name server does not know
    cluster.held = {2}
    await_lines(cluster, "of 2 reduces", 2)
    (cluster.image / "done").touch()
    code, out, err = finish(job)
    assert code == 0, out + err
    assert sorted(pod.index for pod in cluster.pods) == [0, 1]


def test_a_signal_ends_the_command_and_not_the_job(cluster: KubernetesCluster) -> None:
    job = cluster.submit("--job-name", "digits", "stay.py")
    await_lines(cluster, "of 1 reduces", 1)
    job.terminate()
    code, _, err = finish(job)
    assert code == 143
    assert "got SIGTERM; the job goes on; end it by: kubectl delete job/digits" in err
    assert cluster.pod(0).process.poll() is None


def test_a_failed_worker_ends_the_job_with_its_exit_code(cluster: KubernetesCluster) -> None:
    code, out, err = finish(cluster.submit("--nnodes", "2", "fail.py"))
    assert code == 3, out + err
    assert "failed with exit code 3" in out
    assert "ronde: the job has failed: PodFailurePolicy: Container ronde for pod" in err
    assert len(cluster.pods) == 2


def test_a_killed_worker_is_no_lost_pod(cluster: KubernetesCluster) -> None:
    """Its exit code would be that of a killed Pod, which is replaced."""
    code, out, err = finish(cluster.submit("fail.py", "killed"))
    assert code == 1, out + err
    assert "killed by SIGKILL" in out
    assert len(cluster.pods) == 1


def test_ctrl_c_deletes_the_job(cluster: KubernetesCluster) -> None:
    job = cluster.submit("--job-name", "digits", "--nnodes", "2", "stay.py")
    await_lines(cluster, "of 2 reduces", 2)
    job.send_signal(signal.SIGINT)
    code, out, err = finish(job)
    assert code == 130, out + err
    assert "ronde: deleting job/digits" in err
    assert "delete job/digits --cascade=foreground --wait=false" in cluster.calls()
    assert all(pod.process.wait(PATIENCE_S) == 143 for pod in cluster.pods)


def test_what_kubectl_refuses_is_shown_and_nothing_stays(cluster: KubernetesCluster) -> None:
    (cluster.place / "refusal").write_text("jobs.batch is forbidden")
    code, _, err = finish(cluster.submit("--namespace", "lab", "stay.py"))
    assert code == 2
    said = "ronde run: kubectl create failed: Error from server (Forbidden): jobs.batch is forbidden\n"
    assert err == said
    cluster.environment["PATH"] = "/nowhere"
    code, _, err = finish(cluster.submit("stay.py"))
    assert code == 2
    assert "there is no kubectl in PATH" in err
    assert "--manifest FILE" in err
    assert cluster.pods == []
