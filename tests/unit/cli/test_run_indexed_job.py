"""`ronde run` in the Pods of an Indexed Job: --nnodes is enough, and other options override what Kubernetes tells."""

from __future__ import annotations

import pytest

from ronde.cli.run_arguments import parse_arguments
from ronde.cli.run_config import configure
from ronde.cli.run_here import Here
from ronde.errors import UsageError
from ronde.launch.config import LaunchConfig
from ronde.launch.kubernetes.indexed_job import LOST, REPLACED, IndexedPod, find_pod, pod_exit_code

SERVICE = "digits.lab.svc.cluster.local"


def config(line: str, index: int = 1, domain: str = SERVICE) -> LaunchConfig:
    asked = parse_arguments([*line.split(), "train.py"], {})
    here = Here({}, cores=3, pod=IndexedPod("digits", index, domain))
    return configure(asked, ["/bin/python", "train.py"], here)


def test_a_pod_knows_its_number_and_the_name_of_the_first_one() -> None:
    found = find_pod({"JOB_COMPLETION_INDEX": "12"}, "digits-12", f"digits-12.{SERVICE}")
    assert found == IndexedPod("digits", 12, SERVICE)
    assert found.first_host() == f"digits-0.{SERVICE}"
    of_set = find_pod({"JOB_COMPLETION_INDEX": "3"}, "digits-workers-0-3", "digits-workers-0-3.digits")
    assert of_set is not None
    assert of_set.first_host() == "digits-workers-0-0.digits"
    assert find_pod({}, "digits-0", "digits-0") is None
    on_the_network_of_its_machine = find_pod({"JOB_COMPLETION_INDEX": "3"}, "machine7", "machine7.lan")
    assert on_the_network_of_its_machine == IndexedPod("machine7", 3, "")


def test_the_first_pod_serves_the_store() -> None:
    second = config("--nnodes 2 --nproc-per-node 4")
    meeting = second.rendezvous
    assert (meeting.backend, meeting.endpoint) == ("tcp", f"digits-0.{SERVICE}:29400")
    assert (meeting.min_nodes, meeting.max_nodes, meeting.node_rank, meeting.run_id) == (2, 2, 1, "digits")
    assert meeting.options == {"is_host": "false"}
    assert config("--nnodes 2", 0).rendezvous.options == {"is_host": "true"}
    assert (second.worker.slots, second.local_addr) == (4, f"digits-1.{SERVICE}")
    # The first Pod may be the last to start, and a lost one gets a successor.
    assert meeting.start_timeout_ns == meeting.join_timeout_ns
    assert meeting.supply is None


def test_options_go_before_what_kubernetes_says() -> None:
    assert config("").rendezvous.backend == "alone"  # most Indexed Jobs are independent tasks
    assert config("--nnodes 2 --rdzv-endpoint a:1").rendezvous.endpoint == "a:1"
    assert config("--nnodes 2 --local-addr 10.0.0.1").local_addr == "10.0.0.1"
    assert config("--nnodes 2 --start-timeout 7").rendezvous.start_timeout_ns == 7 * 10**9
    elastic = config("--nnodes 1:2 --spares 1", 2).rendezvous
    assert (elastic.min_nodes, elastic.max_nodes, elastic.node_rank) == (1, 2, -1)
    with pytest.raises(UsageError, match=r"--nnodes says 2 machines, but this is Pod 2 of the Indexed Job"):
        config("--nnodes 2", 2)
    with pytest.raises(UsageError, match=r"Pod digits-1 cannot find the first one.*headless Service"):
        config("--nnodes 2", domain="")


def test_a_pod_that_has_lost_the_others_may_be_replaced() -> None:
    assert pod_exit_code(1, is_final=False) == pod_exit_code(2, is_final=False) == LOST
    assert pod_exit_code(3, is_final=True) == 3
    # Such as a worker that was killed.
    assert {pod_exit_code(code, is_final=True) for code in REPLACED} == {1}
    assert pod_exit_code(143, is_final=False) == 143
    assert pod_exit_code(0, is_final=False) == 0
