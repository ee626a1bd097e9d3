"""Which server runs which task."""

import pytest

import unisono
from unisono.cluster_resolver import ClusterSpec
from unisono.launcher._plan import tasks_of
from unisono.standalone._slots import Slots, parse_cluster

CLUSTER = {"worker": ["b:1", "a:1", "c:1"], "ps": ["a:1"], "chief": "b:1"}


def test_the_chief_comes_first_and_an_address_may_run_several_tasks():
    slots = Slots.of(CLUSTER)
    assert list(slots.by_job) == ["chief", "worker", "ps"]
    assert slots.addresses == ("a:1", "b:1", "c:1")
    tasks = tasks_of(slots.options(), 3)
    placed = slots.placed(tasks, ["a:1", "b:1", "c:1"])
    assert {str(task): each for task, each in placed.items()} == {
        "chief:0": "b:1", "worker:0": "b:1", "worker:1": "a:1", "worker:2": "c:1", "ps:0": "a:1",
    }  # fmt: skip


def test_workers_move_to_the_servers_that_are_left():
    slots = Slots.of({"worker": ["a:1", "b:1", "c:1"]})
    assert slots.room(["a:1", "c:1"]) == 2
    assert slots.missing(2, ["a:1", "c:1"]) == ()
    assert slots.missing(3, ["a:1", "c:1"]) == ("b:1",)
    placed = slots.placed(tasks_of(slots.options(elastic=(2, 3)), 2), ["a:1", "c:1"])
    assert list(placed.values()) == ["a:1", "c:1"]


def test_other_tasks_wait_for_their_server():
    assert Slots.of(CLUSTER).missing(1, ["b:1", "c:1"]) == ("a:1",)


def test_a_chief_alone_is_a_cluster():
    assert Slots.of(ClusterSpec({"chief": ["a:1"]})).options().workers == 0


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"ps": ["a:1"]}, "'chief' or 'worker'"),
        ({"worker": []}, "'chief' or 'worker'"),
        ({"worker": ["a"]}, "host:port"),
        ({"boss": ["a:1"]}, "boss"),
        ({"chief": ["a:1", "b:1"]}, "one chief"),
    ],
)
def test_what_is_no_cluster(cluster, message):
    with pytest.raises(unisono.InvalidArgumentError, match=message):
        Slots.of(cluster)


def test_a_list_is_no_cluster():
    with pytest.raises(unisono.InvalidTypeError, match="must be a dict"):
        Slots.of(["a:1"])


def test_the_text_of_a_command_line():
    assert parse_cluster("a:1, b:1,chief=[::1]:1") == {"worker": ["a:1", "b:1"], "chief": ["[::1]:1"]}
    with pytest.raises(unisono.InvalidArgumentError, match="must name servers"):
        parse_cluster(" , ")
