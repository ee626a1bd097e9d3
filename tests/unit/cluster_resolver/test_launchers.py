"""MPI, JAX's variables, and Kubernetes."""

import platform
import sys
from types import ModuleType, SimpleNamespace

import pytest

from unisono import BackendError, InvalidArgumentError
from unisono.cluster_resolver import (
    ClusterSpec,
    JaxClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    MPIClusterResolver,
)
from unisono.cluster_resolver._jax import read_cluster
from unisono.cluster_resolver._mpi import end_mpi, read_rank
from unisono.cluster_resolver._spec import Task

OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
JAX = {"JAX_COORDINATOR_ADDRESS": "c:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
PET = {"PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "29500", "PET_NNODES": "2", "PET_NODE_RANK": "1"}


class Ranks:
    """What mpi4py's communicator does, of three ranks on two hosts."""

    def Get_rank(self):
        return 2

    def Get_size(self):
        return 3

    def allgather(self, sendobj):
        return ["a", sendobj, sendobj]


@pytest.mark.parametrize(
    "names", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]
)
def test_ranks(names):
    assert read_rank(dict(zip(names, ("1", "3"), strict=True))) == (1, 3)


@pytest.mark.parametrize("hosts", ["a,b[1-2]", ["a", "b1", "b2"]])
def test_hosts_of_mpi(hosts):
    resolver = MPIClusterResolver(hosts, environ=OMPI)
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["a:8888", "b1:8888", "b2:8888"]})
    assert (resolver.task, resolver.master()) == (Task("worker", 1), "grpc://b1:8888")
    assert (resolver.coordinator_address, resolver.num_processes, resolver.process_id) == ("a:8888", 3, 1)


def test_ranks_tell_each_other_their_hosts(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "me")
    expected = {"worker": ["a:5", "me:5", "me:6"]}
    resolver = MPIClusterResolver(port_base=5, communicator=Ranks(), environ={})
    assert (resolver.cluster_spec(), resolver.task_id) == (ClusterSpec(expected), 2)
    installed = ModuleType("mpi4py.MPI")
    installed.COMM_WORLD = Ranks()
    monkeypatch.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", installed)
    resolver = MPIClusterResolver(port_base=5, environ=OMPI)
    assert (resolver.cluster_spec(), resolver.task_id) == (ClusterSpec(expected), 1)


@pytest.mark.parametrize(("begun", "ended", "calls"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_mpi_is_ended_where_it_was_begun(monkeypatch, begun, ended, calls):
    end_mpi()
    said = []
    mpi = ModuleType("mpi4py.MPI")
    mpi.Is_initialized, mpi.Is_finalized = (lambda: begun), (lambda: ended)
    mpi.Finalize = lambda: said.append("ended")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    end_mpi()
    assert len(said) == calls


@pytest.mark.parametrize(
    ("name", "local"),
    [("OMPI_COMM_WORLD_LOCAL_SIZE", "3"), ("MPI_LOCALNRANKS", "3"), ("MPI_LOCALNRANKS", "2")],
)
def test_ranks_of_one_machine_need_no_hosts(monkeypatch, name, local):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    if local != "3":
        with pytest.raises(BackendError, match="mpi4py"):
            MPIClusterResolver(environ={**OMPI, name: local})
        return
    resolver = MPIClusterResolver(port_base=5, environ={**OMPI, name: local})
    assert resolver.cluster_spec().as_dict() == {"worker": ["127.0.0.1:5", "127.0.0.1:6", "127.0.0.1:7"]}


def test_without_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendError, match=r"through mpi4py. Received: .*unisono\[mpi\].*hosts="):
        MPIClusterResolver(environ=OMPI)


@pytest.mark.parametrize(
    ("environ", "hosts", "problem"),
    [
        ({}, ["a"], "MPI must set .* OMPI_COMM_WORLD_RANK, PMI_RANK.*Received: none.*mpirun"),
        ({"PMI_RANK": "0"}, ["a"], "PMI_RANK must be a rank below PMI_SIZE. Received: '0' and ''"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, ["a"], "Received: '2' and '2'"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, ["a"], "Received: 'x' and '2'"),
        (OMPI, ["a"], r"one host per rank. Received: 1 hosts for 3 ranks, \['a'\]. Write"),
        (OMPI, "a[", "host list must"),
        (OMPI, ["a", "b", ""], "worker:2 is ':8888': it has no host"),
    ],
)
def test_wrong_mpi(environ, hosts, problem):
    with pytest.raises(InvalidArgumentError, match=problem):
        MPIClusterResolver(hosts, environ=environ)


@pytest.mark.parametrize(
    ("environ", "arguments", "meeting"),
    [
        (JAX, {}, ("c:1", 4, 3)),
        (JAX, {"process_id": 0}, ("c:1", 4, 0)),
        (JAX, {"coordinator_address": "d:2", "num_processes": 9, "process_id": 8}, ("d:2", 9, 8)),
        ({}, {"coordinator_address": "d:2", "num_processes": 1, "process_id": 0}, ("d:2", 1, 0)),
        ({**JAX, "JAX_COORDINATOR_PORT": "7"}, {}, ("c:1", 4, 3)),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": "c", "JAX_COORDINATOR_PORT": "7"}, {}, ("c:7", 4, 3)),
        (PET, {}, ("m:29500", 2, 1)),
        ({**PET, "PET_MASTER_ADDR": "::1"}, {}, ("[::1]:29500", 2, 1)),
        ({**PET, **JAX}, {}, ("c:1", 4, 3)),
    ],
)
def test_where_jax_meets(environ, arguments, meeting):
    resolver = JaxClusterResolver(**arguments, environ=environ)
    assert (resolver.coordinator_address, resolver.num_processes, resolver.process_id) == meeting
    assert resolver.task == Task("worker", meeting[2])
    assert resolver.cluster_spec() == ClusterSpec({"worker": [meeting[0]]})


@pytest.mark.parametrize(
    ("environ", "arguments", "problem"),
    [
        ({}, {}, r"'host:port' \(it is not a string\)"),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": "c"}, {}, r"'host:port' \(it has no port\)"),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": "c", "JAX_COORDINATOR_PORT": "x"}, {}, "it has no port"),
        ({"JAX_COORDINATOR_ADDRESS": "c:1"}, {}, "there must be a number of processes"),
        ({**JAX, "JAX_NUM_PROCESSES": "0"}, {}, "there must be a number of processes"),
        ({**PET, "PET_NNODES": "1:4"}, {}, "there must be a number of processes.*'PET_NNODES': '1:4'"),
        ({**JAX, "JAX_PROCESS_ID": "4"}, {}, "number must be from 0 to 3"),
        (JAX, {"process_id": -1}, "number must be from 0 to 3.*arguments {'process_id': -1}"),
        (PET, {"num_processes": 1}, "number must be from 0 to 0.*arguments {'num_processes': 1}"),
    ],
)
def test_where_jax_cannot_meet(environ, arguments, problem):
    with pytest.raises(InvalidArgumentError, match=rf"{problem}.*Set JAX_COORDINATOR") as info:
        read_cluster(environ, **arguments)
    assert "Received: variables {" in str(info.value)


def pod(name, ip="10.0.0.1", phase="Running"):
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name), status=SimpleNamespace(pod_ip=ip, phase=phase)
    )


class Kubernetes:
    def __init__(self, **pods):
        self.pods = pods

    def list_pod_for_all_namespaces(self, *, label_selector):
        return SimpleNamespace(items=self.pods.get(label_selector.partition("=")[2], []))


def test_pods():
    client = Kubernetes(
        a=[pod("a-1", "10.0.0.2"), pod("a-0", "10.0.0.1")], b=[pod("b", "fe80::1")], p=[pod("p")]
    )
    mapping = {"worker": ["job=a", "job=b"]}
    resolver = KubernetesClusterResolver(mapping, 99, override_client=client)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:99", "10.0.0.2:99", "[fe80::1]:99"]}
    assert (resolver.task, resolver.master()) == (None, "")
    resolver.task_type, resolver.task_id = "worker", 1
    assert (resolver.master(), resolver.process_id) == ("grpc://10.0.0.2:99", 1)
    client.pods["a"].pop()
    assert resolver.cluster_spec().num_tasks("worker") == 2


def test_the_default_selector():
    client = Kubernetes(tensorflow=[pod("t")])
    assert KubernetesClusterResolver(override_client=client).cluster_spec() == {"worker": ["10.0.0.1:8470"]}


def test_pods_that_do_not_run_are_named():
    client = Kubernetes(tensorflow=[pod("t2", None, "Pending"), pod("t1"), pod("t0", "10.0.0.9", "Failed")])
    with pytest.raises(RuntimeError, match=r"Received: {'t0': 'Failed', 't2': 'Pending'}.*describe pod t0"):
        KubernetesClusterResolver(override_client=client).cluster_spec()


def test_a_selector_finds_pods():
    with pytest.raises(BackendError, match=r"Received: 'job-name=tensorflow', which finds none. See"):
        KubernetesClusterResolver(override_client=Kubernetes()).cluster_spec()


@pytest.mark.parametrize("selectors", ["job=a", [3]])
def test_selectors_are_a_list(selectors):
    with pytest.raises(InvalidArgumentError, match=r"list of selectors. Received: 'worker': .*Write"):
        KubernetesClusterResolver({"worker": selectors}, override_client=Kubernetes())


def test_without_the_kubernetes_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes.config", None)
    with pytest.raises(BackendError, match=r"Python client. Received: .*unisono\[kubernetes\]"):
        KubernetesClusterResolver()


def install_kubernetes(monkeypatch):
    config, client = ModuleType("kubernetes.config"), ModuleType("kubernetes.client")
    config.ConfigException = type("ConfigException", (Exception,), {})
    client.CoreV1Api = lambda: Kubernetes(tensorflow=[pod("t")])
    monkeypatch.setitem(sys.modules, "kubernetes", ModuleType("kubernetes"))
    monkeypatch.setitem(sys.modules, "kubernetes.config", config)
    monkeypatch.setitem(sys.modules, "kubernetes.client", client)
    return config


def test_outside_of_kubernetes(monkeypatch):
    config = install_kubernetes(monkeypatch)

    def load_incluster_config():
        raise config.ConfigException("Service host/port is not set.")

    config.load_incluster_config = load_incluster_config
    with pytest.raises(BackendError, match=r"Received: Service host.*WITHIN_CLUSTER.*OFF_CLUSTER"):
        KubernetesClusterResolver()


@pytest.mark.parametrize(
    ("location", "loaded"),
    [
        (KubernetesExecutableLocation.WITHIN_CLUSTER, "in the cluster"),
        (KubernetesExecutableLocation.OFF_CLUSTER, "kubectl"),
    ],
)
def test_the_rights_of_the_client(monkeypatch, location, loaded):
    calls = []
    config = install_kubernetes(monkeypatch)
    config.load_incluster_config = lambda: calls.append("in the cluster")
    config.load_kube_config = lambda: calls.append("kubectl")
    assert KubernetesClusterResolver(executable_location=location).cluster_spec().jobs == ["worker"]
    assert calls == [loaded]
