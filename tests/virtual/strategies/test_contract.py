"""One contract for all strategies: whatever holds the variables, user code means the same.

In a process of a cluster the table has one entry, the strategy of all its workers; every worker
runs the same tests at the same time (`tests/cluster/test_contract.py`).
"""

import contextlib
import copy
import functools
import os
import pickle
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from tests.support import PLATFORM, devices
from unisono.parameter_server.strategy import _parameter_server
from unisono.sharding import _fully_sharded_layout

pytestmark = pytest.mark.numbers

L = keras.layers


def tpu(n):
    return unisono.TPUStrategy(unisono.cluster_resolver.TPUClusterResolver(devices=devices(n)))


def local_form(n):
    """The parameter-server strategy without a cluster, on `n` of the devices of the tests."""
    real = _parameter_server.resolve_devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_parameter_server, "resolve_devices", lambda names: real(names or devices(n)))
        return unisono.ParameterServerStrategy()


def grid(replicas, size, **options):
    """Replicas of several devices, which cut the last axis of whatever divides."""

    def rule(variable):
        shape = variable.shape
        return (*[None] * (len(shape) - 1), "model") if shape and shape[-1] % size == 0 else None

    names = devices(replicas * size)
    return unisono.MirroredStrategy(names, devices_per_replica=size, layout_map=rule, **options)


@contextlib.contextmanager
def fully_sharded_grid(replicas, size):
    """The same, where the small weights of these tests lie in parts on the replicas, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fully_sharded_layout, "SMALLEST", 2)
        yield grid(replicas, size, state_layout="fully_sharded")


STRATEGIES = {
    "default": unisono.get_strategy,
    "one device": lambda: unisono.OneDeviceStrategy(devices(2)[1]),
    "mirrored 1": lambda: unisono.MirroredStrategy(devices(1)),
    "mirrored 2": lambda: unisono.MirroredStrategy(devices(2)),
    "mirrored 3": lambda: unisono.MirroredStrategy(devices(3)),
    "mirrored 2, sharded": lambda: unisono.MirroredStrategy(devices(2), state_layout="sharded"),
    "mirrored 8, ring": lambda: unisono.MirroredStrategy(devices(8), unisono.RingAllReduce()),
    "2 replicas of 2": lambda: grid(2, 2),
    "1 replica of 4": lambda: grid(1, 4),
    "4 replicas of 2": lambda: grid(4, 2),
    "2 replicas of 2, sharded": lambda: grid(2, 2, state_layout="sharded"),
    "2 replicas of 2, fully sharded": lambda: fully_sharded_grid(2, 2),
    "4 replicas of 2, sharded": lambda: grid(4, 2, state_layout="sharded"),
    "4 replicas of 2, fully sharded": lambda: fully_sharded_grid(4, 2),
    "central storage": lambda: unisono.CentralStorageStrategy(devices(2)),
    "central storage, host": lambda: unisono.CentralStorageStrategy(devices(2), "host"),
    "tpu": lambda: tpu(2),
    "parameter servers, local": lambda: local_form(2),
    "parameter servers": lambda: local_strategy(workers=2, servers=2, max_staleness=0),
}
#: What differs from another one only in its number of replicas.
LARGER = ("4 replicas of 2, sharded", "4 replicas of 2, fully sharded")
if "UNISONO_TEST_PLATFORM" in os.environ:
    STRATEGIES["mirrored, all"] = unisono.MirroredStrategy
if "TF_CONFIG" in os.environ:
    STRATEGIES = {"multi-worker": unisono.MultiWorkerMirroredStrategy}


def some_strategies(exhaustive):
    return [pytest.param(s, marks=[pytest.mark.exhaustive] if s in exhaustive else []) for s in STRATEGIES]


@pytest.fixture(params=some_strategies(LARGER), scope="module")
def strategy(request):
    made = STRATEGIES[request.param]()
    if isinstance(made, unisono.Strategy):
        # Also in a worker, whose strategy takes the devices that there are.
        assert made.mesh.platform == PLATFORM
        yield made
    else:
        with made as strategy:
            yield strategy


def ids(strategy):
    """The replicas of this process."""
    return list(strategy.mesh.local_replicas)


def locals_of(strategy, value):
    return [np.asarray(v).tolist() for v in strategy.local_results(value)]


def test_contexts(strategy):
    seen = {}

    def step():
        seen["replica"] = unisono.get_replica_context() is not None
        seen["cross"] = unisono.in_cross_replica_context()
        seen["strategy"] = unisono.get_strategy() is strategy
        return unisono.get_replica_context().replica_id_in_sync_group + jnp.zeros((), "int32")

    assert locals_of(strategy, strategy.run(step)) == ids(strategy)
    assert seen == {"replica": True, "cross": False, "strategy": True}
    with strategy.scope():
        is_default = strategy is unisono.get_strategy() and not unisono.has_strategy()
        assert unisono.get_strategy() is strategy
        assert unisono.in_cross_replica_context() is not is_default
        assert (unisono.get_replica_context() is None) is not is_default
    assert not unisono.has_strategy()


def test_run_takes_structures_apart_and_regroups_results(strategy):
    n = strategy.num_replicas_in_sync
    value = strategy.distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group))

    def step(pair, *, flag, nothing, scale):
        assert flag is True
        assert nothing is None
        return {"sum": pair["x"] + scale, "same": "text", "none": None, "tuple": (3, pair["x"] * 2)}

    kwargs = {"flag": True, "nothing": None, "scale": np.float32(1)}
    result = strategy.run(step, args=({"x": value},), kwargs=kwargs)
    assert (result["same"], result["none"], result["tuple"][0]) == ("text", None, 3)
    assert locals_of(strategy, result["sum"]) == [i + 1.0 for i in ids(strategy)]
    assert isinstance(result["sum"], unisono.PerReplica) is (n > 1)


def test_values_are_made_for_the_replicas_of_this_process_alone(strategy):
    called = []

    def make(context):
        i = context.replica_id_in_sync_group
        called.append(i)
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        return {"i": np.float32(i), "rows": np.arange(i % 2), "name": f"replica {i}"}

    values = strategy.distribute_values_from_function(make)
    assert called == ids(strategy)
    local = strategy.local_results(values)
    assert [v["name"] for v in local] == [f"replica {i}" for i in ids(strategy)]
    assert [v["rows"].tolist() for v in local] == [list(range(i % 2)) for i in ids(strategy)]
    doubled = strategy.run(lambda x: x["i"] * 2 + x["rows"].shape[0], args=(values,))
    assert locals_of(strategy, doubled) == [2.0 * i + i % 2 for i in ids(strategy)]


def test_local_results_are_those_of_this_process(strategy):
    """Also of a batch that does not divide, whose replicas have unequal shapes, and of what `run` returns."""
    n = strategy.num_replicas_in_sync
    batches = [np.arange(2.0 * n, dtype="f4"), np.arange(n + 1.0, dtype="f4"), np.arange(1.0, dtype="f4")]
    for rows, batch in zip((2 * n, n + 1, 1), strategy.distribute_dataset(batches), strict=True):
        sizes = [rows // n + (i < rows % n) for i in ids(strategy)]
        assert [v.shape[0] for v in strategy.local_results(batch)] == sizes
        counts, doubled = strategy.run(lambda x: (jnp.full((), x.shape[0]), 2 * x), args=(batch,))
        assert locals_of(strategy, counts) == sizes
        assert [len(v) for v in locals_of(strategy, doubled)] == sizes


def test_input_of_older_programs(strategy):
    """`make_dataset_iterator`, `make_input_fn_iterator` and `experimental_run`, over two epochs."""
    n = strategy.num_replicas_in_sync
    rows = strategy.experimental_make_numpy_dataset(np.arange(4 * n, dtype="f4"))
    iterators = [
        strategy.make_dataset_iterator(rows.batch(2 * n)),
        strategy.make_input_fn_iterator(
            lambda c: rows.shard(c.num_input_pipelines, c.input_pipeline_id).batch(
                c.get_per_replica_batch_size(2 * n)
            )
        ),
    ]
    for iterator in iterators:
        assert isinstance(iterator, unisono.DistributedIterator)
        for _ in range(2):
            iterator.initialize()
            sums = [strategy.experimental_run(jnp.sum, iterator) for _ in range(2)]
            total = sum(float(strategy.reduce("SUM", s, axis=None)) if n > 1 else float(s) for s in sums)
            assert total == sum(range(4 * n))
            with pytest.raises(unisono.OutOfRangeError):
                iterator.get_next()
    assert locals_of(strategy, strategy.experimental_run(lambda: jnp.ones(()))) == [1.0] * len(ids(strategy))


def test_reduce_and_gather(strategy):
    n = strategy.num_replicas_in_sync

    def step():
        i = jnp.asarray(unisono.get_replica_context().replica_id_in_sync_group, "float32")
        return jnp.stack([i, i + 1.0])[None]

    value = strategy.run(step)
    rows = np.array([[i, i + 1.0] for i in range(n)])
    for op, reduce in (("SUM", np.sum), (unisono.ReduceOp.MEAN, np.mean)):
        np.testing.assert_allclose(strategy.reduce(op, value, axis=None), reduce(rows, 0)[None], rtol=1e-6)
        np.testing.assert_allclose(strategy.reduce(op, value, axis=0), reduce(rows, 0), rtol=1e-6)
        np.testing.assert_allclose(strategy.reduce(op, value, axis=(0, -1)), reduce(rows), rtol=1e-6)
    np.testing.assert_array_equal(strategy.gather(value, axis=0), rows)


def test_extended(strategy):
    """Who writes; values and variables that are no per-replica values."""
    extended, n = strategy.extended, strategy.num_replicas_in_sync
    assert extended.should_checkpoint is extended.should_save_summary is strategy.is_chief
    assert extended.experimental_should_init
    workers = getattr(strategy, "num_workers", 1)
    own = np.float32(getattr(strategy, "worker_index", 0) + 1)
    every = np.arange(1, workers + 1, dtype="f4")
    assert float(extended.reduce_to("MEAN", own, "cpu:0")) == every.mean()
    if workers > 1 or n == 1:
        assert float(extended.reduce_to("SUM", own, "cpu:0")) == every.sum()
    else:
        with pytest.raises(unisono.InvalidArgumentError, match="per-replica value"):
            extended.reduce_to("SUM", own, "cpu:0")
    with strategy.scope():
        plain, on_read = keras.Variable(3.0), unisono.Variable(0.0, synchronization="on_read")
    everywhere = extended.broadcast_to(np.float32(2), plain)

    def step(x):
        on_read.assign(x * unisono.get_replica_context().replica_id_in_sync_group)

    strategy.run(step, (everywhere,))
    if n > 1:
        assert locals_of(strategy, plain) == [3.0] * len(ids(strategy))
        assert locals_of(strategy, on_read) == [2.0 * i for i in ids(strategy)]


def test_means_count_true_elements(strategy):
    """The first replica has [1, 2, 3, 4, 5, 6], with the mean 3.5, and the others no rows; integers too."""

    def one_element(context):
        return [np.arange(1, 7) if context.input_pipeline_id == 0 else np.arange(0)]

    (batch,) = strategy.distribute_datasets_from_function(one_element)
    value = strategy.run(lambda x: x, args=(batch,))
    assert float(strategy.reduce("MEAN", value, axis=0)) == 3.5
    assert int(strategy.reduce("SUM", value, axis=0)) == 21


def test_rows_are_split_evenly_and_none_is_lost(strategy):
    batches = [np.arange(5, dtype="f4"), np.arange(1, dtype="f4")]
    for batch, rows in zip(strategy.distribute_dataset(batches), (5, 1), strict=True):
        sizes = np.ravel(strategy.gather(strategy.run(lambda x: jnp.full(1, x.shape[0]), args=(batch,)), 0))
        assert sum(sizes) == rows
        assert max(sizes) - min(sizes) <= 1
        total = strategy.reduce("SUM", strategy.run(jnp.sum, args=(batch,)), axis=None)
        assert float(total) == batches[rows == 1].sum()


def test_collectives_in_a_replica(strategy):
    n = strategy.num_replicas_in_sync

    def step():
        replica = unisono.get_replica_context()
        i = jnp.asarray(replica.replica_id_in_sync_group, "float32")
        merged = replica.merge_call(lambda s, x: s.reduce("SUM", x, axis=None) if n > 1 else x, args=(i,))
        return replica.all_reduce("SUM", {"a": i, "b": None}), replica.all_gather(i[None], 0), merged

    summed, gathered, merged = strategy.run(step)
    here = len(ids(strategy))
    assert locals_of(strategy, summed["a"]) == locals_of(strategy, merged) == [sum(range(n))] * here
    assert locals_of(strategy, gathered) == [list(range(n))] * here


def make_loop(strategy, loss_scaled):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), L.Dense(8, activation="relu"), L.Dense(3)])
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(0.3, momentum=0.9)
        if loss_scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_step(inputs):
        features, labels = inputs
        with unisono.GradientTape() as tape:
            predictions = model(features, training=True)
            loss = loss_fn(labels, predictions)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    def distributed(inputs):
        return strategy.reduce("SUM", strategy.run(train_step, args=(inputs,)), axis=None)

    return model, accuracy, distributed


def trained(strategy, compiled=True, loss_scaled=False):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(41, 6)).astype("f4"), rng.integers(0, 3, 41)
    model, accuracy, step = make_loop(strategy, loss_scaled)
    step = unisono.function(step) if compiled else step
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 41, 8)]
    losses = [float(step(b)) for b in strategy.distribute_dataset(batches)]
    return losses, float(accuracy.result()), model.get_weights()


@functools.cache
def trained_on_one_device(loss_scaled):
    return trained(unisono.get_strategy(), loss_scaled=loss_scaled)


#: The strategies on which a custom loop differs from that of another strategy only in the number of replicas,
#: or in the algorithm of its sums, which has tests of its own: all tests run it.
ALIKE = (
    "mirrored 1",
    "mirrored 2",
    "mirrored 8, ring",
    "tpu",
    "one device",
    "central storage, host",
    *LARGER,
)


@pytest.mark.parametrize("options", [{"compiled": False}, {"loss_scaled": True}], ids=str)
@pytest.mark.parametrize("strategy", some_strategies(ALIKE), indirect=True)
def test_a_custom_loop_equals_one_device(strategy, options):
    """41 rows in batches of 8: the last batch has one row, fewer than there are replicas."""
    losses, accuracy, weights = trained(strategy, **options)
    expected = trained_on_one_device("loss_scaled" in options)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    assert accuracy == pytest.approx(expected[1], rel=1e-6)
    for a, b in zip(weights, expected[2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def fitted(scope):
    x = np.random.default_rng(0).normal(size=(30, 4)).astype("f4")
    keras.utils.set_random_seed(1)
    with scope:
        model = keras.Sequential([keras.Input((4,)), L.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    history = model.fit(x, x.sum(1), batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return history, model.predict(x, verbose=0)


@functools.cache
def fitted_by_plain_keras():
    return fitted(contextlib.nullcontext())


def test_fit_equals_plain_keras(strategy):
    history, predictions = fitted(strategy.scope())
    expected = fitted_by_plain_keras()
    for key in expected[0]:
        np.testing.assert_allclose(history[key], expected[0][key], rtol=1e-5)
    np.testing.assert_allclose(predictions, expected[1], rtol=1e-4, atol=1e-5)


def test_models_that_are_not_compiled_predict_on_the_replicas(strategy):
    rows = []

    class Noting(L.Layer):
        def call(self, x):
            rows.append(x.shape[0])
            return x

    keras.utils.set_random_seed(0)
    n = strategy.num_replicas_in_sync
    x = np.random.default_rng(0).normal(size=(6 * n + 1, 3)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Noting(), L.Dense(4), L.Dense(2)])
    features = keras.Model(model.inputs, model.layers[1].output)
    (kernel, bias), rest = (layer.get_weights() for layer in model.layers[1:])
    expected = x @ kernel + bias
    rows.clear()
    np.testing.assert_allclose(features.predict(x, 3 * n, verbose=0), expected, rtol=1e-4, atol=1e-5)
    # One of the two traces that read how the step treats rows has those of all replicas.
    assert n == 1 or rows.count(3) > rows.count(3 * n)
    np.testing.assert_allclose(features.predict_on_batch(x), expected, rtol=1e-4, atol=1e-5)
    expected = expected @ rest[0] + rest[1]
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-5)
    for method in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match="You must call `compile"):
            method(x, x[:, :2], verbose=0)


def test_where_the_state_lives():
    for home, kind in ((devices(4)[3], "device"), ("host", "pinned_host")):
        strategy = unisono.CentralStorageStrategy(devices(2), home)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), L.Dense(1)])
            model.compile("adam", "mse")
        model.fit(np.ones((8, 4)), np.ones(8), verbose=0)
        for variable in model.variables + model.optimizer.variables:
            assert len(variable.value.devices()) == 1
            # Between steps. Who reads the variable gets an array that can be computed with.
            assert variable._value.sharding.memory_kind == kind
            assert variable.value.sharding.memory_kind == "device"
        if kind == "device":
            assert model.variables[0].value.devices() == {jax.devices()[3]}


#: what: (code inside a replica or a scope, message)
ERRORS = {
    "scope in a replica": (lambda s: s.run(lambda: s.scope().__enter__()), "cross-replica"),
    "reduce in a replica": (lambda s: s.run(lambda: s.reduce("SUM", 1, axis=None)), "cross-replica"),
    "gather in a replica": (lambda s: s.run(lambda: s.gather(1, axis=0)), "cross-replica"),
    "run in a replica": (lambda s: s.run(lambda: s.run(lambda: 1)), "cross-replica"),
    "iteration in a replica": (
        lambda s: s.run(lambda: next(iter(s.distribute_dataset([np.ones(2)])))),
        "outside of the replicas",
    ),
    "args": (lambda s: s.run(lambda: 1, args=3), "list or tuple"),
    "no function": (lambda s: s.run(3), "needs a function.*Received: 3 with 0 positional"),
    "too few arguments": (lambda s: s.run(lambda a, b: a, args=(1,)), "missing 1 .*argument: 'b'. Write"),
    "no function to merge": (
        lambda s: s.run(lambda: unisono.get_replica_context().merge_call(3)),
        "Received: 3, which cannot be called",
    ),
    "a dataset in place of a function": (
        lambda s: s.distribute_datasets_from_function([np.ones(2)]),
        r"distribute_dataset\(dataset\)",
    ),
    "a function without a context": (
        lambda s: s.distribute_datasets_from_function(lambda: [np.ones(2)]),
        "function of the `InputContext`",
    ),
    "an average of no rows": (
        lambda s: s.run(lambda: unisono.nn.compute_average_loss(jnp.ones(2), global_batch_size=0)),
        "global_batch_size.*Received: 0",
    ),
    "a sum of one value": (lambda s: s.reduce("SUM", 3.0, axis=None), "per-replica value"),
    "an operation": (lambda s: s.reduce("MAX", 3.0, axis=None), "reduce_op"),
    "joined scalars": (lambda s: s.gather(unisono.PerReplica((1.0, 2.0)), axis=0), "rank 1"),
    "unequal shapes": (
        lambda s: s.reduce("SUM", unisono.PerReplica((np.ones(1), np.ones(2))), axis=None),
        "equal shapes",
    ),
    "joined shapes that differ elsewhere": (
        lambda s: s.gather(unisono.PerReplica((np.ones((1, 2, 3)), np.ones((1, 4, 3)))), axis=0),
        "equal on all dimensions but axis=0",
    ),
    "a copy": (copy.copy, "cannot be copied"),
    "a pickle": (pickle.dumps, "belongs to its process"),
    "a deep copy": (copy.deepcopy, r"copy.deepcopy\(strategy\)"),
    "an axis of a scalar": (lambda s: s.reduce("SUM", s.run(lambda: jnp.ones(())), axis=0), "axis=None"),
    "an axis too large": (lambda s: s.reduce("SUM", s.run(lambda: jnp.ones((2, 3))), axis=2), "axis=2"),
    "an axis too small": (lambda s: s.reduce("SUM", s.run(lambda: jnp.ones((2, 3))), axis=-3), "axis=-3"),
    "an axis twice": (lambda s: s.reduce("SUM", s.run(lambda: jnp.ones((2, 3))), axis=(0, -2)), "each once"),
    "an axis of unequal shapes": (
        lambda s: s.reduce("MEAN", unisono.PerReplica((np.ones(1), np.ones(2))), axis=1),
        r"\(1,\)",
    ),
    "an axis of one value": (lambda s: s.reduce("MEAN", np.ones((2, 3)), axis=2), "axis=2"),
    "an axis of the wrong type": (
        lambda s: s.reduce("SUM", s.run(lambda: jnp.ones(2)), axis="0"),
        "axis='0'",
    ),
    "joined along no axis": (lambda s: s.gather(s.run(lambda: jnp.ones((2, 3))), axis=2), "axis=2"),
    "joined along None": (lambda s: s.gather(s.run(lambda: jnp.ones(2)), axis=None), "axis=None"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    code, message = ERRORS[name]
    with pytest.raises((unisono.UnisonoError), match=message):
        code(unisono.MirroredStrategy(devices(2)))


#: What replicas with 2 and 1 rows return, and what the error says.
STRUCTURES = {
    "keys": (
        lambda x: {"a" if len(x) == 2 else "b": x},
        "replica 0 {'a': array}, from replica 1 {'b': array}",
    ),
    "lengths": (lambda x: [x] * len(x), "replica 0 [array, array], from replica 1 [array]"),
    "none": (lambda x: x if len(x) == 2 else None, "from replica 1 None"),
    "mirrored": (lambda x: unisono.Mirrored(x) if len(x) == 2 else x, "`Mirrored`"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_replicas_return_one_structure(name):
    strategy = unisono.MirroredStrategy(devices(2))
    (batch,) = strategy.distribute_dataset([np.ones(3)])
    step, message = STRUCTURES[name]
    with pytest.raises(unisono.InvalidArgumentError, match=re.escape(message)):
        strategy.run(step, args=(batch,))


def test_an_array_beside_a_python_number():
    strategy = unisono.MirroredStrategy(devices(2))
    (batch,) = strategy.distribute_dataset([np.arange(3.0)])
    result = strategy.run(lambda x: (jnp.sum(x), len(x), x if len(x) == 2 else 7), args=(batch,))
    assert locals_of(strategy, result[0]) == [1.0, 2.0]
    assert result[1].values == (2, 1)
    assert locals_of(strategy, result[2]) == [[0.0, 1.0], 7]


def test_a_zero_of_the_host_is_the_sum_of_zeros():
    strategy = unisono.MirroredStrategy(devices(2))
    for zero in (0, 0.0, np.float32(0), np.zeros(3, "f4")):
        np.testing.assert_array_equal(strategy.reduce("SUM", zero, axis=None), zero)
    with pytest.raises(unisono.InvalidArgumentError, match="per-replica value"):
        strategy.reduce("SUM", np.float32(1), axis=None)


def test_a_variable_belongs_to_its_strategy():
    one, two = unisono.MirroredStrategy(devices(2)), unisono.MirroredStrategy(devices(2))
    with one.scope():
        mirrored, plain = unisono.Variable(1.0, name="mine"), keras.Variable(1.0, name="mine")
        on_read = unisono.Variable(1.0, name="mine", synchronization="on_read", aggregation="mean")
    uses = [
        lambda v: v.value,
        lambda v: v + 1.0,
        lambda v: v.assign(2.0),
        lambda v: two.run(lambda: v.value),
        lambda v: two.run(lambda x: v.assign(x), args=(1.0,)),
        lambda v: unisono.function(lambda: v + 1.0)(),
    ]
    for variable in (mirrored, plain, on_read):
        for use in uses:
            with pytest.raises(unisono.MixedStrategyError, match="'mine' of Mirrored"), two.scope():
                use(variable)
        assert float(variable.value) == 1.0
    # Keras' own generator is created in the first scope that draws, and serves all.
    for strategy in (one, two):
        with strategy.scope():
            keras.random.normal((1,))


def test_a_copy_of_a_variable_belongs_to_the_same_strategy():
    strategy = unisono.MirroredStrategy(devices(2))
    with strategy.scope():
        variable = unisono.Variable(1.0)
    twin = copy.deepcopy(variable)
    twin.assign(2.0)
    assert float(variable.value) == 1.0
    assert strategy.extended.variable_created_in_scope(twin)


def test_two_strategies_do_not_mix():
    one, two = unisono.MirroredStrategy(devices(2)), unisono.MirroredStrategy(devices(2))
    with one.scope(), pytest.raises(unisono.MixedStrategyError, match="Only one strategy"), two.scope():
        pass
    with one.scope():
        model = keras.Sequential([keras.Input((4,)), L.Dense(1)])
    with two.scope(), pytest.raises(unisono.MixedStrategyError, match="holds its variables"):
        model.compile("sgd", "mse")


def test_set_strategy_without_a_block():
    strategy = unisono.MirroredStrategy(devices(2))
    unisono.experimental_set_strategy(strategy)
    assert unisono.get_strategy() is strategy
    unisono.experimental_set_strategy(None)
    assert not unisono.has_strategy()
    with strategy.scope(), pytest.raises(unisono.ContextError, match="outside every"):
        unisono.experimental_set_strategy(strategy)


def test_a_scope_belongs_to_its_thread():
    import threading

    seen = []
    with unisono.MirroredStrategy(devices(2)).scope():
        thread = threading.Thread(target=lambda: seen.append(unisono.has_strategy()))
        thread.start()
        thread.join(timeout=60)
    assert seen == [False]
