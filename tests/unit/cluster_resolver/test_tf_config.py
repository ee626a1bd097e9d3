"""TF_CONFIG: what is read, and how each mistake is explained."""

import json
import re

import pytest

from unisono import InvalidArgumentError
from unisono.cluster_resolver import ClusterSpec, TFConfigClusterResolver, resolve

TWO = {"worker": ["a:1", "b:1"]}


def resolver(config, *args, **kwargs):
    text = config if isinstance(config, str) else json.dumps(config)
    return TFConfigClusterResolver(*args, environ={"TF_CONFIG": text}, **kwargs)


def test_everything_it_tells():
    config = {
        "cluster": {"chief": ["c:1"], **TWO, "ps": ["p:1"]},
        "task": {"type": "worker", "index": 1},
        "rpc_layer": "grpc+loas",
        "environment": "cloud",
    }
    r = resolver(config)
    assert r.cluster_spec() == ClusterSpec(config["cluster"])
    assert (r.task_type, r.task_id, r.rpc_layer, r.environment) == ("worker", 1, "grpc+loas", "cloud")
    assert r.master() == "grpc+loas://b:1"
    assert r.master("ps", 0, "http") == "http://p:1"
    assert (r.coordinator_address, r.num_processes, r.process_id) == ("c:1", 3, 2)


def test_arguments_win():
    config = {"cluster": TWO, "task": {"type": "ps", "index": 9}, "rpc_layer": "x", "environment": "y"}
    r = resolver(config, "worker", 0, rpc_layer="grpc", environment="google")
    assert (r.task_type, r.task_id, r.rpc_layer, r.environment) == ("worker", 0, "grpc", "google")


def test_attributes_can_be_set():
    r = resolver({"cluster": TWO})
    r.task_type, r.task_id, r.rpc_layer = "worker", 1, "grpc"
    assert r.master() == "grpc://b:1"


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " \n"}, {"TF_CONFIG": "{}"}])
def test_no_cluster(environ):
    r = TFConfigClusterResolver(environ=environ)
    assert r.cluster_spec() == {}
    assert (r.task_type, r.task_id, r.task, r.rpc_layer, r.environment) == (None, None, None, None, "")
    assert (r.master(), r.coordinator_address, r.num_processes, r.process_id) == ("", None, 1, 0)


def test_it_is_read_again(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    r = TFConfigClusterResolver()
    assert not r.cluster_spec()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": TWO, "task": {"type": "worker", "index": 0}}))
    assert (r.cluster_spec(), r.task_id) == (ClusterSpec(TWO), 0)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": TWO, "task": {"type": "worker", "index": 1}}))
    assert r.task_id == 1


def test_an_index_of_digits():
    assert resolver({"cluster": TWO, "task": {"type": "worker", "index": "1"}}).task_id == 1


def test_a_missing_task():
    r = resolver({"cluster": TWO})
    assert (r.cluster_spec(), r.task_type, r.task_id, r.master()) == (ClusterSpec(TWO), None, None, "")
    with pytest.raises(InvalidArgumentError, match="must know which task each process is"):
        r.process_id  # noqa: B018


def test_a_task_without_index():
    r = resolver({"cluster": TWO, "task": {"type": "worker"}})
    assert (r.task_type, r.task_id, r.task) == ("worker", None, None)


def test_a_sparse_cluster():
    config = {
        "sparseCluster": {"worker": {"3": "d:1"}, "ps": ["p:1"]},
        "task": {"type": "worker", "index": 3},
    }
    r = resolver(config)
    assert r.cluster_spec().as_dict() == {"worker": {3: "d:1"}, "ps": ["p:1"]}
    assert r.master() == "d:1"


@pytest.mark.parametrize("cluster", [TWO, {**TWO, "evaluator": ["e:1"]}])
def test_the_evaluator_is_alone(cluster):
    r = resolver({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
    assert (r.coordinator_address, r.num_processes, r.process_id) == (None, 1, 0)
    assert r.task.is_chief(r.cluster_spec())


def test_one_task_has_no_master():
    r = resolver({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    assert r.master() == ""
    assert resolver({"cluster": TWO, "session_master": "s:1"}).master() == "s:1"


def test_launchers_add_keys_of_their_own():
    assert resolver({"cluster": TWO, "job": {"x": 1}, "trial": "", "task": {"trial": 3}}).task is None


#: https://docs.cloud.google.com/vertex-ai/docs/training/distributed-training
CLUSTER_SPEC = {
    "cluster": {
        "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
        "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
        "workerpool2": ["cmle-training-workerpool2-ab-0:2222"],
        "workerpool3": ["cmle-training-workerpool3-ab-0:2222"],
    },
    "environment": "cloud",
    "task": {"type": "workerpool1", "index": 1, "trial": "TRIAL_ID"},
    "job": {"worker_pool_specs": []},
}


def test_vertex_ais_pools():
    environ = {"CLUSTER_SPEC": json.dumps(CLUSTER_SPEC), "TF_CONFIG": ""}
    r = resolve(environ)
    pools = list(CLUSTER_SPEC["cluster"].values())
    assert r.cluster_spec() == dict(zip(("chief", "worker", "ps", "evaluator"), pools, strict=True))
    assert (r.task_type, r.task_id, r.environment) == ("worker", 1, "cloud")
    assert (r.process_id, r.num_processes) == (2, 3)
    assert r.coordinator_address == "cmle-training-workerpool0-ab-0:2222"
    wrong = {"CLUSTER_SPEC": json.dumps(CLUSTER_SPEC | {"task": {"type": "workerpool9", "index": 0}})}
    with pytest.raises(InvalidArgumentError, match=r"CLUSTER_SPEC must .*Received: CLUSTER_SPEC='"):
        resolve(wrong).cluster_spec()
    cut_off = {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"],'}
    with pytest.raises(InvalidArgumentError, match=r"CLUSTER_SPEC must .*Received: CLUSTER_SPEC='"):
        resolve(cut_off).cluster_spec()


def test_vertex_ais_tf_config_goes_first():
    config = {"cluster": {"master": ["m:1"], **TWO}, "task": {"type": "master", "index": 0, "cloud": "ID"}}
    r = resolve({"CLUSTER_SPEC": json.dumps(CLUSTER_SPEC), "TF_CONFIG": json.dumps(config)})
    assert r.cluster_spec() == {"chief": ["m:1"], **TWO}
    assert (r.task_type, r.process_id) == ("chief", 0)


def test_another_cluster_spec_is_none_of_vertex_ai():
    one = {"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0", "index": 0}}
    for spec in (one, {"clusterSpec": {"Master": ["a:1"]}}):
        assert resolve({"CLUSTER_SPEC": json.dumps(spec)}) is None


def with_task(kind, index, cluster=None):
    return {"cluster": TWO if cluster is None else cluster, "task": {"type": kind, "index": index}}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("{'cluster': 1}", r"it must be JSON, but cannot be read at line 1, column 2 \(Expecting property"),
        ("[]", "it must be a JSON object, not a list"),
        ("null", "it must be a JSON object, not null"),
        ('"a"', "it must be a JSON object, not a string"),
        ("true", "it must be a JSON object, not a boolean"),
        ("1.5", "it must be a JSON object, not a number"),
        ({"clusters": TWO}, "'clusters' must be written 'cluster'"),
        ({"Cluster": TWO}, "'Cluster' must be written 'cluster'"),
        ({"cluster": TWO, "tasks": {}}, "'tasks' must be written 'task'"),
        ({"cluster": TWO, "sparseCluster": TWO}, "one of 'cluster' and 'sparseCluster', not both"),
        ({"cluster": ["a:1"]}, "'cluster' must be an object of jobs, not a list"),
        ({"cluster": None}, "'cluster' must be an object of jobs, not null"),
        ({"cluster": {"workers": ["a:1"]}}, r"'workers' must be one of chief, .*\(write 'worker'\)"),
        ({"cluster": {"master": ["a:1"], "chief": ["b:1"]}}, r"'master' must be .*\(write 'chief'\)"),
        ({"cluster": {"gpu": ["a:1"]}}, "'gpu' must be one of chief, worker, ps, evaluator;?"),
        ({"cluster": {"worker": "a:1"}}, "'worker' has 'a:1', not a list"),
        ({"cluster": {"worker": ["a:1", "b"]}}, "worker:1 is 'b': it has no port"),
        ({"cluster": {"worker": ["a:1", 5]}}, "worker:1 is 5: it is not a string"),
        ({"cluster": {"worker": ["a:1"], "ps": ["a:1"]}}, "worker:0 and ps:0 have one address"),
        ({"cluster": TWO, "task": "worker"}, "'task' must be an object, not a string"),
        (with_task("worker", 2), r"index 2 is not in the cluster, whose 'worker' indices are \[0, 1\]"),
        (with_task("worker", -1), "the task's index must be an integer from 0, not -1"),
        (with_task("worker", "one"), "the task's index must be an integer from 0, not 'one'"),
        (with_task("worker", True), "the task's index must be an integer from 0, not True"),
        (with_task("ps", 0), r"the task's type 'ps' is not in the cluster, which has \['worker'\]"),
        (with_task("wroker", 0), r"the task's type must be one of .* not 'wroker' \(write 'worker'\)"),
        (with_task(3, 0), "the task's type must be one of .* not 3"),
        (with_task("evaluator", 1, {**TWO, "evaluator": ["e:1"]}), "index 1 is not in the cluster"),
        ({"cluster": TWO, "rpc_layer": 3}, "'rpc_layer' must be a string"),
        ({"cluster": TWO, "environment": {}}, "'environment' must be a string"),
    ],
)
def test_each_mistake_is_explained(config, problem):
    r = resolver(config)
    text = r._environ["TF_CONFIG"]
    message = (
        rf"TF_CONFIG must describe.*{problem}.*Received: TF_CONFIG={re.escape(repr(text))}.*export TF_CON"
    )
    for ask in (r.cluster_spec, r.master, lambda: r.task_type, lambda: r.task_id, lambda: r.process_id):
        with pytest.raises(InvalidArgumentError, match=message) as info:
            ask()
    example = re.search("export TF_CONFIG='(.*)'", str(info.value))[1]
    assert resolver(example).num_processes == 2


def test_all_mistakes_are_in_one_message():
    with pytest.raises(ValueError, match=r"worker:0 is 'a'.*; the task's index must be.*; 'rpc_layer'"):
        resolver({"cluster": {"worker": ["a"]}, "task": {"index": -1}, "rpc_layer": 3}).cluster_spec()


@pytest.mark.parametrize(
    ("arguments", "problem", "received"),
    [
        ({"task_id": 7}, "index 7 is not in the cluster", "task_id=7"),
        ({"task_type": "chief"}, "type 'chief' is not in the cluster", "task_type='chief'"),
    ],
)
def test_wrong_arguments_are_received(arguments, problem, received):
    with pytest.raises(InvalidArgumentError, match=rf"{problem}.*Received: TF_CONFIG=.*, {received}"):
        resolver(with_task("worker", 0), **arguments).cluster_spec()


def test_a_long_value_is_shortened():
    with pytest.raises(InvalidArgumentError) as info:
        resolver("x" * 5000).cluster_spec()
    assert len(str(info.value)) < 1000
