"""Divided variables are one tensor in files, which any number of servers and any division can take."""

import contextlib

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from unisono.checkpoint import Checkpoint
from unisono.cluster_resolver._spec import Task
from unisono.partitioners import FixedShardsPartitioner, MaxSizePartitioner

#: Where a model trains: servers and division; None for plain Keras.
FEW, MANY = (2, FixedShardsPartitioner(2)), (3, MaxSizePartitioner(20))


def data(rows=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 7)).astype("float32")
    return x, x[:, :2].sum(1, keepdims=True)


def compiled(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((7,)), keras.layers.Dense(5, name="a"), keras.layers.Dense(1, name="b")]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fitted(model):
    model.fit(*data(), batch_size=32, shuffle=False, verbose=0)
    return model


@contextlib.contextmanager
def place(where):
    """Give the scope in which a model is made: of servers, or none."""
    if where is None:
        yield None, contextlib.nullcontext
        return
    servers, partitioner = where
    with local_strategy(servers=servers, max_staleness=0, variable_partitioner=partitioner) as strategy:
        yield strategy, strategy.scope


def state(model):
    return {v.path: v.numpy() for v in (*model.variables, *model.optimizer.variables)}


def assert_same(found, expected):
    assert len(found) == len(expected)
    for got, wanted in zip(found.values(), expected.values(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of each kind, from a model that has trained on two servers, and one that went on alone."""
    folder = tmp_path_factory.mktemp("saved")
    with place(FEW) as (_, scope):
        with scope():
            model = compiled(1)
        fitted(model)
        model.save(folder / "model.keras")
        model.save_weights(folder / "model.weights.h5")
        checkpoint = Checkpoint(model=model, optimizer=model.optimizer).save(folder / "checkpoint")
        before = state(model)
    alone = fitted(compiled(1))
    assert_same(before, state(alone))
    return folder, checkpoint, before, state(fitted(alone))


@pytest.mark.parametrize("kind", ["checkpoint", "model"])
@pytest.mark.parametrize("where", [MANY, None], ids=["other servers", "no servers"])
def test_all_state_is_taken_elsewhere_and_training_goes_on(saved, where, kind):
    folder, checkpoint, before, after = saved
    with place(where) as (strategy, scope):
        with scope():
            if kind == "model":
                model = keras.models.load_model(folder / "model.keras")
            else:
                model = compiled(2)
                # Once more after a step, when the variables are on servers.
                Checkpoint(model=model, optimizer=model.optimizer).restore(checkpoint)
                fitted(model)
                Checkpoint(model=model, optimizer=model.optimizer).restore(checkpoint)
        assert_same(state(model), before)
        assert_same(state(fitted(model)), after)
        if strategy is not None:
            division = strategy._job.variables[model.layers[0].kernel].division
            assert (len(division.parts), division.servers) == (7, (0, 1, 2))


def test_back_to_servers_from_a_model_without(saved, tmp_path):
    folder, checkpoint, before, after = saved
    alone = compiled(3)
    Checkpoint(model=alone, optimizer=alone.optimizer).restore(checkpoint)
    alone.optimizer.build(alone.trainable_variables)
    again = Checkpoint(model=alone, optimizer=alone.optimizer).save(tmp_path / "again")
    with place(FEW) as (_, scope):
        with scope():
            model = compiled(4)
        Checkpoint(model=model, optimizer=model.optimizer).restore(again)
        assert_same(state(fitted(model)), after)
        model.load_weights(folder / "model.weights.h5")
        for found, expected in zip(model.weights, before.values(), strict=False):
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_variables_are_read_while_all_workers_are_down(saved):
    *_, before, _ = saved
    with place(FEW) as (strategy, scope):
        with scope():
            model = fitted(compiled(1))
        for number in range(2):
            strategy.cluster.kill_worker(Task("worker", number))
        assert_same(state(model), before)
        kernel = model.layers[0].kernel
        np.testing.assert_allclose(kernel[3:5], kernel.numpy()[3:5])
        kernel.assign(np.zeros(kernel.shape))
        assert not kernel.numpy().any()
        for number in range(2):
            strategy.cluster.start_worker(Task("worker", number))


def test_a_variable_alone_is_one_tensor(tmp_path):
    value = np.arange(12, dtype="float32").reshape(6, 2)
    with place(FEW) as (_, scope):
        with scope():
            variable = unisono.Variable(value, name="table")
        path = Checkpoint(table=variable).save(tmp_path / "c")
    alone = unisono.Variable(np.zeros((6, 2), "float32"), name="table")
    Checkpoint(table=alone).restore(path)
    np.testing.assert_array_equal(alone, value)
    with place(MANY) as (_, scope):
        with scope():
            other = unisono.Variable(np.zeros((6, 2), "float32"), name="table")
        Checkpoint(table=other).restore(path)
        assert len(other.variables) == 3
        np.testing.assert_array_equal(other, value)
