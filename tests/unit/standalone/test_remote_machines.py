"""What a client says of servers that were lost: each task once, by the supervisor or here."""

from types import SimpleNamespace

import pytest

from unisono.cluster_resolver._spec import Task
from unisono.launcher._restart_policy import Failure
from unisono.standalone._remote_machines import Patience, RemoteMachines
from unisono.standalone._slots import Slots

LOST = "lost its server b:1: it does not answer"


@pytest.fixture
def machines():
    slots = Slots.of({"worker": ["a:1", "b:1", "b:1"]})
    links = {each: SimpleNamespace(losses=set(), is_live=True) for each in slots.addresses}
    said = []
    made = RemoteMachines(slots, links, slots.options(), None, None, said.append, Patience())
    made._placed = slots.placed([Task("worker", i) for i in range(3)], list(links))
    return made, links, said


def failure(index, detail):
    return Failure(Task("worker", index), 0.0, 137, detail)


def test_what_the_supervisor_has_named_is_not_named_again(machines):
    made, links, said = machines
    made._placed.pop(Task("worker", 2))
    links["b:1"].losses.add(LOST)
    made.capacity(None)
    # The loss of a server allows restarts.
    assert made.options_after(failure(1, LOST)).max_restarts == 10
    made.wait_until_ready(3, tuple)
    assert said == []


def test_other_tasks_of_a_lost_server_are_named_once(machines):
    made, links, said = machines
    links["b:1"].losses.add(LOST)
    made.options_after(failure(1, LOST))
    made.wait_until_ready(3, tuple)
    assert said == [f"unisono: worker:2 {LOST}"]


def test_a_loss_that_another_failure_hides_is_named(machines):
    made, links, said = machines
    links["b:1"].losses.add(LOST)
    assert made.options_after(failure(0, "failed with exit code 1")).max_restarts is None
    assert said == [f"unisono: worker:1, worker:2 {LOST}"]


def test_a_lost_server_without_a_task_is_named(machines):
    made, links, said = machines
    made._placed = {Task("worker", 0): "a:1"}
    links["b:1"].losses.add(LOST)
    made.wait_until_ready(1, tuple)
    assert said == [f"unisono: no task {LOST}"]
