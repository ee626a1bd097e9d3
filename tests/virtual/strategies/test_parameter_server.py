"""`ParameterServerStrategy`: the local form, and variables on servers of this process."""

import os

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import LocalCluster, local_strategy
from unisono.cluster_resolver._base import SimpleClusterResolver
from unisono.cluster_resolver._spec import ClusterSpec
from unisono.parameter_server.strategy import _parameter_server, _serve
from unisono.parameter_server.strategy._parameter_server import ParameterServerStrategy
from unisono.step._keras_internals import stored_value


def data(rows=96):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, (x[:, :2].sum(1) > 0).astype("int32")


def compiled():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


def test_without_a_cluster_variables_rest_on_the_cpu_and_all_devices_compute():
    strategy = ParameterServerStrategy()
    assert not strategy._has_cluster
    assert strategy.cluster_resolver is None
    assert strategy.num_replicas_in_sync == len(unisono.MirroredStrategy().worker_devices)
    assert [str(d) for d in strategy.parameter_devices] == [
        str(unisono.CentralStorageStrategy().parameter_devices[0])
    ]
    alone = compiled()
    with strategy.scope():
        model = compiled()
    for one in (alone, model):
        one.fit(*data(), batch_size=32, verbose=0, shuffle=False)
    for expected, found in zip(alone.weights, model.weights, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_staleness": -1}, unisono.InvalidArgumentError, "at least 0. Received: max_staleness=-1"),
        ({"max_staleness": 1.5}, unisono.InvalidTypeError, "whole number. Received: max_staleness=1.5"),
        ({"cluster_resolver": "a:1"}, unisono.InvalidTypeError, "must be a `ClusterResolver`"),
        ({"variable_partitioner": 2}, unisono.InvalidTypeError, "function of `shape` and `dtype`"),
    ],
)
def test_arguments_that_cannot_be_used(arguments, error, message):
    with pytest.raises(error, match=message):
        ParameterServerStrategy(**arguments)


def test_a_cluster_without_servers_is_an_error():
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0)
    with pytest.raises(unisono.InvalidArgumentError, match="at least one task of the job 'ps'"):
        ParameterServerStrategy(resolver)


def test_an_evaluator_takes_no_part_in_the_cluster():
    spec = ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]})
    assert not ParameterServerStrategy(SimpleClusterResolver(spec, "", "evaluator", 0))._has_cluster


def test_a_subclass_keeps_its_methods_on_a_cluster(monkeypatch):
    class Noting(ParameterServerStrategy):
        """A user's."""

        def __init__(self, servers):
            self.paths = []
            resolver = SimpleClusterResolver(ClusterSpec(servers), "", "chief", 0)
            super().__init__(resolver, max_staleness=3)

        def _variable_created(self, variable):
            self.paths.append(variable.path)
            super()._variable_created(variable)

    cluster = LocalCluster()
    monkeypatch.setattr(_parameter_server, "connect", lambda roles: cluster.connections())
    strategy = Noting({"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]})
    try:
        assert isinstance(strategy, Noting)
        assert (type(strategy).__name__, type(strategy).__doc__) == ("Noting", "A user's.")
        assert strategy._has_cluster
        assert strategy.cluster_resolver is not None
        with pytest.raises(unisono.ContextError, match="must have one `ParameterServerStrategy`"):
            ParameterServerStrategy(strategy.cluster_resolver)
        with strategy.scope():
            model = compiled()
        model.fit(*data(), batch_size=32, verbose=0)
        assert {v.path for v in model.weights} <= set(strategy.paths)
    finally:
        strategy.end()
        cluster.close()


def test_a_task_that_serves_ends_its_process_with_the_code_of_the_chief(monkeypatch):
    class Served:
        def join(self):
            return 3

    monkeypatch.setattr(_serve, "service_of", lambda roles: Served())
    spec = ClusterSpec({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]})
    with pytest.raises(SystemExit, match=r"^3$"):
        ParameterServerStrategy(SimpleClusterResolver(spec, "", "ps", 0))


def test_variables_lie_balanced_on_the_servers_and_slots_beside_them():
    with local_strategy(servers=2) as strategy:
        with strategy.scope():
            model = compiled()
        model.fit(*data(), batch_size=32, verbose=0)
        placed = strategy._job.variables
        homes = {v.path: placed[v].homes for v in model.variables}
        kernel, bias = model.layers[0].variables
        # 192 bytes on the first, then 32, 64 and 8 on the second.
        assert [homes[v.path] for v in model.trainable_variables] == [(0,), (1,), (1,), (1,)]
        for slot in model.optimizer.variables:
            if kernel.path.replace("/", "_") in slot.path:
                assert placed[slot].homes == (0,)
            if bias.path.replace("/", "_") in slot.path:
                assert placed[slot].homes == (1,)
        assert placed[model.optimizer.iterations].homes == (0, 1)
        stored = [server.store for server in strategy.cluster.servers]
        # Four weights, two slots of each, four variables of metrics; and twice the count of steps and the
        # rate.
        assert sum(len(store.variables) for store in stored) == 4 + 8 + 4 + 2 * 2


def test_variables_that_come_home_go_to_the_servers_again():
    x, y = data()
    with local_strategy(workers=1, servers=2) as strategy, strategy.scope():
        model, twin = compiled(), compiled()
        for each in (model, twin):
            each.set_weights([w + 0.01 for w in twin.get_weights()])
            each.fit(x, y, batch_size=32, shuffle=False, verbose=0)
        placed, stores = strategy._job.variables, [server.store for server in strategy.cluster.servers]
        count, nbytes = sum(len(store.variables) for store in stores), sum(placed._placement.nbytes)
        of_model = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
        placed.release(of_model)
        assert 2 * sum(len(store.variables) for store in stores) == count
        assert 2 * sum(placed._placement.nbytes) == nbytes
        for one, other in zip(model.get_weights(), twin.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        # Once more, it finds nothing; training goes on with new programs.
        placed.release(of_model)
        strategy._job._plans.forget([model.optimizer])
        strategy._job._names.clear()
        for each in (model, twin):
            each.compile(each.optimizer, each.loss, metrics=["accuracy"])
            each.fit(x, y, batch_size=32, shuffle=False, verbose=0)
        assert int(model.optimizer.iterations.value) == int(twin.optimizer.iterations.value) == 6
        for one, other in zip(model.get_weights(), twin.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)


def test_reads_and_assignments_reach_the_servers():
    with local_strategy(servers=2) as strategy:
        with strategy.scope():
            model = compiled()
        model.fit(*data(), batch_size=32, verbose=0)
        kernel = model.layers[0].kernel
        kernel.assign(np.ones(kernel.shape))
        assert repr(stored_value(kernel)).startswith("<on servers:")
        np.testing.assert_array_equal(kernel.numpy(), 1)
        ((server, number),) = strategy._job.variables[kernel].keys()
        np.testing.assert_array_equal(strategy.cluster.servers[server].store.read(number), 1)
        model.optimizer.learning_rate = 0.25
        assert strategy._job.variables[model.optimizer.learning_rate].homes == (0, 1)
        for server in strategy.cluster.servers:
            values = [v.host() for v in server.store.variables.values() if "learning_rate" in v.spec.name]
            assert [float(v) for v in values] == [0.25]


def test_steps_on_the_chief_read_and_write_what_lies_on_servers():
    with local_strategy(servers=2) as strategy:
        with strategy.scope():
            read = unisono.Variable(np.zeros(3, "float32"))
            written = unisono.Variable(np.zeros(3, "float32"), aggregation="sum")
        strategy._job.variables.place([(read, None), (written, None)])

        def step():
            written.assign_add(read.value + 1)
            return read.value * 1

        @unisono.function
        def function():
            return strategy.run(step)

        for number, call in enumerate((lambda: strategy.run(step),) * 3 + (function,) * 2):
            np.testing.assert_array_equal(call(), number)
            read.assign_add(np.ones(3))
        np.testing.assert_array_equal(strategy._job.variables[written], 5 + sum(range(5)))
        np.testing.assert_array_equal(written, 15)


def test_a_process_has_one_strategy_of_its_cluster():
    spec = ClusterSpec({"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]})
    with local_strategy(), pytest.raises(unisono.ContextError, match="one `ParameterServerStrategy` of its"):
        ParameterServerStrategy(SimpleClusterResolver(spec, "", "chief", 0))


def test_the_end_of_the_job_ends_workers_and_servers():
    with local_strategy(servers=2) as strategy:
        cluster = strategy.cluster
        with strategy.scope():
            model = compiled()
        model.fit(*data(), batch_size=32, verbose=0)
        strategy.end()
        assert all(worker.ended.is_set() for worker in cluster.workers.values())
        assert [server.exit_code for server in cluster.servers if server.ended.is_set()] == [0, 0]


@pytest.mark.parametrize("form", ["without", "empty"])
def test_an_empty_tf_config_is_no_cluster(monkeypatch, form):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if form == "empty":
        monkeypatch.setitem(os.environ, "TF_CONFIG", "{}")
    assert not ParameterServerStrategy()._has_cluster
