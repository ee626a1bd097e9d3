"""Fault plans are data, and the checker of histories can fail."""

import os
import signal

import pytest

from unisono._errors import InvalidArgumentError
from unisono.testing import (
    DivergenceError,
    Fault,
    FaultPlan,
    InjectedError,
    Record,
    check_history,
    read_history,
)


def test_a_plan_goes_through_text():
    plan = FaultPlan().kill("worker:1", 17).stop("worker:0", 3, generation=1).fail("chief:0", 0)
    assert FaultPlan.from_json(plan.to_json()) == plan
    assert plan.faults[1] == Fault("stop", "worker:0", 3, 1)


@pytest.mark.parametrize("task", ["worker", "worker:", ":1", "worker:x", ""])
def test_a_task_must_be_named_with_its_index(task):
    with pytest.raises(InvalidArgumentError, match="Received: task="):
        FaultPlan().kill(task, 1)


def test_negative_steps_are_refused():
    with pytest.raises(InvalidArgumentError, match="step=-1"):
        FaultPlan().kill("worker:0", -1)


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_signals_go_to_this_process_at_their_place_alone(monkeypatch, kind, number):
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, signal: sent.append((pid, signal)))
    plan = getattr(FaultPlan(), kind)("worker:1", 5)
    for task, step, generation in (("worker:0", 5, 0), ("worker:1", 4, 0), ("worker:1", 5, 1)):
        plan.act(task, step, generation)
    assert sent == []
    plan.act("worker:1", 5, 0)
    assert sent == [(os.getpid(), number)]


def test_a_planned_failure_is_an_exception():
    with pytest.raises(InjectedError, match="worker:1 after step 5"):
        FaultPlan().fail("worker:1", 5).act("worker:1", 5, 0)


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_repeat_and_hit_one_generation_after_the_other(seed):
    tasks = ["worker:0", "worker:1"]
    plan = FaultPlan.at_random(seed, tasks, 30, faults=3)
    assert plan == FaultPlan.at_random(seed, tasks, 30, faults=3)
    assert [f.generation for f in plan.faults] == [0, 1, 2]
    steps = [f.step for f in plan.faults]
    assert steps == sorted(set(steps))


def record(step, weights="a", task="worker:0", generation=0):
    return Record(task, generation, step, float(step), weights)


def test_a_history_that_goes_back_to_a_backup_and_agrees_is_good():
    check_history([record(0), record(1), record(0, generation=1), record(1, generation=1), record(2, "b")])


@pytest.mark.parametrize(
    "other", [record(1, "b", task="worker:1"), record(1, "b", generation=1)], ids=["task", "generation"]
)
def test_other_weights_are_found(other):
    with pytest.raises(DivergenceError, match="after step 1 a on worker:0, generation 0, but b on"):
        check_history([record(0), record(1), other])


@pytest.mark.parametrize("step", [0, 1, 3])
def test_steps_that_are_left_out_or_done_twice_are_found(step):
    with pytest.raises(DivergenceError, match=f"step {step} after 1"):
        check_history([record(0), record(1), record(step)])


def test_the_half_line_of_a_killed_process_is_passed_over(tmp_path):
    line = '{"task": "worker:0", "generation": 0, "step": 0, "time": 1.0, "weights": "a"}'
    (tmp_path / "worker-0.jsonl").write_text(f"{line}\n{line[:30]}")
    assert read_history(tmp_path) == [Record("worker:0", 0, 0, 1.0, "a")]
