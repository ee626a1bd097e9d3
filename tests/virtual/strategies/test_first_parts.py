"""The first values of variables that lie in parts: they have the bits of whole ones, and are never whole."""

import gc

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.strategies.test_fully_sharded_state import WIDTH, compiled, data, deep, in_parts, trained
from tests.virtual.strategies.test_sharded_state import assert_close, strategy_with
from unisono.checkpoint import Checkpoint
from unisono.sharding._shards import ShardedVariableLayout, Shards
from unisono.step._keras_internals import stored_value
from unisono.step._value_handle import DeferredValue

pytestmark = pytest.mark.numbers

K = keras.initializers
LAYERS, LARGE = 6, 256


def bytes_by_device():
    gc.collect()
    # By address: an array of parts and the array of one of them may be the same memory.
    held = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            held[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    found = {}
    for (device, _), count in held.items():
        found[device] = found.get(device, 0) + count
    return found


class Watch:
    """The most bytes that lie on each device, looked at where Keras makes a variable."""

    def __init__(self, monkeypatch):
        self.before = bytes_by_device()
        self.most = {}
        original = keras.Variable.__init__

        def watched(variable, *args, **kwargs):
            original(variable, *args, **kwargs)
            self.look()

        monkeypatch.setattr(keras.Variable, "__init__", watched)

    def look(self):
        for device, count in bytes_by_device().items():
            self.most[device] = max(self.most.get(device, 0), count - self.before.get(device, 0))
        return self.most


@pytest.fixture
def frozen():
    """Collections look at what is made from now on alone: pytest has millions of older objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(
    ("layout", "is_trained"),
    [
        ("fully_sharded", False),
        pytest.param("fully_sharded", True, marks=pytest.mark.exhaustive),
        pytest.param("sharded", True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_device_holds_its_parts(layout, is_trained, monkeypatch):
    """While a model and its optimizer are built, besides one variable; and after the first step."""
    replicas, layer = 4, 4 * LARGE**2
    # The library wraps Keras where the first strategy is made.
    strategy = strategy_with(layout, replicas)
    watch = Watch(monkeypatch)
    model = compiled(strategy, lambda: keras.optimizers.Adam(0.01), deep(LARGE, LAYERS))
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    small = 4 * (LARGE + 3) * (LAYERS + 3) * 4
    weights = LAYERS * layer / (replicas if layout == "fully_sharded" else 1)
    slots = 2 * LAYERS * layer / replicas
    for device, most in watch.most.items():
        held = slots + (weights if layout == "fully_sharded" or device == 0 else 0)
        assert most <= held + layer + small
    assert len(in_parts(model.optimizer.variables)) >= 2 * LAYERS
    if is_trained:
        model.fit(np.zeros((8, LARGE), "float32"), np.zeros(8, "int32"), batch_size=8, verbose=0)
        watch.most.clear()
        assert max(watch.look().values()) <= weights + slots + small


def test_an_initializer_of_the_users_own():
    """It is called once, and what it makes is cut before the next variable is made."""
    gc.collect()
    made, before = [], whole_arrays()

    def ones(shape, dtype=None):
        gc.collect()
        made.append(whole_arrays() - before)
        return keras.ops.ones(shape, dtype)

    with strategy_with("fully_sharded", 4).scope():
        variables = [keras.Variable(ones, shape=(LARGE, LARGE)) for _ in range(3)]
    assert made == [0, 0, 0]
    np.testing.assert_array_equal(variables[0], np.ones((LARGE, LARGE)))


def test_checkpoints_without_a_gather(tmp_path, monkeypatch):
    """The host joins the parts, and cuts what it reads; also for another number of devices, and both ways."""

    def model_on(layout, replicas):
        strategy = strategy_with(layout, replicas)
        model = compiled(strategy, lambda: keras.optimizers.Adam(0.01), deep(WIDTH, 2))
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        return model

    forms = ("fully_sharded", 2), ("fully_sharded", 3), ("mirrored", 2), ("sharded", 2)
    models = [model_on(*form) for form in forms]
    with monkeypatch.context() as patch:
        patch.setattr(ShardedVariableLayout, "gathered", None)
        for model, target in zip(models, [*models[1:], models[0]], strict=True):
            before = bytes_by_device()
            held = [stored_value(v) for v in [*model.variables, *model.optimizer.variables]]
            wanted = [np.array(v) + 1 for v in held]
            for variable, value in zip([*model.variables, *model.optimizer.variables], wanted, strict=True):
                variable.assign(value)
            path = Checkpoint(model=model).save(tmp_path / "checkpoint")
            Checkpoint(model=target).restore(path)
            restored = [*target.variables, *target.optimizer.variables]
            for variable, value in zip(restored, wanted, strict=True):
                np.testing.assert_array_equal(np.array(stored_value(variable)), value)
            del held
            assert max(n - before[d] for d, n in bytes_by_device().items()) < 4 * WIDTH**2 / 2
    assert [len(in_parts(m.weights)) for m in models] == [2, 2, 0, 0]
    assert [len(in_parts(m.optimizer.variables)) for m in models] == [12, 12, 0, 12]


def test_what_workers_tell_each_other():
    """A seed, of which they make the same value; of a value that was assigned, a checksum."""
    own, other = (DeferredValue(K.GlorotUniform(seed=s), (40, 30), "float32") for s in (1, 2))
    assert own.agreed(own.token) is own
    np.testing.assert_array_equal(other.agreed(own.token).whole(), own.whole())
    assert not np.array_equal(other.whole(), own.whole())
    with strategy_with("fully_sharded", 2).scope():
        shards = stored_value(keras.Variable(K.GlorotUniform(), shape=(40, 30)))
    assert shards.agreed(np.zeros(2, np.uint32)) is shards
    for value in (own, shards):
        with pytest.raises(unisono.ClusterError, match="same value"):
            value.agreed(np.array([2, 7], np.uint32))


def whole_arrays():
    return sum(a.size == LARGE**2 and a.is_fully_replicated for a in jax.live_arrays())


def test_the_bits_of_whole_values():
    """Of each initializer; and of a model that is built by its first step, within a loop."""
    made = {}
    for layout in ("mirrored", "fully_sharded"):
        keras.utils.set_random_seed(3)
        with strategy_with(layout, 3).scope():
            variables = [
                keras.Variable(initializer, shape=(37, 41), dtype=dtype)
                for dtype in ("float32", "bfloat16")
                for initializer in (
                    K.GlorotUniform(), K.HeNormal(), K.RandomNormal(0.1, 0.3), K.TruncatedNormal(0.1, 0.3),
                    K.RandomUniform(), K.Zeros(), K.Ones(), K.Constant(0.3),
                    K.RandomUniform(seed=keras.random.SeedGenerator(5)),
                    lambda shape, dtype: keras.ops.full(shape, 2, dtype),
                )
            ]  # fmt: skip
            variables.append(keras.Variable(K.Orthogonal(), shape=(32, 33)))
            variables.append(keras.Variable(K.Identity(), shape=(33, 33)))
        made[layout] = [np.asarray(v) for v in variables]
        assert len(in_parts(variables)) == (len(variables) if layout == "fully_sharded" else 0)
    for ours, theirs in zip(made["fully_sharded"], made["mirrored"], strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


def test_before_an_optimizer():
    """Weights are gathered for each use; what is assigned is cut at once."""
    strategy = strategy_with("fully_sharded", 2)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = deep(WIDTH, 2)()
        model.compile(loss="mse")
    x, _ = data(8)
    with strategy_with("mirrored", 2).scope():
        keras.utils.set_random_seed(0)
        mirrored = deep(WIDTH, 2)()
        mirrored.compile(loss="mse")
    before = bytes_by_device()
    found = model.predict(x, batch_size=8, verbose=0)
    assert len(in_parts(model.weights)) == 2
    assert max(count - before.get(d, 0) for d, count in bytes_by_device().items()) < 4 * WIDTH**2
    assert_close([found, np.asarray(model(x))], [mirrored.predict(x, batch_size=8, verbose=0)] * 2)
    model.set_weights([w + 1 for w in mirrored.get_weights()])
    assert len(in_parts(model.weights)) == 2
    for ours, theirs in zip(model.get_weights(), mirrored.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs + 1)


@pytest.mark.exhaustive
def test_weights_of_an_optimizer_that_needs_them_whole():
    """They begin in parts, and lie whole when it is known."""
    ours, found = trained("fully_sharded", make=lambda: keras.optimizers.Lamb(0.01))
    assert not in_parts([*ours.weights, *ours.optimizer.variables])
    assert_close(found, trained("mirrored", make=lambda: keras.optimizers.Lamb(0.01))[1])
    assert not any(isinstance(stored_value(v), Shards) for v in ours.optimizer.variables)


@pytest.mark.exhaustive
def test_written_by_the_users_own_rule():
    """Without an optimizer: what a replica assigns to a weight in parts."""
    results = []
    for layout in ("mirrored", "fully_sharded"):
        strategy = strategy_with(layout, 2)
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = deep(WIDTH, 2)()
        trainable = model.trainable_variables

        def step(x, model=model, trainable=trainable):
            loss, grads = unisono.value_and_grad(lambda: keras.ops.mean(model(x) ** 2), trainable)()
            replica = unisono.get_replica_context()
            for weight, grad in zip(trainable, replica.all_reduce("MEAN", grads), strict=True):
                weight.assign(weight - 0.1 * grad)
            return loss

        for batch in strategy.distribute_dataset([data(8)[0]] * 3):
            loss = strategy.reduce("MEAN", strategy.run(step, (batch,)), axis=None)
        results.append([loss, *values_of(model)])
        assert len(in_parts(model.weights)) == (2 if layout == "fully_sharded" else 0)
    assert_close(*results)


def values_of(model):
    return [np.asarray(v) for v in model.variables]
