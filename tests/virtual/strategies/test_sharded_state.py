"""Optimizer state in parts on the replicas: the numbers of the replicated form, and 1/n of its memory."""

import copy
import logging
import math
import re

import keras
import numpy as np
import pytest

import unisono
from unisono.checkpoint import Checkpoint
from unisono.sharding._shards import Shards
from unisono.step._call_signature import Call
from unisono.step._keras_internals import stored_value

pytestmark = pytest.mark.numbers

#: The sums over replicas are the same numbers in another order, and XLA fuses the update in another way:
#: a few units in the last place of float32 for each step, here of fewer than ten.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

K = keras.optimizers
OPTIMIZERS = {
    "SGD": lambda: K.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda: K.Adam(0.01, amsgrad=True),
    "AdamW": lambda: K.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: K.Adamax(0.01),
    "Nadam": lambda: K.Nadam(0.01),
    "Adagrad": lambda: K.Adagrad(0.1),
    "Adadelta": lambda: K.Adadelta(1.0),
    "RMSprop": lambda: K.RMSprop(0.01, momentum=0.5, centered=True),
    "Ftrl": lambda: K.Ftrl(0.1, l2_regularization_strength=0.01),
    "Lion": lambda: K.Lion(0.003),
    "clipnorm": lambda: K.Adam(0.01, clipnorm=0.05),
    "global_clipnorm": lambda: K.SGD(0.1, momentum=0.9, global_clipnorm=0.2),
    "clipvalue": lambda: K.SGD(0.1, momentum=0.9, clipvalue=0.01),
    "ema": lambda: K.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "accumulation": lambda: K.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.2),
    "loss_scale": lambda: K.LossScaleOptimizer(
        K.Adam(0.01, global_clipnorm=0.2), 8.0, dynamic_growth_steps=2
    ),
    "schedule": lambda: K.Adam(K.schedules.ExponentialDecay(0.01, 2, 0.5)),
}


def strategy_with(layout, replicas):
    return unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], state_layout=layout)


def in_shards(optimizer):
    return [v for v in optimizer.variables if isinstance(stored_value(v), Shards)]


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


# --- custom loops ---------------------------------------------------------------------------------


SHAPES = ((7, 5), (5,), (1,), (), (2, 3, 2))


def weights_of():
    keras.utils.set_random_seed(0)
    return [keras.Variable(keras.random.normal(s), name=f"w{len(s)}") for s in SHAPES]


def updated(layout, make, replicas=3, steps=4, spoilt=-1):
    """Weights and an optimizer's variables after steps with gradients that differ between the replicas."""
    strategy = strategy_with(layout, replicas)
    with strategy.scope():
        weights, optimizer = weights_of(), make()
        optimizer.exclude_from_weight_decay(var_names=["w1"])
        optimizer.build(weights)

    def step(scales):
        optimizer.apply([w * scales + 0.01 for w in weights], weights)

    for number in range(steps):
        scales = np.linspace(0.1, 0.4, replicas, dtype="float32") * (1 + number)
        if number == spoilt:
            scales[-1] = np.inf
        per_replica = strategy.distribute_values_from_function(
            lambda context, scales=scales: scales[context.replica_id_in_sync_group]
        )
        strategy.run(step, (per_replica,))
    return optimizer, [np.asarray(v) for v in [*weights, *optimizer.variables]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_gives_the_replicated_numbers(name):
    """Three replicas, of which few sizes are multiples."""
    optimizer, sharded = updated("sharded", OPTIMIZERS[name])
    assert in_shards(optimizer)
    assert_close(sharded, updated("mirrored", OPTIMIZERS[name])[1])


def test_an_infinity_on_one_replica_is_seen_by_all():
    make = OPTIMIZERS["loss_scale"]
    optimizer, sharded = updated("sharded", make, spoilt=1)
    assert in_shards(optimizer)
    assert np.isfinite(sharded[0]).all()
    assert_close(sharded, updated("mirrored", make, spoilt=1)[1])


class ByRank(keras.optimizers.SGD):
    """Treats matrices in another way than vectors, element by element."""

    def update_step(self, gradient, variable, learning_rate):
        factor = 2.0 if len(variable.shape) == 2 else 1.0
        super().update_step(gradient * factor, variable, learning_rate)


class ByRow(keras.optimizers.SGD):
    """Looks at rows: on flat weights these would be others."""

    def update_step(self, gradient, variable, learning_rate):
        largest = keras.ops.max(keras.ops.abs(gradient), axis=-1, keepdims=True) if gradient.ndim else 1.0
        super().update_step(gradient / largest, variable, learning_rate)


class OwnClipping(keras.optimizers.SGD):
    def _clip_gradients(self, grads):
        return grads


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: K.Lamb(0.01), "more than one element"),
        (lambda: K.Adafactor(0.01), "cannot be traced|shapes|more than one"),
        (lambda: K.Muon(0.01), "cannot be traced|shapes|more than one"),
        (lambda: ByRank(0.1, momentum=0.9), "depends on the shapes of weights"),
        (lambda: ByRow(0.1, momentum=0.9), "more than one element"),
        (lambda: OwnClipping(0.1, momentum=0.9), "clips gradients in its own way"),
    ],
)
def test_what_looks_at_whole_weights_keeps_its_state_whole(make, reason, caplog):
    with caplog.at_level(logging.WARNING, "unisono"):
        optimizer, sharded = updated("sharded", make, replicas=2, steps=2)
    assert not in_shards(optimizer)
    (line,) = [r.getMessage() for r in caplog.records if "state whole" in r.getMessage()]
    assert re.search(reason, line)
    assert_close(sharded, updated("mirrored", make, replicas=2, steps=2)[1])


# --- fit --------------------------------------------------------------------------------------------


def data(rows):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 7)).astype("float32")
    return x, generator.integers(0, 3, rows)


def compiled(strategy, optimizer, **options):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((7,)), keras.layers.Dense(13, activation="relu"), keras.layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def values(model):
    return [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


def trained(layout, replicas=2, rows=24, batch_size=8, **options):
    model = compiled(strategy_with(layout, replicas), K.Adam(0.01, global_clipnorm=0.5), **options)
    x, y = data(rows)
    history = model.fit(x, y, batch_size=batch_size, epochs=2, verbose=0, shuffle=False)
    return model, history.history["loss"]


@pytest.mark.parametrize(
    ("rows", "batch_size", "options"),
    [
        (37, 16, {}),  # the last batch of 5 rows runs whole on every replica
        (27, 9, {}),  # batches are filled up
        (40, 8, {"steps_per_execution": 3}),
        (16, 8, {"run_eagerly": True}),
    ],
)
def test_each_kind_of_batch(rows, batch_size, options):
    mirrored, losses = trained("mirrored", 2, rows, batch_size, **options)
    sharded, own = trained("sharded", 2, rows, batch_size, **options)
    np.testing.assert_allclose(own, losses, **CLOSE)
    assert_close(values(sharded), values(mirrored))


def bytes_on(device, optimizer):
    arrays = [stored_value(v) for v in optimizer.variables]
    shards = [s for a in arrays for s in (a.parts if isinstance(a, Shards) else a).addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_each_replica_holds_its_part(replicas):
    model, _ = trained("sharded", replicas)
    optimizer = model.optimizer
    sizes = [math.prod(v.shape) for v in model.trainable_variables]
    # Two slots for each weight; whole on every replica are only the iterations and the learning rate.
    parts = 2 * 4 * sum(math.ceil(size / replicas) for size in sizes)
    assert parts <= 2 * 4 * (sum(sizes) / replicas + len(sizes))
    assert len(in_shards(optimizer)) == 2 * len(sizes)
    for device in stored_value(optimizer.variables[2]).parts.sharding.device_set:
        assert bytes_on(device, optimizer) == parts + 4 + 4


def test_a_slot_can_be_copied():
    model, _ = trained("sharded")
    slot = next(v for v in model.optimizer.variables if isinstance(stored_value(v), Shards))
    np.testing.assert_array_equal(copy.deepcopy(slot).numpy(), slot.numpy())


def test_files_are_those_of_the_replicated_form(tmp_path):
    """Both ways, through Keras' files and a checkpoint; both forms train on alike."""
    mirrored, _ = trained("mirrored", 2)
    sharded, _ = trained("sharded", 2)
    x, y = data(24)
    for source, target in ((sharded, mirrored), (mirrored, sharded)):
        source.fit(x, y, batch_size=8, verbose=0)
        source.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        path = Checkpoint(model=source).save(tmp_path / "checkpoint")
        Checkpoint(model=target).restore(path)
        for restored in (loaded, target):
            for ours, theirs in zip(values(restored), values(source), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    losses = [
        m.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"] for m in (mirrored, sharded)
    ]
    np.testing.assert_allclose(*losses, **CLOSE)
    assert_close(values(sharded), values(mirrored))


def test_a_step_scatters_and_gathers():
    """Gradients are never summed whole, and optimizer state is not gathered."""
    strategy = strategy_with("sharded", 2)
    with strategy.scope():
        weights, optimizer = weights_of()[:2], K.Adam(0.01)

    def step(x):
        optimizer.apply([w * x for w in weights], weights)

    scale = strategy.distribute_values_from_function(lambda _: np.float32(1))
    strategy.run(step, (scale,))
    call = Call.parse((scale,), {})
    entry = strategy._compiler.entry(step, call)
    text = entry.step.lower(*entry.arguments(call)).compile().as_text()
    found = [len(re.findall(rf"= .*\b{name}\(", text)) for name in ("all-to-all", "all-gather", "all-reduce")]
    assert found == [len(weights), len(weights), 0]


def test_replicas_of_unequal_sizes_and_code_that_reads_slots():
    """The replicas are traced in turn; a `unisono.function` around them carries the parts, too."""
    found = []
    for layout in ("mirrored", "sharded"):
        strategy = strategy_with(layout, 2)
        with strategy.scope():
            weights, optimizer = weights_of()[:2], K.SGD(0.1, momentum=0.9)

        def step(x, weights=weights, optimizer=optimizer):
            optimizer.apply([w * keras.ops.sum(x) for w in weights], weights)
            return keras.ops.sum(optimizer.variables[2])

        @unisono.function
        def whole(x, strategy=strategy, optimizer=optimizer, step=step):
            return strategy.reduce("SUM", strategy.run(step, (x,)), axis=None), optimizer.variables[2] + 0.0

        sums = []
        for batch in strategy.distribute_dataset([np.arange(n, dtype="float32") for n in (4, 3, 4)]):
            strategy.run(step, (batch,))
            total, slot = whole(batch)
            assert slot.shape == weights[0].shape
            sums.append(total)
        found.append([np.asarray(v) for v in [*sums, *weights, *optimizer.variables]])
    assert in_shards(optimizer)
    np.testing.assert_array_equal(optimizer.variables[2].numpy(), found[1][-2])
    assert_close(found[1], found[0])


def test_a_layout_has_a_name():
    with pytest.raises(unisono.InvalidArgumentError, match="state_layout='half'"):
        strategy_with("half", 2)


@pytest.mark.parametrize("state_layout", ["mirrored", "sharded"])
def test_an_optimizer_of_all_variables_updates_those_with_gradients(state_layout):
    """`model.variables` has the state of dropout, too, whose momentum no step needs."""
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"], state_layout=state_layout)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(1e-7)])
        optimizer = keras.optimizers.SGD(0.1, 0.5)

    @unisono.function
    def step(x):
        def replica(x):
            with unisono.GradientTape() as tape:
                loss = keras.ops.mean(model(x, training=True))
            gradients = tape.gradient(loss, model.variables)
            assert gradients[2] is None
            optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

        strategy.run(replica, args=(x,))

    before = model.layers[0].bias.numpy()
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        step(np.ones((4, 3), "float32"))
    step(np.ones((4, 3), "float32"))
    # Two replicas' gradients of 1/4 are summed; the second step adds half of the first.
    np.testing.assert_allclose(before - model.layers[0].bias.numpy(), 0.1 * 0.5 * 2.5, rtol=1e-5)
