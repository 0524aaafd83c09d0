"""What a node offers when it joins."""

from __future__ import annotations

from ronde.launch.agent.node_offer import describe_node
from ronde.launch.config import LaunchConfig, WorkerSpec
from ronde.net.host import host_identity


def test_a_node_names_its_host_only_in_a_job_whose_nodes_share_hosts() -> None:
    there = {"RONDE_HOST_ID": "there"}
    for shares_hosts, environment, named, expected in (
        (False, there, {}, ""),
        (True, {}, {}, host_identity("")),
        (True, there, {}, host_identity("there")),
        (True, there, {"RONDE_HOST_ID": "here"}, host_identity("here")),  # what the workers find
    ):
        config = LaunchConfig(WorkerSpec(("true",), environment=named), shares_hosts=shares_hosts)
        node = describe_node(config, environment, "127.0.0.1", "", "id")
        assert node.host_id == expected
