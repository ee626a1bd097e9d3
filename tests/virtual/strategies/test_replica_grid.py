"""Replicas of several devices: the numbers of one device, parts on each device, and what travels."""

import logging
import re

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.support import count_compiles, devices
from unisono.checkpoint import Checkpoint
from unisono.step._keras_internals import stored_value
from unisono.training.trainer._lowered_step import lowered_step

pytestmark = pytest.mark.numbers

L = keras.layers

#: Sums of parts in another order: some roundings of float32, which a few steps of Adam enlarge.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

#: By heads, and the two products of a feed-forward layer in a row, as in Megatron.
MEGATRON = {
    r".*(query|key|value)/kernel": (None, "model", None),
    r".*(query|key|value)/bias": ("model", None),
    r".*attention_output/kernel": ("model", None, None),
    r".*up/kernel": (None, "model"),
    r".*up/bias": ("model",),
    r".*down/kernel": ("model", None),
}
UP_AND_DOWN = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}
HEADS, WIDTH, WORDS, LENGTH = 4, 16, 24, 6


def grid(replicas, size, layout_map=MEGATRON, **options):
    names = devices(replicas * size)
    return unisono.MirroredStrategy(names, devices_per_replica=size, layout_map=layout_map, **options)


def transformer(layers=1):
    tokens = keras.Input((LENGTH,), dtype="int32")
    h = L.Embedding(WORDS, WIDTH, name="words")(tokens)
    for i in range(layers):
        n = L.LayerNormalization(name=f"norm_{i}a")(h)
        h = h + L.MultiHeadAttention(HEADS, 4, name=f"attention_{i}")(n, n, use_causal_mask=True)
        n = L.Dense(64, activation="gelu", name=f"layer_{i}_up")(L.LayerNormalization(name=f"norm_{i}b")(h))
        h = h + L.Dense(WIDTH, name=f"layer_{i}_down")(n)
    return keras.Model(tokens, L.Dense(WORDS, name="head")(h))


def compiled(strategy, make=transformer, optimizer=lambda: keras.optimizers.SGD(0.2, 0.9), **options):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, weighted_metrics=["accuracy"], **options)
    return model


def data(rows):
    x = np.random.default_rng(0).integers(0, WORDS, (rows, LENGTH))
    return x, np.roll(x, -1, 1)


def trained(strategy, rows=22, batch_size=8, **options):
    """A model after training, and the numbers that it gave."""
    model = compiled(strategy, **options)
    x, y = data(rows)
    history = model.fit(x, y, batch_size=batch_size, epochs=2, verbose=0, shuffle=False)
    found = [*history.history["loss"], *history.history["accuracy"]]
    found += model.evaluate(x, y, batch_size=batch_size, verbose=0)
    return model, [*map(np.asarray, found), model.predict(x, batch_size=batch_size, verbose=0)]


def values(model):
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


def assert_close(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)


@pytest.fixture(scope="module")
def one_device():
    return trained(unisono.OneDeviceStrategy(devices(1)[0]))


@pytest.mark.parametrize(
    ("replicas", "size"),
    [
        (2, 2),
        pytest.param(1, 4, marks=pytest.mark.exhaustive),
        pytest.param(4, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_training_gives_the_numbers_of_one_device(one_device, replicas, size):
    model, found = trained(grid(replicas, size))
    wanted_model, wanted = one_device
    assert_close(found, wanted)
    assert_close(values(model), values(wanted_model))


@pytest.mark.parametrize(
    "layout", ["mirrored", "sharded", pytest.param("fully_sharded", marks=pytest.mark.exhaustive)]
)
def test_rows_that_relate_to_each_other_are_computed_by_one_program(layout):
    """A layer takes the mean over a batch, in batches that divide and one that does not."""

    def make():
        layers = [L.Dense(64, activation="relu", name="up"), L.Lambda(lambda h: h - keras.ops.mean(h, 0))]
        return keras.Sequential([keras.Input((8,)), *layers, L.Dense(WORDS, name="down")])

    x = np.random.default_rng(1).normal(size=(26, 8)).astype("float32")
    y = np.arange(26) % WORDS
    found = []
    for strategy in (grid(2, 2, UP_AND_DOWN, state_layout=layout), unisono.OneDeviceStrategy(devices(1)[0])):
        model = compiled(strategy, make)
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
        logs = model.evaluate(x, y, batch_size=8, verbose=0)
        found.append([*history, *logs, model.predict(x, batch_size=8, verbose=0), *values(model)])
    assert_close(*found)


def test_channels_of_rows_that_relate_to_each_other_are_convolved_apart():
    """XLA's program for all rows would add up the kernel's gradient once for each device of a replica."""

    def make():
        mean = L.Lambda(lambda h: h - keras.ops.mean(h, 0))
        layers = [L.DepthwiseConv2D(2), mean, L.Flatten(), L.Dense(WORDS)]
        return keras.Sequential([keras.Input((3, 3, 2)), *layers])

    x = np.random.default_rng(1).normal(size=(16, 3, 3, 2)).astype("float32")
    found = []
    for strategy in (grid(2, 2, "auto"), unisono.OneDeviceStrategy(devices(1)[0])):
        model = compiled(strategy, make)
        model.fit(x, np.arange(16), batch_size=8, verbose=0, shuffle=False)
        found.append(values(model))
    assert_close(*found)


def cut_axis(variable):
    """The axis of a variable that its devices share; None for one that is whole on each."""
    value = stored_value(variable)
    part = value.addressable_shards[0].data.shape
    cut = [i for i, (a, b) in enumerate(zip(part, value.shape, strict=True)) if a < b]
    return cut[0] if cut else None


def test_slots_lie_as_their_weights():
    model, _ = trained(grid(2, 2), rows=8)
    axes = {v.path: cut_axis(v) for v in model.variables}
    assert axes["attention_0/query/kernel"] == axes["layer_0_up/kernel"] == 1
    assert axes["attention_0/attention_output/kernel"] == axes["layer_0_down/kernel"] == 0
    assert axes["layer_0_up/bias"] == 0
    assert axes["words/embeddings"] is None
    slots = {v.path.split("/")[-1]: cut_axis(v) for v in model.optimizer.variables}
    for path, axis in axes.items():
        if (slot := f"{path.replace('/', '_')}_momentum") in slots:
            assert slots[slot] == axis, slot
    assert slots["layer_0_up_kernel_momentum"] == 1


def test_first_values_are_those_of_one_device_and_never_whole():
    plain = compiled(unisono.OneDeviceStrategy(devices(1)[0]))
    model = compiled(grid(2, 2))
    for ours, theirs in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), err_msg=ours.path)
    kernel = stored_value(model.get_layer("layer_0_up").kernel)
    assert {s.data.shape for s in kernel.addressable_shards} == {(WIDTH, 32)}


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.RandomNormal(stddev=0.02, seed=3),
        keras.initializers.RandomUniform(-0.3, 0.7, seed=3),
        keras.initializers.VarianceScaling(2.5, "fan_avg", "untruncated_normal", seed=3),
        keras.initializers.Orthogonal(seed=3),
    ],
    ids=lambda one: type(one).__name__,
)
def test_first_values_are_rounded_as_on_one_device(initializer):
    """In one program, XLA would multiply constants with each other first."""
    whole = np.asarray(initializer((12, 8)))
    with grid(1, 2, {"kernel": (None, "model")}).scope():
        kernel = keras.Variable(initializer, (12, 8), name="kernel")
    assert cut_axis(kernel) == 1
    np.testing.assert_array_equal(np.asarray(kernel), whole)


def test_first_values_that_differ_in_their_seeds_are_one_program():
    strategy = grid(1, 4, {".*kernel": (None, "model")})
    with count_compiles() as compiled, strategy.scope():
        model = keras.Sequential([keras.Input((20,)), *(L.Dense(20) for _ in range(7))])
        model.optimizer = keras.optimizers.SGD(0.1, 0.9)
        model.optimizer.build(model.trainable_variables)
    # Kernels, their slots, and some scalars; in programs of their own they were twenty.
    assert len(compiled) <= 8
    assert cut_axis(model.layers[0].kernel) == 1
    assert len({np.asarray(layer.kernel).tobytes() for layer in model.layers}) == 7


def collectives(program, kind):
    """The groups of devices of each collective of a kind in a compiled program."""
    form = r"(\{\{.*?\}\}|\[\S*\]<=\[\S*\]\S*)"
    return re.findall(rf" {kind}(?:-start)?\(.*?replica_groups={form}", program)


def test_a_layer_costs_four_all_reduces_and_no_gather():
    """As in Megatron: two in the forward pass, two in the backward pass; and one for all gradients."""
    counts = []
    for layers in (1, 2):
        model = compiled(grid(2, 2), lambda layers=layers: transformer(layers))
        program = lowered_step(model, *data(8)).compile().as_text()
        reduced = collectives(program, "all-reduce")
        assert reduced.count("{{0,2},{1,3}}") == 1, reduced
        counts.append(len(reduced) - 1)
        assert collectives(program, "all-gather") == []
        assert collectives(program, "all-to-all") == []
    assert counts[1] - counts[0] <= 4, counts


def test_custom_loop():
    found = []
    for strategy in (unisono.OneDeviceStrategy(devices(1)[0]), grid(2, 2)):
        model = compiled(strategy)
        x, y = data(14)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def step(batch, model=model, loss_fn=loss_fn):
            x, y = batch
            with unisono.GradientTape() as tape:
                loss = unisono.nn.compute_average_loss(loss_fn(y, model(x, training=True)).mean(-1))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        batches = strategy.distribute_dataset([(x[i : i + 6], y[i : i + 6]) for i in (0, 6, 12)])
        losses = [strategy.reduce("SUM", strategy.run(step, (b,)), axis=None) for b in batches]
        found.append([*map(np.asarray, losses), *values(model)])
    assert_close(found[1], found[0])
    assert cut_axis(model.get_layer("layer_0_up").kernel) == 1


@pytest.mark.parametrize("other", [(2, 1), (1, 2), (4, 2)])
def test_checkpoints_are_restored_on_another_grid(tmp_path, other):
    model, _ = trained(grid(2, 2), rows=8)
    path = Checkpoint(model=model).write(tmp_path / "checkpoint")
    strategy = grid(*other) if other[1] > 1 else unisono.MirroredStrategy(devices(other[0]))
    again = compiled(strategy)
    again.optimizer.build(again.trainable_variables)
    Checkpoint(model=again).restore(path)
    for ours, theirs in zip(values(again), values(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    x, y = data(8)
    losses = [m.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"] for m in (model, again)]
    np.testing.assert_allclose(*losses, **CLOSE)
    if other[1] > 1:
        assert cut_axis(again.get_layer("layer_0_up").kernel) == 1


def test_files_of_keras_are_those_of_one_device(tmp_path):
    model, _ = trained(grid(2, 2), rows=8)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(values(loaded), values(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with grid(2, 2).scope():
        again = keras.saving.load_model(tmp_path / "model.keras")
    assert cut_axis(again.get_layer("layer_0_up").kernel) == 1
    fresh = compiled(grid(1, 4))
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(tmp_path / "model.weights.h5")
    x, _ = data(8)
    assert_close([fresh.predict(x, verbose=0)], [again.predict(x, verbose=0)])
    assert cut_axis(fresh.get_layer("layer_0_up").kernel) == 1


def test_patterns_that_match_nothing_and_large_whole_weights_are_named(caplog, tuned):
    from unisono.model_parallel import _cut_layout

    tuned(_cut_layout, LARGE=1000)
    with caplog.at_level(logging.WARNING, "unisono"):
        trained(grid(2, 2, {**MEGATRON, ".*kernels": (None, "model")}), rows=8)
    said = [r.getMessage() for r in caplog.records if "layout_map" in r.getMessage()]
    assert len(said) == 2
    assert "'.*kernels' of `layout_map` matches no variable" in said[0]
    assert "'words/embeddings'" in said[1] or "'head/kernel'" in said[1]


@pytest.mark.parametrize(
    ("layout_map", "message"),
    [
        ({".*up/kernel": (None, "modell")}, "must name the axis 'model'.*modell"),
        ({".*up/kernel": ("model",)}, "an entry for each of its axes.*up/kernel"),
        ({".*up/kernel": ("model", "model")}, "One axis of a variable can be cut.*up/kernel"),
        ({".*up/.*": (None, "model"), ".*kernel": (None, "model")}, "at most one pattern.*up/kernel"),
        (lambda v: ("model", None) if v.shape == (6, 10) else None, "must divide over the 4 devices"),
    ],
)
def test_a_layout_that_cannot_be_is_an_error(layout_map, message):
    strategy = grid(1, 4, layout_map)
    with strategy.scope(), pytest.raises(unisono.InvalidArgumentError, match=message):
        keras.Sequential([keras.Input((6,)), L.Dense(10, name="up")])


def test_devices_must_divide():
    with pytest.raises(unisono.InvalidArgumentError, match=r"multiple of 3 devices.*devices_per_replica=2"):
        unisono.MirroredStrategy(devices(4), devices_per_replica=3, layout_map=MEGATRON)
    with pytest.raises(unisono.InvalidArgumentError, match="replicas of one device"):
        unisono.MirroredStrategy(devices(2), layout_map=MEGATRON)
    with pytest.raises(unisono.InvalidArgumentError, match="whole number"):
        unisono.MirroredStrategy(devices(2), devices_per_replica=0)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"state_layout": "sharded"},
        {"state_layout": "fully_sharded"},
        {"cross_device_ops": unisono.CompressedAllReduce()},
    ],
)
def test_replicas_that_train_apart_hold_their_whole_state(size, options):
    """The error of replicas of one device; of which nothing is exchanged is not asked."""
    options = {**options, "devices_per_replica": size}
    for replicas in (1, 2):
        with pytest.raises(unisono.InvalidArgumentError, match="must hold its whole state"):
            unisono.MirroredStrategy(
                devices(replicas * size), sync=unisono.LocalUpdates(every=2, overlap=1), **options
            )
    unisono.MirroredStrategy(devices(2 * size), sync=unisono.LocalUpdates(every=1), **options)


def test_a_ring_reduces_gradients_in_parts():
    model, found = trained(grid(2, 2, cross_device_ops=unisono.RingAllReduce()), rows=8)
    wanted_model, wanted = trained(grid(2, 2), rows=8)
    assert_close([*found, *values(model)], [*wanted, *values(wanted_model)])


def test_a_layout_map_of_keras():
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "parts"], devices(4))
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*up/kernel"] = ("batch", "parts")
    layout_map[".*down/kernel"] = ("parts", None)
    model, _ = trained(grid(2, 2, layout_map), rows=8)
    assert cut_axis(model.get_layer("layer_0_up").kernel) == 1
    assert cut_axis(model.get_layer("layer_0_down").kernel) == 0
    with pytest.raises(unisono.InvalidArgumentError, match=r"an axis of 4 devices"):
        grid(1, 4, layout_map)


def test_local_results_of_a_cut_variable_are_its_copies():
    strategy = grid(2, 2)
    model = compiled(strategy)
    kernel = model.get_layer("layer_0_up").kernel
    copies = strategy.local_results(kernel)
    assert len(copies) == 2
    for copy in copies:
        np.testing.assert_array_equal(np.asarray(copy), np.asarray(kernel))
        assert len(copy.sharding.device_set) == 2


def test_dropout_and_clipping(one_device):
    """Masks are those of replicas of one device, bit for bit; a norm is that of all parts."""

    def make():
        tokens = keras.Input((LENGTH,), dtype="int32")
        h = L.Embedding(WORDS, WIDTH)(tokens)
        h = L.Dropout(0.5)(L.Dense(64, activation="relu", name="up")(h))
        return keras.Model(tokens, L.Dense(WORDS, name="down")(h))

    options = {"make": make, "optimizer": lambda: keras.optimizers.SGD(0.5, 0.9, global_clipnorm=0.1)}
    _, wanted = trained(unisono.MirroredStrategy(devices(2)), rows=16, **options)
    model, found = trained(grid(2, 2, UP_AND_DOWN), rows=16, **options)
    assert_close(found, wanted)
    assert cut_axis(model.get_layer("up").kernel) == 1


def test_memory_of_a_device_is_its_part():
    """Weights, slots and gradients of a device are about a half where two share everything large."""
    wide = 512

    def make():
        inputs = keras.Input((LENGTH,), dtype="int32")
        h = L.Embedding(WORDS, WIDTH)(inputs)
        h = L.Dense(wide, name="up")(h)
        return keras.Model(inputs, L.Dense(WORDS, name="down")(h))

    found = []
    for strategy in (unisono.MirroredStrategy(devices(2)), grid(2, 2, UP_AND_DOWN)):
        model = compiled(strategy, make)
        memory = lowered_step(model, *data(4)).compile().memory_analysis()
        found.append(memory.argument_size_in_bytes)
    assert found[1] < 0.6 * found[0]
    assert jax.device_count() >= 4
