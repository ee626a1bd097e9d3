"""Clusters, tasks and timeouts are checked when they are made; TensorFlow's rules about them."""

import copy
import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import InvalidArgumentError, InvalidTypeError
from unisono.cluster_resolver._spec import (
    ClusterSpec,
    Task,
    Timeouts,
    address_problem,
    chief_address,
    process_id,
    read_index,
    shortened,
    validate_collective,
    with_port,
)

MIXED = ClusterSpec({"worker": ["w0:1", "w1:1"], "ps": ["p0:1"], "chief": ["c0:1"], "evaluator": ["e0:1"]})
WORKERS = ClusterSpec({"worker": ["w0:1", "w1:1"]})
SPARSE = ClusterSpec({"worker": {4: "w4:1", 1: "w1:1"}, "ps": ["p0:1"]})


def test_what_a_spec_tells():
    assert MIXED.jobs == list(MIXED) == ["worker", "ps", "chief", "evaluator"]
    assert MIXED.num_tasks("worker") == 2
    assert MIXED.task_indices("worker") == [0, 1]
    assert MIXED.task_address("worker", 1) == "w1:1"
    assert MIXED.job_tasks("worker") == ["w0:1", "w1:1"]
    assert "chief" in MIXED
    assert "chief" not in WORKERS


def test_a_sparse_spec():
    assert SPARSE.task_indices("worker") == [1, 4]
    assert SPARSE.num_tasks("worker") == 2
    assert SPARSE.job_tasks("worker") == [None, "w1:1", None, None, "w4:1"]
    assert SPARSE.as_dict() == {"worker": {1: "w1:1", 4: "w4:1"}, "ps": ["p0:1"]}
    assert ClusterSpec({"worker": {"0": "a:1", "1": "b:1"}}).as_dict() == {"worker": ["a:1", "b:1"]}


def test_equality_and_truth():
    assert not ClusterSpec({})
    assert WORKERS
    assert ClusterSpec({}) == {}
    assert ClusterSpec(MIXED) == MIXED
    assert WORKERS == {"worker": ["w0:1", "w1:1"]}
    assert WORKERS != MIXED
    assert WORKERS != "worker"
    other_order = ClusterSpec(dict(reversed(MIXED.as_dict().items())))
    assert other_order == MIXED
    assert hash(other_order) == hash(MIXED)


def test_a_job_without_tasks_is_left_out():
    spec = ClusterSpec({"chief": [], "worker": ["w0:1"], "ps": {}})
    assert spec.jobs == ["worker"]
    assert Task("worker", 0).is_chief(spec)


def test_a_spec_does_not_change():
    given_dict = {"worker": ["a:1"]}
    spec = ClusterSpec(given_dict)
    given_dict["worker"].append("b:1")
    spec.as_dict()["worker"].append("c:1")
    spec.task_indices("worker").append(9)
    assert spec.as_dict() == {"worker": ["a:1"]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec._jobs = ()


HOSTS = st.one_of(
    st.text("abz09", min_size=1, max_size=5).map("{}-x.example".format),
    st.tuples(*[st.integers(0, 255)] * 4).map("{0[0]}.{0[1]}.{0[2]}.{0[3]}".format),
    st.integers(0, 0xFFFF).map("[fe80::{:x}]".format),
)
ADDRESSES = st.builds("{}:{}".format, HOSTS, st.integers(1, 65535))
INDICES = st.lists(st.integers(0, 50), min_size=1, max_size=4, unique=True)


@st.composite
def clusters(draw):
    jobs = draw(st.lists(st.sampled_from(["chief", "worker", "ps", "evaluator"]), max_size=4, unique=True))
    indices = [draw(INDICES) for _ in jobs]
    count = sum(map(len, indices))
    addresses = draw(st.lists(ADDRESSES, min_size=count, max_size=count, unique=True))
    return {j: {i: addresses.pop() for i in some} for j, some in zip(jobs, indices, strict=True)}


@settings(deadline=None)
@given(clusters())
def test_round_trips(cluster):
    spec = ClusterSpec(cluster)
    assert ClusterSpec(spec.as_dict()) == spec
    # JSON turns the indices of a sparse job into strings.
    assert ClusterSpec(json.loads(json.dumps(spec.as_dict()))) == spec
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    for job, tasks in cluster.items():
        assert {i: spec.task_address(job, i) for i in spec.task_indices(job)} == tasks


@settings(deadline=None)
@given(clusters())
def test_processes_are_numbered_without_gaps(cluster):
    spec = ClusterSpec(cluster)
    tasks = [Task(j, i) for j in ("chief", "worker") if j in spec for i in spec.task_indices(j)]
    assert [process_id(spec, t) for t in tasks] == list(range(len(tasks)))
    if spec:
        assert spec.num_processes() == len(tasks)


GOOD = ["a:1", "a:65535", "my_host.x-y.local:80", "10.0.0.1:2222", "[::1]:2222", "[fe80::1%eth0]:1", "7:1"]
BAD = [
    (7, "not a string"),
    ("", "no port"),
    ("a", "no port"),
    ("[::1]", "no port"),
    ("a:", "port is not between"),
    ("a:0", "port is not between"),
    ("a:65536", "port is not between"),
    ("a:http", "port is not between"),
    ("a:-1", "port is not between"),
    ("a:٣", "port is not between"),
    ("a:" + "9" * 5000, "port is not between"),
    (":1", "no host"),
    ("a b:1", "not a name or IP"),
    ("-a:1", "not a name or IP"),
    ("a/b:1", "not a name or IP"),
    ("[a]:1", "not a name or IP"),
    ("10.0.0.256:1", "not an IPv4"),
    ("::1:2222", r"written '\[::1\]:2222'"),
    ("[::g]:2222", r"written '\[::1\]:2222'"),
    ("[::1:2222", r"written '\[::1\]:2222'"),
    ("grpc://a:1", "has a protocol"),
]


@pytest.mark.parametrize("address", GOOD)
def test_good_addresses(address):
    assert address_problem(address) is None
    assert ClusterSpec({"worker": [address]}).task_address("worker", 0) == address


@pytest.mark.parametrize(("address", "problem"), BAD)
def test_bad_addresses_are_named(address, problem):
    with pytest.raises(InvalidArgumentError, match=rf"but worker:1 is .*{problem}.*Received: .*Write"):
        ClusterSpec({"worker": ["w0:1", address]})


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({"worker": ["a:1", "b:1"], "ps": ["A:1"]}, "worker:0 and ps:0 have one address, 'A:1'"),
        ({"worker": ["a:1", "a:1"]}, "worker:0 and worker:1 have one address"),
        ({"worker": "a:1"}, "'worker' has 'a:1', not a list"),
        ({"worker": None}, "'worker' has None, not a list"),
        ({"worker": {-1: "a:1"}}, "'worker' has -1 for the index"),
        ({"worker": {True: "a:1"}}, "'worker' has True for the index"),
        ({"worker": {"x": "a:1"}}, "'worker' has 'x' for the index"),
        ({"worker": {1: "a:1", "1": "b:1"}}, "'worker' has the index 1 twice"),
        ({3: ["a:1"]}, "3 is not the name of a job"),
        ({"": ["a:1"]}, "'' is not the name of a job"),
        ({"a/b": ["a:1"]}, "'a/b' is not the name of a job"),
        (
            {"workers": ["a:1"]},
            r"the job 'workers' must be one of chief, .*\(write 'worker'",
        ),
        ({"master": ["a:1"], "worker": ["b:1"]}, r"the job 'master' must be one of .* \(write 'chief'\)"),
        ({"gpu": ["a:1"]}, "the job 'gpu' must be one of chief, worker, ps, evaluator"),
    ],
)
def test_bad_clusters_are_explained(cluster, problem):
    with pytest.raises(InvalidArgumentError, match=rf"but {problem}.*Received: \{{.*Write `ClusterSpec"):
        ClusterSpec(cluster)


def test_all_problems_are_in_one_message():
    with pytest.raises(ValueError, match=r"worker:0 is 'a'.*; ps:0 is 'b'"):
        ClusterSpec({"worker": ["a"], "ps": ["b"]})


@pytest.mark.parametrize("cluster", [None, ["a:1"], "a:1", 3])
def test_a_cluster_is_a_dict(cluster):
    with pytest.raises(InvalidTypeError, match=r"must be a dict.*Received: .*Write `ClusterSpec"):
        ClusterSpec(cluster)


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.num_tasks("gpu"),
        lambda s: s.task_indices("gpu"),
        lambda s: s.task_address("gpu", 0),
        lambda s: s.job_tasks("gpu"),
    ],
)
def test_an_absent_job(ask):
    with pytest.raises(InvalidArgumentError, match=r"Received: 'gpu'. The cluster has the jobs \['worker'\]"):
        ask(WORKERS)


def test_an_absent_task():
    with pytest.raises(InvalidArgumentError, match=r"Received: worker:2.*indices \[0, 1\]"):
        WORKERS.task_address("worker", 2)


@pytest.mark.parametrize(
    ("value", "index"),
    [
        (0, 0),
        (7, 7),
        ("12", 12),
        (-1, None),
        ("-1", None),
        (True, None),
        (1.0, None),
        ("", None),
        (None, None),
    ],
)
def test_indices(value, index):
    assert read_index(value) == index


@pytest.mark.parametrize(
    ("host", "address"),
    [("a", "a:5"), ("10.0.0.1", "10.0.0.1:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5")],
)
def test_with_port(host, address):
    assert with_port(host, 5) == address
    assert address_problem(address) is None


def test_long_values_are_shortened_in_messages():
    assert len(shortened("x" * 1000)) == 401
    assert shortened(("x", 1)) == "('x', 1)"


@pytest.mark.parametrize(
    ("task", "spec", "chief"),
    [
        (Task("chief", 0), MIXED, True),
        (Task("worker", 0), MIXED, False),
        (Task("worker", 0), WORKERS, True),
        (Task("worker", 1), WORKERS, False),
        (Task("ps", 0), MIXED, False),
        (Task("evaluator", 0), MIXED, True),
        (Task("evaluator", 0), WORKERS, True),
    ],
)
def test_who_is_chief(task, spec, chief):
    assert task.is_chief(spec) is chief


@pytest.mark.parametrize(
    ("kind", "index"), [("worker", -1), ("worker", "0"), ("worker", True), ("", 0), (None, 0), ("a b", 0)]
)
def test_a_task_is_checked(kind, index):
    with pytest.raises(InvalidArgumentError, match=r"A task must.*Received: type=.*index=.*Write"):
        Task(kind, index)


@pytest.mark.parametrize("name", ["start_up", "heartbeat", "collective", "shutdown"])
@pytest.mark.parametrize("seconds", [0, -1.0, math.inf, math.nan, "5", None, True])
def test_timeouts_are_positive(name, seconds):
    with pytest.raises(InvalidArgumentError, match=rf"positive.*Received: {name}=.*Write `Timeouts\({name}="):
        Timeouts(**{name: seconds})
    assert getattr(Timeouts(**{name: 3}), name) == 3


@pytest.mark.parametrize(
    ("spec", "task", "number", "count"),
    [
        (MIXED, Task("chief", 0), 0, 3),
        (MIXED, Task("worker", 0), 1, 3),
        (MIXED, Task("worker", 1), 2, 3),
        (MIXED, Task("evaluator", 0), 0, 1),
        (WORKERS, Task("worker", 1), 1, 2),
        (WORKERS, Task("evaluator", 0), 0, 1),
        (SPARSE, Task("worker", 4), 1, 2),
    ],
)
def test_numbers_of_processes(spec, task, number, count):
    assert process_id(spec, task) == number
    assert spec.num_processes(task.type) == count


def test_an_empty_cluster_is_one_process():
    assert ClusterSpec({}).num_processes() == 1


@pytest.mark.parametrize("task", [Task("ps", 0), Task("gpu", 0)])
def test_tasks_without_a_number(task):
    with pytest.raises(InvalidArgumentError, match=f"process number. Received: {task}"):
        process_id(MIXED, task)


@pytest.mark.parametrize(("spec", "address"), [(MIXED, "c0:1"), (WORKERS, "w0:1"), (SPARSE, "w1:1")])
def test_chief_address(spec, address):
    assert chief_address(spec) == address


def test_no_chief_address():
    with pytest.raises(InvalidArgumentError, match=r"must have a chief or a worker. Received: ClusterSpec"):
        chief_address(ClusterSpec({"ps": ["a:1"]}))


@pytest.mark.parametrize(
    ("spec", "task"),
    [
        (ClusterSpec({}), None),
        (ClusterSpec({}), Task("ps", 0)),
        (MIXED, Task("chief", 0)),
        (MIXED, Task("worker", 1)),
        (MIXED, Task("evaluator", 0)),
        (WORKERS, Task("evaluator", 0)),
        (ClusterSpec({"evaluator": ["e:1"]}), Task("evaluator", 0)),
    ],
)
def test_collective_clusters(spec, task):
    validate_collective(spec, task)


@pytest.mark.parametrize(
    ("cluster", "task", "problem"),
    [
        (WORKERS, None, "must know which task each process is"),
        (MIXED, Task("ps", 0), "'ps' task belongs to ParameterServerStrategy"),
        (MIXED, Task("gpu", 0), "must be of the jobs .* not 'gpu'"),
        ({"ps": ["p:1"]}, Task("worker", 0), "need a job 'worker', 'chief' or 'evaluator'"),
        ({"chief": ["a:1", "b:1"]}, Task("chief", 0), "one chief only, not 2"),
        ({"worker": ["a:1"], "evaluator": ["b:1", "c:1"]}, Task("worker", 0), "one evaluator only, not 2"),
        (WORKERS, Task("chief", 0), "has no 'chief'"),
        (WORKERS, Task("worker", 2), r"'worker' indices are \[0, 1\]"),
        (MIXED, Task("evaluator", 1), r"'evaluator' indices are \[0\]"),
    ],
)
def test_wrong_collective_clusters(cluster, task, problem):
    with pytest.raises(InvalidArgumentError, match=rf"{problem}.*Received: task=.*TF_CONFIG"):
        validate_collective(ClusterSpec(cluster), task)
