"""Strategies with the arguments of `tf.contrib.distribute`."""

import json

import pytest

import unisono
from unisono import tf
from unisono.collectives._process_group import SingleProcessGroup
from unisono.estimator.session._input import InputFunction
from unisono.tf.adapters import _contrib
from unisono.training.named_steps._protocol import elements_for

contrib = tf.contrib.distribute


def test_arguments_that_say_which_devices():
    for strategy in (
        contrib.MirroredStrategy(["cpu:0", "cpu:1"]),
        contrib.MirroredStrategy(num_gpus=2),
        contrib.MirroredStrategy(num_gpus_per_worker=2),
    ):
        assert strategy.num_replicas_in_sync == 2
    assert contrib.MirroredStrategy(num_gpus=0).num_replicas_in_sync == 1
    with pytest.raises(unisono.InvalidArgumentError, match="num_gpus, num_gpus_per_worker"):
        contrib.MirroredStrategy(num_gpus=1, num_gpus_per_worker=1)
    with pytest.raises(unisono.InvalidArgumentError, match="devices, num_gpus"):
        contrib.MirroredStrategy(["cpu:0"], num_gpus=1)


def test_reductions_by_the_names_of_towers():
    ops = contrib.AllReduceCrossTowerOps("hierarchical_copy", num_packs=2)
    assert isinstance(ops, unisono.HierarchicalCopyAllReduce)
    strategy = contrib.MirroredStrategy(num_gpus=2, cross_tower_ops=ops)
    assert strategy.cross_device_ops is ops
    assert isinstance(contrib.AllReduceCrossTowerOps(), unisono.NcclAllReduce)
    with pytest.raises(unisono.InvalidArgumentError, match="pscpu"):
        contrib.AllReduceCrossTowerOps("pscpu")


def test_strategies_without_a_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    there = len(contrib.CollectiveAllReduceStrategy().extended.worker_devices)
    assert contrib.CollectiveAllReduceStrategy(num_gpus_per_worker=there).num_replicas_in_sync == there
    # It may be the client of servers, until this process would train on fewer devices.
    absent = contrib.CollectiveAllReduceStrategy(num_gpus_per_workers=77)
    with pytest.raises(unisono.InvalidArgumentError, match="num_gpus_per_worker=77"), absent.scope():
        pass
    local = contrib.ParameterServerStrategy(num_gpus_per_worker=2)
    assert isinstance(local, unisono.experimental.CentralStorageStrategy)
    assert local.num_replicas_in_sync == 2
    assert contrib.ParameterServerStrategy().num_replicas_in_sync == 1
    assert contrib.OneDeviceStrategy("/cpu:0", prefetch_on_device=False).num_replicas_in_sync == 1
    resolver = unisono.cluster_resolver.TPUClusterResolver(devices=["cpu:0", "cpu:1"])
    assert contrib.TPUStrategy(resolver, steps_per_run=10).num_replicas_in_sync == 2


class Worker(SingleProcessGroup):
    """One of two workers; what the chief says is kept from its call."""

    said = {}

    def __init__(self, index):
        super().__init__()
        self._index, self._size = index, 2

    def from_chief(self, make):
        return self.said.setdefault("seed", make())


def elements_of_workers(input_fn, monkeypatch, is_sharded):
    found = []
    for index in (0, 1):
        strategy = contrib.MirroredStrategy(num_gpus=1, auto_shard_dataset=is_sharded)
        monkeypatch.setattr(strategy, "_group", Worker(index))
        found.append([int(features) for features, _ in elements_for(strategy, InputFunction(input_fn, {}))])
    return found


def shuffled(policy="AUTO"):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    return tf.data.Dataset.range(9).shuffle(9).with_options(options)


def test_workers_read_their_part_of_an_input_fn_or_all_of_it(monkeypatch):
    monkeypatch.setattr(Worker, "said", {})
    first, second = elements_of_workers(shuffled, monkeypatch, True)
    # The two draw other seeds: without the chief's, elements would be read twice or never.
    assert sorted(first + second) == list(range(9))
    assert (len(first), len(second)) == (5, 4)
    for every in elements_of_workers(shuffled, monkeypatch, False):
        assert sorted(every) == list(range(9))
    for every in elements_of_workers(lambda: shuffled("OFF"), monkeypatch, True):
        assert sorted(every) == list(range(9))
    with pytest.raises(unisono.InvalidArgumentError, match="reads files"):
        elements_of_workers(lambda: shuffled("FILE"), monkeypatch, True)
    with pytest.raises(unisono.InvalidArgumentError, match=r"auto_shard_dataset=True .* list"):
        elements_of_workers(lambda: [1, 2], monkeypatch, True)


def test_a_mirrored_strategy_of_a_cluster_has_all_workers(monkeypatch):
    made = []
    monkeypatch.setattr(_contrib, "_of_workers", lambda *asked: made.append(asked))
    cluster = {"worker": ["a:1", "b:1"]}
    environ = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(environ))
    contrib.MirroredStrategy(num_gpus_per_worker=2, auto_shard_dataset=True)
    assert made == [(2, True)]
    # Named devices are those of this process; an evaluator evaluates alone.
    assert contrib.MirroredStrategy(["cpu:0"]).num_replicas_in_sync == 1
    monkeypatch.setenv("TF_CONFIG", json.dumps({**environ, "task": {"type": "evaluator", "index": 0}}))
    assert contrib.MirroredStrategy(num_gpus=2).num_replicas_in_sync == 2
    assert len(made) == 1
