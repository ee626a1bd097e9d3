"""Weights in parts on the replicas: the numbers of the replicated form, and what each device needs.

What holds for optimizer state in parts is in test_sharded_state.py.
"""

import logging
import math

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.strategies.test_sharded_state import CLOSE, assert_close, strategy_with, values
from unisono.checkpoint import Checkpoint
from unisono.sharding._shards import Shards
from unisono.step._keras_internals import stored_value
from unisono.training.trainer._lowered_step import lowered_step

pytestmark = pytest.mark.numbers

K = keras.optimizers

#: So many features that a layer's weights lie in parts, a number that two and three replicas do not divide.
WIDTH = 35


def data(rows):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, WIDTH)).astype("float32")
    return x, generator.integers(0, 3, rows)


def model_of(**options):
    """A model with a shared layer, a penalty on weights, and layers that are short of a part."""
    keras.utils.set_random_seed(0)
    shared = keras.layers.Dense(WIDTH, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01))
    inputs = keras.Input((WIDTH,))
    hidden = keras.layers.Dense(WIDTH, activation="tanh", **options)(shared(shared(inputs)))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.BatchNormalization()(hidden)))


def compiled(strategy, make=lambda: K.Adam(0.01, global_clipnorm=0.5), make_model=model_of, **options):
    with strategy.scope():
        model = make_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make(), loss, metrics=["accuracy"], **options)
    return model


def in_parts(variables):
    return [v for v in variables if isinstance(stored_value(v), Shards)]


def trained(layout, replicas=2, rows=24, batch_size=8, **options):
    """A model before and after training, and the numbers that it gave."""
    model = compiled(strategy_with(layout, replicas), **options)
    x, y = data(rows)
    found = [model.evaluate(x, y, batch_size=batch_size, verbose=0)]
    history = model.fit(
        x, y, batch_size=batch_size, epochs=2, verbose=0, shuffle=False, validation_data=(x, y)
    )
    found += history.history.values()
    found.append(model.evaluate(x, y, batch_size=batch_size, verbose=0))
    return model, [*map(np.asarray, found), model.predict(x, batch_size=batch_size, verbose=0)]


@pytest.mark.parametrize(
    ("replicas", "rows", "options"),
    [
        (3, 45, {"batch_size": 12}),  # the last batch of 9 rows runs on all replicas
        # The last batch of 5 rows runs whole on every replica.
        pytest.param(2, 37, {"batch_size": 16}, marks=pytest.mark.exhaustive),
        # Batches are filled up.
        pytest.param(2, 27, {"batch_size": 9}, marks=pytest.mark.exhaustive),
        pytest.param(2, 40, {"batch_size": 8, "steps_per_execution": 3}, marks=pytest.mark.exhaustive),
        pytest.param(2, 16, {"run_eagerly": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_each_kind_of_batch(replicas, rows, options):
    ours, found = trained("fully_sharded", replicas, rows, **options)
    mirrored, wanted = trained("mirrored", replicas, rows, **options)
    assert_close(found, wanted)
    assert_close(values(ours), values(mirrored))
    if "run_eagerly" not in options:
        assert [math.prod(v.shape) for v in in_parts(ours.weights)] == [WIDTH**2, WIDTH**2]


@pytest.mark.exhaustive
def test_half_precision():
    """Weights are gathered in half precision; both forms compute the same products."""
    results = []
    for layout in ("mirrored", "fully_sharded"):
        keras.config.set_dtype_policy("mixed_float16")
        try:
            results.append(trained(layout))
        finally:
            keras.config.set_dtype_policy("float32")
    (mirrored, wanted), (ours, found) = results
    assert len(in_parts(ours.weights)) == 2
    for a, b in zip([*found, *values(ours)], [*wanted, *values(mirrored)], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)
    x, y = data(16)
    text = lowered_step(ours, x, y).as_text()
    gathers = [line for line in text.splitlines() if "all_gather" in line]
    assert any("xf16>" in line for line in gathers)


@pytest.mark.parametrize(
    ("differentiate", "is_all"),
    [
        ("tape", False),
        pytest.param("tape", True, marks=pytest.mark.exhaustive),
        pytest.param("value_and_grad", True, marks=pytest.mark.exhaustive),
    ],
)
def test_loops(differentiate, is_all):
    """A program before the first update; a function around the step, and unequal replicas."""
    found, sizes = [], (8, 8, 7) if is_all else (8, 8)
    for layout in ("mirrored", "fully_sharded"):
        strategy = strategy_with(layout, 2)
        with strategy.scope():
            model, optimizer = model_of(), K.SGD(0.1)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainable = model.trainable_variables

        def step(batch, model=model, trainable=trainable, optimizer=optimizer, loss_fn=loss_fn):
            x, y = batch
            if differentiate == "tape":
                with unisono.GradientTape() as tape:
                    loss = loss_fn(y, model(x, training=False))
                grads = tape.gradient(loss, trainable)
            else:
                loss, grads = unisono.value_and_grad(lambda: loss_fn(y, model(x)), trainable)()
            optimizer.apply([g * 0.5 for g in grads], trainable)
            # What the update has left, read in the same step.
            return loss, keras.ops.sum(trainable[0])

        def predict(batch, model=model):
            return keras.ops.sum(model(batch[0]))

        @unisono.function
        def whole(batch, strategy=strategy, step=step, trainable=trainable):
            return strategy.run(step, (batch,)), keras.ops.sum(trainable[0])

        numbers = []
        for i, batch in enumerate(strategy.distribute_dataset([data(n) for n in sizes])):
            if i < 2:
                numbers.append(strategy.reduce("SUM", strategy.run(predict, (batch,)), axis=None))
            results = strategy.run(step, (batch,))
            if is_all and i == 1:
                results, total = whole(batch)
                numbers.append(total)
            numbers += [strategy.reduce("MEAN", r, axis=None) for r in results]
        found.append([np.asarray(v) for v in [*numbers, *model.variables]])
        is_parted = layout == "fully_sharded"
        assert len(in_parts(trainable)) == (2 if is_parted else 0)
    # Sums of a thousand weights that nearly cancel.
    for ours, theirs in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_updates_that_keras_allows():
    """A gradient too few, a weight twice, and the optimizer's pure update, which checks its weights."""
    found = []
    for layout in ("mirrored", "fully_sharded"):
        strategy = strategy_with(layout, 2)
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model, optimizer = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)]), K.Adam()
        kernel, bias = trained = model.trainable_variables

        def step(optimizer=optimizer, kernel=kernel, bias=bias, trained=trained):
            grads = [keras.ops.sin(100 * v) for v in trained]
            optimizer.apply(grads, trained)
            optimizer.apply(grads[:1], trained)
            optimizer.apply([grads[0], grads[1], -2 * grads[0]], [kernel, bias, kernel])
            state = [v.value for v in optimizer.variables]
            new, left = optimizer.stateless_apply(state, grads, [v.value for v in trained])
            for variable, value in zip([*trained, *optimizer.variables], [*new, *left], strict=True):
                variable.assign(value)

        def too_few(optimizer=optimizer, kernel=kernel):
            state = [v.value for v in optimizer.variables]
            optimizer.stateless_apply(state, [keras.ops.ones((WIDTH, WIDTH))], [kernel.value])

        strategy.run(step)
        strategy.run(step)
        assert len(in_parts(trained)) == (layout == "fully_sharded")
        with pytest.raises(ValueError, match="optimizer was built with 2 variables"):
            strategy.run(too_few)
        found.append([np.asarray(v) for v in [*trained, *optimizer.variables]])
    assert_close(found[1], found[0])


@pytest.mark.exhaustive
def test_a_step_of_the_users_own():
    """It sees whole weights, and may return weights of its own making."""

    class Averaged(keras.Model):
        def train_step(self, state, batch):
            before = [keras.ops.copy(w) for w in state[0]]
            logs, (trainable, *rest) = super().train_step(state, batch)
            mean = [0.5 * a + 0.5 * b for a, b in zip(before, trainable, strict=True)]
            return logs, (mean, *rest)

    def make():
        model = model_of()
        return Averaged(model.inputs, model.outputs)

    ours, found = trained("fully_sharded", make_model=make)
    mirrored, wanted = trained("mirrored", make_model=make)
    assert len(in_parts(ours.weights)) == 2
    assert_close([*found, *values(ours)], [*wanted, *values(mirrored)])


@pytest.mark.exhaustive
def test_what_looks_at_whole_weights_keeps_them_whole(caplog):
    with caplog.at_level(logging.WARNING, "unisono"):
        ours, found = trained("fully_sharded", make=lambda: K.Lamb(0.01))
    assert 'state_layout="fully_sharded"' in caplog.text
    assert not in_parts([*ours.weights, *ours.optimizer.variables])
    assert_close(found, trained("mirrored", make=lambda: K.Lamb(0.01))[1])


def test_files_between_layouts_and_numbers_of_devices(tmp_path):
    """Keras' files and checkpoints, both ways; weights that are read, set, and used in another model."""
    forms = ("fully_sharded", 2), ("mirrored", 2), ("fully_sharded", 3)
    models = [compiled(strategy_with(*form)) for form in forms]
    x, y = data(24)
    for model in models:
        model.fit(x, y, batch_size=24, verbose=0)
    for source, target in zip(models, [*models[1:], models[0]], strict=True):
        source.fit(x, y, batch_size=24, verbose=0)
        source.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        path = Checkpoint(model=source).save(tmp_path / "checkpoint")
        Checkpoint(model=target).restore(path)
        for restored in (loaded, target):
            for ours, theirs in zip(values(restored), values(source), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    Checkpoint(model=models[1]).restore(path)
    models[1].set_weights(models[0].get_weights())
    models[0].set_weights(models[1].get_weights())
    shared = models[0].layers[1]
    other = keras.Model(models[0].inputs, keras.layers.Dense(2)(shared(models[0].inputs[0])))
    assert other.predict(x, verbose=0).shape == (24, 2)
    # Statistics of batches depend on the rows of each replica.
    history = [m.fit(x, y, batch_size=24, verbose=0, shuffle=False).history["loss"] for m in models[:2]]
    assert len(in_parts(models[0].weights)) == 2
    np.testing.assert_allclose(*history, **CLOSE)


def deep(width, layers, remat=False):
    def make():
        scope = keras.RematScope("full" if remat else None)
        with scope:
            keras.utils.set_random_seed(0)
            hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
            return keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(3)])

    return make


def bytes_of_step(layout, replicas, width=128, layers=8, **options):
    """What a device needs at most: what rests, and what a step needs besides, by XLA's plan."""
    model = compiled(strategy_with(layout, replicas), lambda: K.Adam(0.01), deep(width, layers, **options))
    x = np.zeros((4 * replicas, width), "float32")
    plan = lowered_step(model, x, np.zeros(len(x), "int32")).compile().memory_analysis()
    outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return plan.argument_size_in_bytes + plan.temp_size_in_bytes + outputs


@pytest.mark.parametrize("replicas", [2, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_a_device_needs_its_parts_and_two_layers(replicas):
    width, layers = 128, 8
    whole = layers * 4 * (width**2 + width)
    # Weights, gradients and two slots.
    bound = 4 * whole / replicas + 2 * 4 * width**2
    assert bytes_of_step("fully_sharded", replicas) < 1.1 * bound
    assert bytes_of_step("sharded", replicas) > bytes_of_step("fully_sharded", replicas) + whole / 4


@pytest.mark.exhaustive
def test_gradient_checkpointing():
    """`keras.RematScope` computes layers again in the backward pass; weights are gathered there, too."""

    def fitted(layout):
        model = compiled(strategy_with(layout, 2), make_model=deep(WIDTH, 2, remat=True))
        x, y = data(16)
        return model, model.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"]

    ours, losses = fitted("fully_sharded")
    mirrored, wanted = fitted("mirrored")
    assert len(in_parts(ours.weights)) == 2
    np.testing.assert_allclose(losses, wanted, **CLOSE)
    assert_close(values(ours), values(mirrored))
    # Not more than without it: what is repeated gathers weights for each use, too.
    assert bytes_of_step("fully_sharded", 2, remat=True) < 1.05 * bytes_of_step("fully_sharded", 2)
    # Weights are whole for a layer at a time; the mirrored form holds them all.
    assert bytes_of_step("fully_sharded", 2, remat=True) < 0.7 * bytes_of_step("mirrored", 2, remat=True)
