"""`push_dtype`: large gradients travel to the servers in 16 bits."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy

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


@pytest.mark.parametrize(("push_dtype", "wide"), [(None, 4), ("float16", 2)])
def test_half_of_the_bytes_is_pushed(push_dtype, wide):
    logs = []
    with local_strategy(workers=1, max_staleness=0, push_dtype=push_dtype) as strategy:
        with strategy.scope():
            model = compiled(K.Adam(0.01))
        callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, seen: logs.append(seen["pushed_mb"]))
        model.fit(*data(32), batch_size=32, verbose=0, callbacks=[callback])
    exact = WIDE[1] + np.prod(NARROW) + NARROW[1]
    # Besides gradients, additions to the sum and the count of the mean of the loss.
    assert logs[0] == pytest.approx((wide * np.prod(WIDE) + 4 * exact + 4 * 2) / 1e6)


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
    with local_strategy(servers=2, max_staleness=0, push_dtype="bfloat16") as strategy:
        with strategy.scope():
            variable = table().layers[1].embeddings
        assert strategy.job.variables[variable].is_table
        found = variable.numpy()
    np.testing.assert_allclose(found, alone, atol=0.05)
    assert abs(found - alone).max() > 1e-5


def test_other_types_are_an_error():
    with pytest.raises(ValueError, match=r"`push_dtype` must be 'bfloat16' or 'float16'.*'int8'"):
        unisono.ParameterServerStrategy(push_dtype="int8")
