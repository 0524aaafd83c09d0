"""The assignment of group ranks."""

from __future__ import annotations

from ronde.rendezvous.group_ranks import assign_group_ranks, host_order, node_names
from ronde.rendezvous.membership import Node


def node(name: str, wish: int = -1, host: str = "", host_id: str = "") -> Node:
    return Node(name, host or name, "127.0.0.1", 1, "", 1, wish=wish, host_id=host_id)


def names(nodes: tuple[Node, ...]) -> str:
    return "".join(node.id for node in nodes)


def test_newcomers_are_ordered_by_the_names_of_their_hosts() -> None:
    nodes = [node("c", host="node10"), node("a", host="node2"), node("b", host="node2")]
    assert names(assign_group_ranks((), nodes)) == "abc"
    assert sorted(["n10", "n9", "m", "n9a"], key=host_order) == ["m", "n9", "n9a", "n10"]


def test_newcomers_on_one_host_are_neighbours_among_containers_of_one_name() -> None:
    hosts = {"a": "1", "b": "2", "c": "1", "d": "2", "e": "1"}
    nodes = [node(name, host="box", host_id=host_id) for name, host_id in hosts.items()]
    assert names(assign_group_ranks((), nodes)) == "acebd"


def test_survivors_keep_their_places_and_newcomers_fill_the_holes() -> None:
    last = [node(name) for name in "abcd"]
    assert names(assign_group_ranks(last, [node("x"), last[3], last[1], last[0]])) == "abxd"


def test_in_a_smaller_world_the_highest_fill_the_holes() -> None:
    last = [node(name) for name in "abcdef"]
    assert names(assign_group_ranks(last, [last[5], last[1], last[4], last[0]])) == "abef"
    assert names(assign_group_ranks(last, [last[5], last[2]])) == "cf"


def test_a_wish_goes_before_a_habit_and_the_first_wish_before_the_second() -> None:
    last = [node("a"), node("b")]
    assert names(assign_group_ranks(last, [*last, node("x", wish=0), node("y", wish=0)])) == "xbay"
    assert names(assign_group_ranks([node("x", wish=0)], [node("y", wish=0), node("x", wish=0)])) == "xy"


def test_a_wish_that_cannot_be_fulfilled_is_none() -> None:
    assert names(assign_group_ranks((), [node("a", wish=7), node("b")])) == "ab"


def test_agents_of_one_host_have_numbers_in_messages() -> None:
    nodes = [node("a", host="vm"), node("b", host="other"), node("c", host="vm")]
    assert node_names(nodes, nodes) == ["vm (node 0)", "other", "vm (node 2)"]
    assert node_names([node("late", host="vm")], nodes) == ["vm"]
