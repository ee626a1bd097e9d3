"""Who does what in a cluster with parameter servers."""

import pytest

from unisono._errors import InvalidArgumentError
from unisono.cluster_resolver._spec import ClusterSpec, Task
from unisono.parameter_server.strategy._roles import roles_of

SPEC = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}


@pytest.mark.parametrize(
    ("task", "is_chief", "computes"),
    [
        (Task("chief", 0), True, False),
        (Task("worker", 0), False, True),
        (Task("worker", 1), False, True),
        (Task("ps", 0), False, False),
        (Task("evaluator", 0), False, False),
    ],
)
def test_roles_with_a_chief(task, is_chief, computes):
    roles = roles_of(ClusterSpec(SPEC), task)
    assert (roles.is_chief, roles.computes) == (is_chief, computes)
    assert roles.is_evaluator is (task.type == "evaluator")
    assert roles.addresses[Task("ps", 0)] == "d:1"


def test_without_a_chief_the_first_worker_is_it_and_computes():
    spec = ClusterSpec({"worker": ["b:1", "c:1"], "ps": ["d:1"]})
    first, second = (roles_of(spec, Task("worker", i)) for i in range(2))
    assert (first.is_chief, first.computes) == (True, True)
    assert (second.is_chief, second.computes) == (False, True)
    assert first.remote_workers == (Task("worker", 1),)


def test_a_chief_beside_the_cluster():
    """As in TensorFlow's tutorial: a `Server` for each task, and a resolver that names no task."""
    spec = ClusterSpec({"worker": ["b:1", "c:1"], "ps": ["d:1"]})
    roles = roles_of(spec, None)
    assert (roles.is_chief, roles.computes) == (True, False)
    assert roles.remote_workers == (Task("worker", 0), Task("worker", 1))
    first = roles_of(spec, Task("worker", 0), serves=True)
    assert (first.is_chief, first.computes) == (False, True)
    # Or worker 0, where it creates a strategy.
    assert first.accepted == (Task("chief", 0), Task("worker", 0))


@pytest.mark.parametrize(
    ("change", "task", "message"),
    [
        ({"ps": []}, Task("chief", 0), "at least one task of the job 'ps', which holds the variables"),
        ({"worker": []}, Task("chief", 0), "at least one task of the job 'worker', which computes"),
        ({"chief": ["a:1", "f:1"]}, Task("chief", 0), "at most one chief. Received: 2"),
        ({}, None, "Received: no task"),
        ({}, Task("worker", 7), "Received: worker:7, and the tasks chief:0, worker:0"),
        ({}, Task("trainer", 0), "Received: trainer:0"),
    ],
)
def test_a_cluster_that_cannot_train_says_why(change, task, message):
    with pytest.raises(InvalidArgumentError, match=message):
        roles_of(ClusterSpec({**SPEC, **change}), task)
