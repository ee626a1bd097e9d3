"""`push_dtype` and `pull_dtype`: large gradients and weights travel in 16 bits."""

import collections

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from unisono.rpc._frames import total_bytes
from unisono.rpc._ops import Op

pytestmark = pytest.mark.numbers

K, L = keras.optimizers, keras.layers
#: The weights of the first layer, 8 KiB, and not those of the second.
WIDE, NARROW = (32, 64), (64, 2)


class Rounded(K.SGD):
    """Rounds gradients of 8 KiB and more as they are pushed."""

    def apply(self, grads, trainable_variables=None):
        grads = [g.astype(jnp.bfloat16).astype(g.dtype) if g.nbytes >= 8192 else g for g in grads]
        return super().apply(grads, trainable_variables)


def data(rows=96):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, WIDE[0])).astype("float32")
    return x, (x[:, 0] > 0).astype("int32")


def compiled(optimizer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input(WIDE[:1]), L.Dense(WIDE[1], activation="tanh"), L.Dense(2)])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fitted(model):
    model.fit(*data(), batch_size=32, epochs=2, shuffle=False, verbose=0)
    return [variable.numpy() for variable in model.variables]


@pytest.mark.parametrize("partitioner", [None, unisono.partitioners.FixedShardsPartitioner(2)])
def test_the_numbers_are_those_of_rounded_gradients(partitioner):
    expected = fitted(compiled(Rounded(0.5)))
    with local_strategy(
        servers=2, max_staleness=0, variable_partitioner=partitioner, push_dtype="bfloat16"
    ) as strategy:
        with strategy.scope():
            model = compiled(K.SGD(0.5))
        found = fitted(model)
    exact = fitted(compiled(K.SGD(0.5)))

    def distance(one, other):
        return sum(abs(a - b).sum() for a, b in zip(one, other, strict=True))

    # Sums in another order are rounded to another neighbour here and there.
    assert distance(found, expected) < distance(exact, expected) / 10


class Simulated:
    """Linear regression by SGD in NumPy, with weights rounded at each pull, and gradients at each push.

    All numbers are multiples of a power of two with so few digits that no sum is rounded, in any order.

    Args:
        types: as of the strategy.
    """

    SHAPE, RATE, STEPS = (32, 64), 32.0, 3

    def __init__(self, push_dtype="float32", pull_dtype="float32"):
        self._push, self._pull = np.dtype(push_dtype), np.dtype(pull_dtype)
        rng = np.random.default_rng(0)
        self.x = rng.integers(-1, 2, (32 * self.STEPS, self.SHAPE[0])).astype("float32")
        self.y = rng.integers(-2, 3, (len(self.x), self.SHAPE[1])).astype("float32")
        self.first = rng.integers(-16, 17, self.SHAPE).astype("float32") / 8

    def trained(self):
        kernel = self.first
        for x, y in zip(np.split(self.x, self.STEPS), np.split(self.y, self.STEPS), strict=True):
            pulled = kernel.astype(self._pull).astype("float32")
            gradient = x.T @ (x @ pulled - y) * (2 / y.size)
            kernel = kernel - np.float32(self.RATE) * gradient.astype(self._push).astype("float32")
        return kernel

    def fitted(self, strategy, callbacks=()):
        with strategy.scope():
            model = keras.Sequential([keras.Input(self.SHAPE[:1]), L.Dense(self.SHAPE[1], use_bias=False)])
            model.compile(K.SGD(self.RATE), "mse")
        self.fit(model, callbacks)
        return model

    def fit(self, model, callbacks=()):
        model.set_weights([self.first])
        model.fit(self.x, self.y, batch_size=32, shuffle=False, verbose=0, callbacks=callbacks)


@pytest.mark.parametrize(
    ("types", "partitioner"),
    [
        ({"pull_dtype": "bfloat16"}, None),
        ({"pull_dtype": "float16"}, unisono.partitioners.FixedShardsPartitioner(2)),
        ({"push_dtype": "bfloat16", "pull_dtype": "bfloat16"}, None),
    ],
)
def test_a_step_computes_with_rounded_weights_and_the_servers_keep_exact_ones(types, partitioner):
    case = Simulated(**types)
    assert (case.trained() != Simulated().trained()).any()
    with local_strategy(
        workers=1, servers=2, max_staleness=0, variable_partitioner=partitioner, **types
    ) as strategy:
        model = case.fitted(strategy)
        # A worker that has pulled exact values pulls rounded ones, and the other way round.
        for _ in range(2):
            (kernel,) = model.get_weights()
            np.testing.assert_array_equal(kernel, case.trained())
            predicted = model.predict(case.x, verbose=0)
            np.testing.assert_allclose(predicted, case.x @ kernel, rtol=1e-5, atol=1e-5)
            mean = np.mean((case.x @ kernel - case.y) ** 2)
            assert model.evaluate(case.x, case.y, verbose=0) == pytest.approx(mean, rel=1e-5)
            case.fit(model)
    rounded = kernel.astype(types["pull_dtype"]).astype("float32")
    assert abs(case.x @ rounded - predicted).max() > 1e-3


def test_messages_have_half_of_the_bytes():
    sent = {}
    for types in ({}, {"push_dtype": "bfloat16"}, {"push_dtype": "float16", "pull_dtype": "float16"}):
        found = sent[len(types)] = collections.Counter()

        def count(frame, is_answer, found=found):
            if is_answer and ("changed" in frame.meta or "pulled" in frame.meta):
                found["pulled"] += total_bytes(frame.parts())
            elif frame.op is Op.PUSH:
                found["pushed"] += total_bytes(frame.parts())
            return 1

        logs = {}
        callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, seen, logs=logs: logs.update(seen))
        with local_strategy(workers=1, max_staleness=0, copies=count, **types) as strategy:
            Simulated().fitted(strategy, [callback])
        # Besides weights and gradients, 4 bytes each of the sum and the count of the mean of the loss.
        wide = np.prod(Simulated.SHAPE) * Simulated.STEPS
        for what, name in (("pushed", "push_dtype"), ("pulled", "pull_dtype")):
            wanted = wide * (2 if name in types else 4) + 8 * Simulated.STEPS
            assert logs[f"{what}_mb"] == pytest.approx(wanted / 1e6)
            assert wanted < found[what] < wanted + 400 * (Simulated.STEPS + 1)
    assert sent[1]["pulled"] == pytest.approx(sent[0]["pulled"], rel=0.01)
    assert sent[2]["pulled"] < 0.55 * sent[0]["pulled"]


def test_small_arrays_stay_exact():
    logs = {}
    with local_strategy(workers=1, max_staleness=0, push_dtype="float16", pull_dtype="float16") as strategy:
        with strategy.scope():
            model = compiled(K.Adam(0.01))
        callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, seen: logs.update(seen))
        model.fit(*data(32), batch_size=32, verbose=0, callbacks=[callback])
    exact = WIDE[1] + np.prod(NARROW) + NARROW[1]
    # Besides weights and gradients, the sum and the count of the mean of the loss.
    wanted = (2 * np.prod(WIDE) + 4 * exact + 4 * 2) / 1e6
    assert logs["pushed_mb"] == logs["pulled_mb"] == pytest.approx(wanted)


def test_rows_of_a_table_are_rounded_too():
    def table():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,), dtype="int32")
        rows = L.Embedding(100_000, 4, embeddings_initializer="glorot_uniform")(inputs)
        model = keras.Model(inputs, L.Dense(2)(L.Flatten()(rows)))
        model.compile(K.Adagrad(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        ids = np.random.default_rng(0).integers(0, 50, (96, 3))
        model.fit(ids, ids[:, 0] % 2, batch_size=32, shuffle=False, verbose=0)
        return model

    alone = table().layers[1].embeddings.numpy()
    seen = set()

    def note(frame, is_answer):
        seen.update(a.dtype.name for a in frame.arrays if is_answer and a.shape[1:] == (4,))
        return 1

    types = {"push_dtype": "bfloat16", "pull_dtype": "float16"}
    with local_strategy(servers=2, max_staleness=0, copies=note, **types) as strategy:
        with strategy.scope():
            model = table()
        variable = model.layers[1].embeddings
        assert strategy._job.variables[variable].is_table
        assert seen == {"float16"}
        seen.clear()
        model.predict(np.zeros((8, 3), "int32"), verbose=0)
        assert seen == {"float32"}
        found = variable.numpy()
    np.testing.assert_allclose(found, alone, atol=0.05)
    assert abs(found - alone).max() > 1e-5


@pytest.mark.parametrize("name", ["push_dtype", "pull_dtype"])
def test_other_types_are_an_error(name):
    with pytest.raises(ValueError, match=rf"`{name}` must be 'bfloat16' or 'float16'.*'int8'"):
        unisono.ParameterServerStrategy(**{name: "int8"})
