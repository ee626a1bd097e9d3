"""`RunConfig`: its defaults, its errors, and the cluster of TF_CONFIG."""

import json

import pytest

import unisono
from unisono.estimator import DistributeConfig, RunConfig

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}


def set_config(monkeypatch, cluster, job=None, index=None, **more):
    config = {"cluster": cluster, **more}
    if job is not None:
        config["task"] = {"type": job, "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_defaults_are_those_of_tensorflow():
    config = RunConfig()
    assert (config.save_checkpoints_secs, config.save_checkpoints_steps) == (600, None)
    assert (config.save_summary_steps, config.log_step_count_steps, config.keep_checkpoint_max) == (
        100,
        100,
        5,
    )
    assert (config.model_dir, config.tf_random_seed, config.train_distribute) == (None, None, None)
    assert (config.task_type, config.task_id, config.is_chief, config.master) == ("worker", 0, True, "")
    assert (config.num_worker_replicas, config.num_ps_replicas, config.global_id_in_cluster) == (1, 0, 0)
    assert (config.service, config.evaluation_master, config.remote_cluster) == (None, "", None)
    assert not config.cluster_spec
    with pytest.raises(AttributeError, match="steps_per_run"):
        config.steps_per_run  # noqa: B018


def test_replace_changes_one_of_the_checkpoint_arguments():
    config = RunConfig(save_checkpoints_steps=10)
    assert config.save_checkpoints_secs is None
    other = config.replace(save_checkpoints_secs=5, model_dir="/tmp/m")
    assert (other.save_checkpoints_steps, other.save_checkpoints_secs, other.model_dir) == (None, 5, "/tmp/m")
    assert config.model_dir is None
    with pytest.raises(ValueError, match="cannot be both set"):
        config.replace(save_checkpoints_steps=1, save_checkpoints_secs=1)
    with pytest.raises(ValueError, match="'master' is not supported"):
        config.replace(master="grpc://a")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"save_checkpoints_steps": 1, "save_checkpoints_secs": 1}, "cannot be both set"),
        ({"model_dir": ""}, "model_dir should be non-empty"),
        ({"save_summary_steps": -1}, "save_summary_steps should be >= 0"),
        ({"save_checkpoints_steps": -1}, "save_checkpoints_steps should be >= 0"),
        ({"keep_checkpoint_max": -1}, "keep_checkpoint_max should be >= 0"),
        ({"keep_checkpoint_every_n_hours": 0}, "keep_checkpoint_every_n_hours should be > 0"),
        ({"log_step_count_steps": 0}, "log_step_count_steps should be > 0"),
        ({"tf_random_seed": 1.5}, "tf_random_seed should be an integer"),
        ({"session_creation_timeout_secs": 0}, "session_creation_timeout_secs"),
        ({"experimental_max_worker_delay_secs": 0.5}, "experimental_max_worker_delay_secs"),
        ({"protocol": "http"}, "protocol should be grpc"),
    ],
)
def test_errors(arguments, text):
    with pytest.raises(ValueError, match=text):
        RunConfig(**arguments)


def test_a_strategy_may_be_given_once():
    one = unisono.OneDeviceStrategy("cpu:0")
    both = DistributeConfig(train_distribute=one, eval_distribute=one, remote_cluster={"worker": ["a:1"]})
    config = RunConfig(experimental_distribute=both)
    assert config.train_distribute is one
    assert config.eval_distribute is one
    assert config.remote_cluster.as_dict() == {"worker": ["a:1"]}
    for name in ("train_distribute", "eval_distribute"):
        with pytest.raises(ValueError, match=f"experimental_distribute.{name}"):
            RunConfig(experimental_distribute=both, **{name: one})
    with pytest.raises(TypeError, match="DistributeConfig"):
        RunConfig(experimental_distribute=one)


@pytest.mark.parametrize(
    ("job", "index", "expected"),
    [
        ("chief", 0, (True, 3, 1, 0, "grpc://a:1")),
        ("worker", 1, (False, 3, 1, 2, "grpc://c:1")),
        ("ps", 0, (False, 3, 1, 3, "grpc://d:1")),
        ("evaluator", 0, (False, 0, 0, None, "")),
    ],
)
def test_the_task_of_a_cluster(monkeypatch, job, index, expected):
    set_config(monkeypatch, CLUSTER, job, index, service={"key": 1})
    config = RunConfig()
    assert (config.task_type, config.task_id) == (job, index)
    assert expected == (
        config.is_chief, config.num_worker_replicas, config.num_ps_replicas, config.global_id_in_cluster,
        config.master,
    )  # fmt: skip
    assert config.service == {"key": 1}


def test_a_cluster_without_a_chief_needs_a_strategy(monkeypatch):
    set_config(monkeypatch, {"worker": ["b:1", "c:1"]}, "worker", 0)
    with pytest.raises(ValueError, match='must have one "chief" node'):
        RunConfig()
    config = RunConfig(train_distribute=unisono.OneDeviceStrategy("cpu:0"))
    assert config.is_chief
    assert config.num_worker_replicas == 2


def test_a_task_must_be_named(monkeypatch):
    set_config(monkeypatch, CLUSTER)
    with pytest.raises(ValueError, match="task type must be set"):
        RunConfig()
    set_config(monkeypatch, CLUSTER, "chief")
    with pytest.raises(ValueError, match="task index must be set"):
        RunConfig()
    set_config(monkeypatch, CLUSTER, "chief", 0, service="s")
    with pytest.raises(TypeError, match="must be a dict"):
        RunConfig()


def test_tf_config_may_name_the_directory(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"model_dir": "/tmp/of_config"}))
    assert RunConfig().model_dir == "/tmp/of_config"
    with pytest.raises(ValueError, match="must have the same value as the model_dir in TF_CONFIG"):
        RunConfig(model_dir="/tmp/other")
    monkeypatch.setenv("TF_CONFIG", json.dumps({"model_dir": ""}))
    with pytest.raises(ValueError, match="model_dir in TF_CONFIG should be non-empty"):
        RunConfig()
