"""The instances of a group on Google Compute Engine, of which a client tells in pages."""

import platform
import sys
from types import ModuleType, SimpleNamespace

import pytest

from unisono import BackendError, ContextError
from unisono.cluster_resolver import ClusterSpec, GCEClusterResolver

IPS = {"w-0": "10.0.0.9", "w-1": "10.0.0.2", "w-2": "10.0.0.5"}


class Request:
    """What the client returns for a question that is not sent yet."""

    def __init__(self, answer):
        self.execute = lambda: answer


class Service:
    """What is used of `googleapiclient`'s service: names in pages of two, and addresses."""

    def __init__(self, names=("w-2", "w-0", "w-1")):
        self.names, self.asked = list(names), []

    def instanceGroups(self):
        return SimpleNamespace(listInstances=self.list, listInstances_next=self.next)

    def instances(self):
        return SimpleNamespace(get=self.get)

    def list(self, **question):
        self.asked.append(question)
        return self.page(0)

    def next(self, previous_request, previous_response):
        at = previous_response["next"]
        return self.page(at) if at < len(self.names) else None

    def page(self, at):
        urls = [{"instance": f"https://compute/p/zones/z/instances/{n}"} for n in self.names[at : at + 2]]
        return Request({"next": at + 2, **({"items": urls} if urls else {})})

    def get(self, project, zone, instance):
        return Request({"networkInterfaces": [{"networkIP": IPS[instance]}, {"networkIP": "192.168.0.1"}]})


def resolver(service=None, **options):
    return GCEClusterResolver("p", "z", "group", 2222, service=service or Service(), **options)


def test_instances_come_in_the_order_of_their_names():
    service = Service()
    spec = resolver(service).cluster_spec()
    assert spec == ClusterSpec({"worker": ["10.0.0.9:2222", "10.0.0.2:2222", "10.0.0.5:2222"]})
    only = {"instanceState": "RUNNING"}
    place = {"project": "p", "zone": "z", "instanceGroup": "group", "orderBy": "name"}
    assert service.asked == [{**place, "body": only}]


def test_they_are_asked_again():
    service = Service(["w-0"])
    r = resolver(service, task_id=0)
    assert r.num_processes == 1
    service.names.append("w-1")
    assert (r.num_processes, r.coordinator_address) == (2, "10.0.0.9:2222")


@pytest.mark.parametrize("name", ["w-1", "w-1.c.p.internal"])
def test_this_machine_is_found_among_them(monkeypatch, name):
    monkeypatch.setattr(platform, "node", lambda: name)
    r = resolver()
    assert (r.task_type, r.task_id, r.process_id, r.master()) == ("worker", 1, 1, "grpc://10.0.0.2:2222")


def test_the_index_can_be_given():
    r = resolver(task_type="chief", task_id=0, rpc_layer=None)
    assert (r.task_type, r.task_id, r.master()) == ("chief", 0, "10.0.0.9:2222")
    r.task_id = 2
    assert r.master() == "10.0.0.5:2222"
    assert r.master("chief", 1, "http") == "http://10.0.0.2:2222"


def test_the_job_is_fixed():
    with pytest.raises(ContextError, match=r"chosen once. Received: task_type='ps'. Write"):
        resolver().task_type = "ps"


def test_no_instance_runs():
    with pytest.raises(BackendError, match=r"must have running instances. Received: 'group' in"):
        resolver(Service([])).cluster_spec()


def test_another_machine():
    with pytest.raises(
        BackendError, match=r"one of the instances. Received: .*\['w-0', 'w-1', 'w-2'\].*task_id"
    ):
        resolver().task_id  # noqa: B018


def test_without_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    with pytest.raises(BackendError, match=r"Python client. Received: .*unisono\[gce\]"):
        GCEClusterResolver("p", "z", "group", 2222)


@pytest.mark.parametrize(("given", "used"), [("default", None), ("mine", "mine")])
def test_the_client_is_made_from_the_package(monkeypatch, given, used):
    made = []
    discovery = ModuleType("googleapiclient.discovery")
    discovery.build = lambda *args, **kwargs: made.append((args, kwargs)) or Service()
    monkeypatch.setitem(sys.modules, "googleapiclient", ModuleType("googleapiclient"))
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", discovery)
    r = GCEClusterResolver("p", "z", "group", 2222, credentials=given)
    assert made == [(("compute", "v1"), {"credentials": used})]
    assert r.cluster_spec().num_tasks("worker") == 3
