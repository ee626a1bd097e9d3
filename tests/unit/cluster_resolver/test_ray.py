"""The resolver of Ray's workers, with a stand-in for Ray: ranks, the published address, what is missing."""

import sys
import types

import pytest

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.cluster._lone_task import find_siblings
from unisono.cluster_resolver import RayClusterResolver, _ray, resolve

SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NUM_TASKS": "2",
}


class Ray(types.ModuleType):
    """As much of Ray as the resolver uses: actors with names, and one placement group."""

    def __init__(self, *, group="g1", bundles=2):
        super().__init__("ray")
        self.named = {}
        self.placed = []
        self.exceptions = types.SimpleNamespace(RayActorError=KeyError, GetTimeoutError=TimeoutError)
        self.context = types.SimpleNamespace(
            get_actor_id=lambda: None,
            get_task_id=lambda: "t1",
            get_node_id=lambda: "n1",
            get_placement_group_id=lambda: group,
        )
        affinity = types.SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
        self.util = types.SimpleNamespace(
            get_node_ip_address=lambda: "127.0.0.1",
            get_current_placement_group=lambda: types.SimpleNamespace(bundle_specs=[{"CPU": 1}] * bundles),
            scheduling_strategies=affinity,
        )

    def is_initialized(self):
        return True

    def get_runtime_context(self):
        return self.context

    def remote(self, kind):
        def options(name, num_cpus, scheduling_strategy):
            self.placed.append((num_cpus, scheduling_strategy))

            def make(address):
                if name in self.named:
                    raise ValueError(f"{name} is taken")
                self.named[name] = kind(address)
                return self.named[name]

            return types.SimpleNamespace(remote=make)

        return types.SimpleNamespace(options=options)

    def get_actor(self, name):
        if name not in self.named:
            raise ValueError(f"no actor {name}")
        return types.SimpleNamespace(address=types.SimpleNamespace(remote=self.named[name].address))

    def get(self, value, timeout):
        return value


@pytest.fixture(autouse=True)
def _nothing_agreed():
    _ray._agreed.cache_clear()


@pytest.fixture
def ray(monkeypatch):
    made = Ray()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.delitem(sys.modules, "ray.train", raising=False)
    return made


def train_of(rank, size):
    """The module of Ray Train in a worker; without a rank, in another process."""

    def get_context():
        if rank is None:
            raise RuntimeError("`get_context` must be called on a worker")
        return types.SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: size)

    return types.SimpleNamespace(get_context=get_context)


def test_workers_of_ray_train_agree_on_an_address(monkeypatch, ray):
    """Also in a step of Slurm that has started Ray, whose variables are not theirs."""
    monkeypatch.setitem(sys.modules, "ray.train", train_of(0, 2))
    first = resolve(SLURM)
    _ray._agreed.cache_clear()
    monkeypatch.setitem(sys.modules, "ray.train", train_of(1, 2))
    second = resolve(SLURM)
    assert isinstance(first, RayClusterResolver)
    assert first.coordinator_address == second.coordinator_address
    assert first.coordinator_address.startswith("127.0.0.1:")
    assert [(r.process_id, r.num_processes) for r in (first, second)] == [(0, 2), (1, 2)]
    assert list(ray.named) == ["unisono-g1"]
    assert ray.placed == [(0, ("n1", True))]


@pytest.mark.parametrize("train", [None, train_of(None, None), train_of(0, 1)])
def test_another_process_has_no_such_cluster(monkeypatch, ray, train):
    if train is not None:
        monkeypatch.setitem(sys.modules, "ray.train", train)
    assert resolve({}) is None
    assert ray.named == {}


def test_a_second_strategy_of_a_process_asks_nothing(ray):
    first = RayClusterResolver(rank=0, world_size=2)
    assert RayClusterResolver(rank=0, world_size=2).coordinator_address == first.coordinator_address
    # Another task in the same process is another worker.
    ray.context.get_task_id = lambda: "t2"
    with pytest.raises(ClusterError, match=r"could not take the name 'unisono-g1' .*is taken"):
        RayClusterResolver(rank=0, world_size=2, timeout=0.0)


def test_who_is_missing_is_named(ray):
    with pytest.raises(ClusterError, match=r"Worker 0 of 3 must publish its address within 0 s.*worker 2"):
        RayClusterResolver(rank=2, world_size=3, timeout=0.0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "must state which worker it is"),
        ({"rank": 0}, "rank=0, world_size=None"),
        ({"rank": 2, "world_size": 2}, "`rank` must be from 0"),
    ],
)
def test_what_to_write_in_a_plain_actor(ray, arguments, match):
    with pytest.raises(InvalidArgumentError, match=match):
        RayClusterResolver(**arguments)


def test_without_a_placement_group_there_must_be_a_name(monkeypatch):
    ray = Ray(group=None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(InvalidArgumentError, match="must be in a placement group, or have a name"):
        RayClusterResolver(rank=0, world_size=2)
    assert RayClusterResolver(rank=0, world_size=2, name="run").num_processes == 2
    assert list(ray.named) == ["unisono-run"]


@pytest.mark.parametrize(("bundles", "warns"), [(1, False), (2, True)])
def test_an_actor_of_several_is_warned(monkeypatch, bundles, warns):
    monkeypatch.setitem(sys.modules, "ray", Ray(bundles=bundles))
    found = find_siblings({})
    assert (found is not None) == warns
    assert not warns or "RayClusterResolver(rank=" in found[1]
