"""Variables that are divided over parameter servers: `variable_partitioner`, against plain Keras."""

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from unisono.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner

K = keras.optimizers


def data(rows=96):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, (x[:, :2].sum(1) > 0).astype("int32")


def compiled(optimizer, *extra):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(9, activation="relu"), *extra, keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def assert_same(model, other):
    for found, expected in zip(model.variables, other.variables, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6, err_msg=found.path)


@pytest.mark.parametrize(
    ("partitioner", "servers", "make"),
    [
        (FixedShardsPartitioner(2), 2, lambda: K.SGD(0.1, momentum=0.9, clipnorm=0.5)),
        (MinSizePartitioner(min_shard_bytes=24, max_shards=4), 3, lambda: K.AdamW(0.01, weight_decay=0.1)),
        (MaxSizePartitioner(max_shard_bytes=64), 2, lambda: K.RMSprop(0.01, momentum=0.5)),
        (FixedShardsPartitioner(3), 1, lambda: K.Adam(0.01, global_clipnorm=1.0)),
    ],
)
def test_with_staleness_0_the_numbers_are_those_of_one_device(partitioner, servers, make):
    alone = compiled(make())
    alone.fit(*data(), batch_size=32, shuffle=False, verbose=0)
    with local_strategy(servers=servers, max_staleness=0, variable_partitioner=partitioner) as strategy:
        with strategy.scope():
            model = compiled(make())
        model.fit(*data(), batch_size=32, shuffle=False, verbose=0)
        kernel = strategy._job.variables[model.layers[0].kernel]
        assert kernel.division.is_divided
        assert len(kernel.homes) == min(servers, len(kernel.division.parts))
        assert_same(model, alone)


def test_moving_statistics_and_metrics_are_divided_too():
    def make():
        return compiled(K.SGD(0.1), keras.layers.BatchNormalization())

    alone = make()
    alone.fit(*data(), batch_size=32, shuffle=False, verbose=0)
    partitioner = FixedShardsPartitioner(3)
    with local_strategy(servers=2, max_staleness=0, variable_partitioner=partitioner) as strategy:
        with strategy.scope():
            model = make()
        model.fit(*data(), batch_size=32, shuffle=False, verbose=0)
        assert len(strategy._job.variables[model.layers[1].moving_mean].division.parts) == 3
        assert_same(model, alone)
        expected, found = (m.evaluate(*data(), verbose=0) for m in (alone, model))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_an_optimizer_that_mixes_rows_names_itself_and_the_variable_and_can_be_replaced():
    alone = compiled(K.SGD(0.1))
    alone.fit(*data(), batch_size=32, shuffle=False, verbose=0)
    partitioner = FixedShardsPartitioner(2)
    with local_strategy(servers=2, max_staleness=0, variable_partitioner=partitioner) as strategy:
        with strategy.scope():
            model = compiled(K.Lamb(0.01))
        with pytest.raises(unisono.UnsupportedError, match=r"Lamb .*whose update of '.*kernel'"):
            model.fit(*data(), batch_size=32, verbose=0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(K.SGD(0.1), loss, metrics=["accuracy"])
        model.fit(*data(), batch_size=32, shuffle=False, verbose=0)
        assert_same(model, alone)
        assert all(strategy._job.variables[v].division.is_divided for v in model.trainable_variables)
