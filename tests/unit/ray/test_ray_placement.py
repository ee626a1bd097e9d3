"""Whether a cluster of Ray has room for the tasks of a training."""

import pytest

import unisono
from unisono._errors import InvalidArgumentError
from unisono.ray._reservation import TaskResources, actor_options, checked_resources

ONE = {"CPU": 1}
NODES = [{"CPU": 4.0, "GPU": 2.0, "node:10.0.0.1": 1.0, "memory": 1e9}, {"CPU": 2.0}]


def tasks(workers, ps=0, worker=ONE, server=ONE):
    return TaskResources({"worker": workers, "ps": ps}, {"worker": worker, "ps": server})


@pytest.mark.parametrize(
    ("wanted", "most"),
    [
        (tasks(1), 6),
        (tasks(1, ps=2), 4),
        (tasks(1, worker={"CPU": 2}), 3),
        (tasks(1, worker={"CPU": 1.5}), 3),
        # Less than what there is in all, because a task is on one node.
        (tasks(1, worker={"CPU": 3}), 1),
        (tasks(1, worker={"CPU": 1, "GPU": 1}), 2),
        (tasks(1, worker={"GPU": 0.1}), 20),
        (tasks(1, worker={"TPU": 1}), 0),
        (tasks(1, ps=6), 0),
        (tasks(1, ps=1, server={"CPU": 8}), -1),
    ],
)
def test_how_many_workers_there_is_room_for(wanted, most):
    assert wanted.most_workers(NODES) == most


def test_an_elastic_training_starts_with_what_there_is():
    assert tasks(8).checked(NODES, 2).counts == {"worker": 6, "ps": 0}
    assert tasks(3).checked(NODES, 3).counts == {"worker": 3, "ps": 0}


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        (tasks(7), r"7 worker with 1 CPU; .*2 nodes \(4 CPU, 2 GPU; 2 CPU\), with room for 6 workers"),
        (
            tasks(1, ps=1, server={"CPU": 8}),
            r"1 ps with 8 CPU.* with no room for the tasks that are no workers",
        ),
    ],
)
def test_without_room_there_is_an_error(wanted, match):
    with pytest.raises(InvalidArgumentError, match=match):
        wanted.checked(NODES, wanted.counts["worker"])


@pytest.mark.parametrize("resources", [{}, {"CPU": 0}, {"CPU": -1}, {"GPU": "one"}, {"CPU": float("inf")}])
def test_resources_are_amounts(resources):
    with pytest.raises(InvalidArgumentError, match="`resources_per_worker` must be a dict"):
        checked_resources("resources_per_worker", resources)


def test_an_actor_without_cpus_takes_none():
    assert actor_options({"GPU": 1}) == {"num_cpus": 0, "num_gpus": 1}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"fn": 3}, "`fn` must be a function"),
        ({"workers": 0}, "`-n` must be at least 1"),
        ({"elastic": (3, 2)}, "fewest and the most"),
        ({"workers": 3, "elastic": (1, 2)}, "must start with the most workers"),
        ({"placement": "near"}, "`placement` must be one of PACK"),
        ({"resources_per_ps": {"CPU": 0}, "ps": 1}, "`resources_per_ps` must be"),
    ],
)
def test_a_trainer_checks_its_arguments_before_ray_starts(arguments, match):
    with pytest.raises((ValueError, TypeError), match=match):
        unisono.ray.Trainer(**{"fn": print, **arguments})
