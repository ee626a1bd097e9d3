"""The base of all resolvers, clusters by hand, and unions."""

import jax
import pytest

from unisono import InvalidArgumentError, InvalidTypeError, _mesh, cluster_resolver
from unisono._system._environ import process_environ
from unisono.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    TPUClusterResolver,
    UnionClusterResolver,
    UnionResolver,
)
from unisono.cluster_resolver._spec import Task

SPEC = ClusterSpec({"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]})


class Ours(ClusterResolver):
    def cluster_spec(self):
        return SPEC


def ours(kind="worker", index=1, layer=None):
    resolver = Ours()
    resolver.task_type, resolver.task_id, resolver.rpc_layer = kind, index, layer
    return resolver


def test_the_public_names_are_there():
    for name in cluster_resolver.__all__:
        assert getattr(cluster_resolver, name) is not None
    assert UnionClusterResolver is UnionResolver


def test_a_resolver_of_ones_own():
    resolver = ours(layer="grpc")
    assert resolver.task == Task("worker", 1)
    assert (resolver.coordinator_address, resolver.num_processes, resolver.process_id) == ("c:1", 3, 2)
    assert resolver.master() == "grpc://b:1"
    assert resolver.master("ps", 0) == "grpc://p:1"
    assert resolver.master(task_id=0, rpc_layer="http") == "http://a:1"
    assert resolver.environment == ""


def test_the_master_of_an_unknown_task():
    assert Ours().master() == ""
    with pytest.raises(InvalidArgumentError, match="Received: worker:7"):
        Ours().master("worker", 7)


@pytest.mark.parametrize("ask", ["coordinator_address", "num_processes", "process_id"])
@pytest.mark.parametrize(("kind", "index"), [(None, 0), ("worker", None), ("ps", 0), ("worker", 2)])
def test_a_task_that_cannot_compute(ask, kind, index):
    with pytest.raises(InvalidArgumentError, match="Workers that train together"):
        getattr(ours(kind, index), ask)


def test_the_environment_is_that_of_the_process(monkeypatch):
    monkeypatch.setenv("UNISONO_TEST", "1")
    assert process_environ()["UNISONO_TEST"] == "1"


def test_accelerators_are_counted(monkeypatch):
    def local_devices(kind):
        if kind == "tpu":
            raise RuntimeError("no TPU")
        return jax.local_devices()[:3]

    monkeypatch.setattr(_mesh, "local_devices", local_devices)
    assert ours().num_accelerators() == ours().num_accelerators("worker", 1) == {"GPU": 3}


def test_a_task_knows_its_own_accelerators():
    with pytest.raises(InvalidArgumentError, match=r"its own.*Received: .*task_id=0.*task_id=1.*{'GPU': 8}"):
        ours().num_accelerators("worker", 0)


def test_a_tpu_is_a_cluster_of_one():
    resolver = TPUClusterResolver(devices=["cpu:0"])
    assert (resolver.coordinator_address, resolver.num_processes, resolver.process_id) == (None, 1, 0)


def test_a_cluster_by_hand():
    resolver = SimpleClusterResolver(SPEC, "m:1", "worker", 0, "google", {"GPU": 8}, "grpc")
    assert resolver.cluster_spec() is SPEC
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 0, "google")
    assert resolver.num_accelerators("ps", 0) == {"GPU": 8}
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("worker", 1, "http") == "http://b:1"
    assert resolver.process_id == 1


def test_the_least_by_hand():
    resolver = SimpleClusterResolver(SPEC)
    assert (resolver.master(), resolver.environment, resolver.num_accelerators()) == ("", "", {})
    assert (resolver.task, resolver.rpc_layer) == (None, None)


@pytest.mark.parametrize("spec", [{"worker": ["a:1"]}, None, "a:1"])
def test_by_hand_needs_a_spec(spec):
    with pytest.raises(InvalidTypeError, match=r"must be a `ClusterSpec`. Received: .*Write"):
        SimpleClusterResolver(spec)


def test_by_hand_needs_a_masters_name():
    with pytest.raises(InvalidTypeError, match=r"must be a string. Received: master=3.*Write"):
        SimpleClusterResolver(SPEC, 3)


def union(*clusters, **kwargs):
    return UnionResolver(*[SimpleClusterResolver(ClusterSpec(c)) for c in clusters], **kwargs)


@pytest.mark.parametrize(
    ("clusters", "merged"),
    [
        ([{"worker": ["a:1"]}], {"worker": ["a:1"]}),
        ([{"worker": ["a:1"]}, {"ps": ["p:1"]}], {"worker": ["a:1"], "ps": ["p:1"]}),
        ([{"worker": ["a:1"]}, {"worker": ["b:1", "c:1"]}], {"worker": ["a:1", "b:1", "c:1"]}),
        ([{"worker": {1: "b:1"}}, {"worker": {0: "a:1"}}], {"worker": ["a:1", "b:1"]}),
        ([{"worker": {5: "b:1"}}, {"worker": ["a:1"]}], {"worker": {0: "a:1", 5: "b:1"}}),
        ([{"worker": {5: "b:1"}}, {"worker": {5: "b:1"}}], {"worker": {5: "b:1"}}),
        ([{}, {"worker": ["a:1"]}], {"worker": ["a:1"]}),
    ],
)
def test_unions(clusters, merged):
    assert union(*clusters).cluster_spec() == merged


def test_a_task_of_a_union_has_one_address():
    with pytest.raises(InvalidArgumentError, match=r"Received: worker:5 is 'b:1' and 'c:1'. Give"):
        union({"worker": {5: "b:1"}}, {"worker": {5: "c:1"}}).cluster_spec()


def test_an_address_of_a_union_has_one_task():
    with pytest.raises(InvalidArgumentError, match="worker:0 and worker:1 have one address"):
        union({"worker": ["a:1"]}, {"worker": ["a:1"]}).cluster_spec()


def test_the_first_of_a_union_tells_the_rest():
    first = SimpleClusterResolver(SPEC, "m:1", "worker", 1, "google", {"GPU": 2}, "grpc")
    both = UnionResolver(first, SimpleClusterResolver(ClusterSpec({"evaluator": ["e:1"]})))
    assert (both.task_type, both.task_id, both.environment, both.rpc_layer) == ("worker", 1, "google", "grpc")
    assert both.num_accelerators() == {"GPU": 2}
    assert both.master() == "grpc://m:1"
    assert both.master("evaluator", 0) == "grpc://e:1"
    assert both.process_id == 2


def test_task_zero_is_an_argument_too():
    """TensorFlow's resolver takes `task_id=0` for none given."""
    first = SimpleClusterResolver(SPEC, task_type="worker", task_id=1)
    both = UnionResolver(first, task_type="chief", task_id=0, rpc_layer="http")
    assert (both.task, both.rpc_layer) == (Task("chief", 0), "http")


def test_a_union_of_nothing():
    with pytest.raises(InvalidArgumentError, match=r"must have a resolver. Received: none. Write"):
        UnionResolver()


def test_a_union_of_something_else():
    with pytest.raises(InvalidTypeError, match=r"Received: ClusterSpec. Write"):
        UnionResolver(SPEC)
