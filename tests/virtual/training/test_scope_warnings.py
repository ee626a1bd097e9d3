"""Training beside the strategy, or beside the cluster, is one warning."""

import json
import types

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from unisono.cluster import _lone_task
from unisono.training import _scope_warnings

TWO = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
X = np.ones((4, 2), "float32")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(_scope_warnings, "_said", set())
    monkeypatch.setattr(_scope_warnings, "_unused", type(_scope_warnings._unused)())
    monkeypatch.delenv("TF_CONFIG", raising=False)


def fit(times=2):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="m")
    model.compile("sgd", "mse")
    for _ in range(times):
        model.fit(X, X[:, :1], verbose=0)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "unisono" and r.levelname == "WARNING"]


def test_a_scope_that_is_never_entered_is_one_warning(caplog):
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    fit()
    (text,) = warnings(caplog)
    assert "`fit` of 'm' computes without a strategy, on one device" in text
    assert f"outside of the scope of {strategy!r}" in text
    assert "with strategy.scope():" in text


def test_another_model_than_that_of_the_scope_is_one_warning(caplog):
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).compile("sgd", "mse")
    fit()
    (text,) = warnings(caplog)
    assert f"outside of the scope of {strategy!r}, which has computed nothing yet" in text


def test_a_used_strategy_and_a_model_beside_it_are_none(caplog):
    strategies = [unisono.MirroredStrategy(["cpu:0", "cpu:1"]) for _ in range(2)]
    with strategies[0].scope():
        fit(1)
    strategies[1].run(lambda: 1)
    fit(1)
    assert warnings(caplog) == []


def test_a_model_of_one_process_beside_a_cluster_is_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(_scope_warnings, "joined_group", lambda: types.SimpleNamespace(size=4))
    fit()
    (text,) = warnings(caplog)
    assert "`fit` of 'm' computes in each of the 4 workers by itself" in text


def test_a_strategy_of_one_process_in_one_of_several_tasks_is_one_warning(caplog, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    assert warnings(caplog) == []
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    for _ in range(2):
        unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    (text,) = warnings(caplog)
    assert "one of 8 tasks (SLURM_STEP_NUM_TASKS=8): each of them trains a model of its own" in text
    assert "unisono.MultiWorkerMirroredStrategy()" in text


def test_every_sign_of_a_task_is_looked_for():
    assert {rank for rank, _ in _lone_task._TASKS} < _scope_warnings.SIGNS


def test_an_evaluator_beside_workers_is_none(caplog, monkeypatch):
    """As `unisono run` starts it in a Slurm step."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("TF_CONFIG", json.dumps({**TWO, "task": {"type": "evaluator", "index": 0}}))
    unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    assert warnings(caplog) == []


def test_one_worker_of_several_that_trains_alone_is_one_warning(caplog, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(TWO))
    with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        fit()
    (text,) = warnings(caplog)
    assert "TF_CONFIG names 2 workers: each runs the whole program by itself" in text
    assert "MirroredStrategy(cpu:0, cpu:1) has the devices of one process" in text
    assert "unisono.MultiWorkerMirroredStrategy()" in text


@pytest.mark.parametrize(
    ("cluster", "job", "count"),
    [
        ({"worker": ["a:1", "b:1"]}, "worker", 2),
        ({"chief": ["a:1"], "worker": ["b:1"]}, "chief", 2),
        ({"worker": ["a:1", "b:1"]}, "evaluator", 0),
        ({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "worker", 0),
        ({"worker": ["a:1"]}, "worker", 1),
    ],
)
def test_who_should_train_together(cluster, job, count):
    config = {"cluster": cluster, "task": {"type": job, "index": 0}}
    assert _lone_task.workers_named({"TF_CONFIG": json.dumps(config)}) == count


def test_a_cluster_that_cannot_be_read_is_no_affair_of_fit():
    assert _lone_task.workers_named({"TF_CONFIG": "{"}) == 0


SERVERS = {"cluster": {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1", "d:1"]}}


@pytest.mark.parametrize(("job", "count"), [("chief", 2), ("worker", 2), ("ps", 0), ("evaluator", 0)])
def test_who_should_use_parameter_servers(job, count):
    config = {**SERVERS, "task": {"type": job, "index": 0}}
    assert _lone_task.servers_named({"TF_CONFIG": json.dumps(config)}) == count
    assert _lone_task.servers_named({"TF_CONFIG": "{"}) == 0


def test_a_chief_that_trains_without_its_servers_is_one_warning(caplog, monkeypatch):
    monkeypatch.setattr(_lone_task, "_joined", set())
    monkeypatch.setenv("TF_CONFIG", json.dumps({**SERVERS, "task": {"type": "chief", "index": 0}}))
    fit()
    (text,) = warnings(caplog)
    assert "TF_CONFIG names 2 parameter servers: each task runs the whole program by itself" in text
    assert "unisono.ParameterServerStrategy()" in text
    assert _lone_task.computes_apart_from_servers()


def test_a_strategy_with_servers_is_no_warning(caplog, monkeypatch):
    monkeypatch.setattr(_lone_task, "_joined", set())
    with local_strategy(workers=1) as strategy:
        monkeypatch.setenv("TF_CONFIG", json.dumps({**SERVERS, "task": {"type": "chief", "index": 0}}))
        with strategy.scope():
            fit(1)
        _scope_warnings.warn_alone()
        assert not _lone_task.computes_apart_from_servers()
    assert warnings(caplog) == []
