"""State in parts on replicas of several devices: the numbers of one device, parts of parts, and messages."""

import logging
import math

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from tests.virtual.strategies import test_replica_grid as grids
from tests.virtual.strategies.test_replica_grid import assert_close, values
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint
from unisono.model_parallel._program_messages import messages_of
from unisono.sharding._shards import Shards
from unisono.step._keras_internals import stored_value
from unisono.training.trainer._lowered_step import lowered_step

pytestmark = pytest.mark.numbers

L, K = keras.layers, keras.optimizers

LAYOUTS = ["sharded", "fully_sharded"]
#: Of which no device's elements divide by the number of replicas.
INPUTS, WIDTH = 15, 138


def grid(layout, replicas=2, size=2, layout_map=grids.UP_AND_DOWN):
    layout_map = layout_map and {f".*{name}": axes for name, axes in layout_map.items()}
    return grids.grid(replicas, size, layout_map, state_layout=layout)


def mlp():
    inputs = keras.Input((INPUTS,))
    h = L.Dense(INPUTS, name="down")(L.Dense(WIDTH, activation="relu", name="up")(inputs))
    return keras.Model(inputs, L.Dense(INPUTS, name="other")(h))


def compiled(strategy, optimizer=lambda: K.Adam(0.01, global_clipnorm=0.5), make=mlp):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(optimizer(), "mse", weighted_metrics=["mae"])
    return model


def data(rows):
    x = np.random.default_rng(0).normal(size=(rows, INPUTS)).astype("float32")
    return x, np.roll(x, 1, axis=1)


def trained(strategy, rows=22, **options):
    """A model after training, and the numbers that it gave; the last batch does not divide."""
    model = compiled(strategy, **options)
    x, y = data(rows)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    found = [*history.history["loss"], *model.evaluate(x, y, batch_size=8, verbose=0)]
    return model, [*map(np.asarray, found), model.predict(x, batch_size=8, verbose=0)]


def one_device():
    return unisono.OneDeviceStrategy(devices(1)[0])


@pytest.fixture(scope="module")
def wanted():
    return trained(one_device())


@pytest.fixture(scope="module", params=LAYOUTS)
def of_layout(request):
    return request.param, *trained(grid(request.param))


def test_numbers_are_those_of_one_device(of_layout, wanted):
    _, model, found = of_layout
    assert_close(found, wanted[1])
    assert_close(values(model), values(wanted[0]))


def parts(variable):
    """The axis that a replica's devices share, and the shape on each; False for a whole variable."""
    held = stored_value(variable)
    is_divided = isinstance(held, Shards)
    array = held.parts if is_divided else held
    return is_divided and (held.layout.axis, {s.data.shape for s in array.addressable_shards})


def test_each_device_holds_a_part_of_its_part(of_layout):
    layout, model, _ = of_layout
    piece = math.ceil(INPUTS * WIDTH / 2 / 2)
    kernels = {"up/kernel": 1, "down/kernel": 0}
    by_path = {v.path: v for v in model.variables}
    for path, axis in kernels.items():
        if layout == "fully_sharded":
            assert parts(by_path[path]) == (axis, {(piece,)})
        else:
            assert grids.cut_axis(by_path[path]) == axis
    slots = {v.path.split("/")[-1]: v for v in model.optimizer.variables}
    for path, axis in kernels.items():
        assert parts(slots[f"{path.replace('/', '_')}_velocity"]) == (axis, {(piece,)})
    assert parts(slots["up_bias_momentum"]) == (0, {(math.ceil(WIDTH / 4),)})
    # What the devices of a replica do not share lies on each of them, in the replica's part.
    assert parts(slots["other_bias_momentum"]) == (None, {(math.ceil(INPUTS / 2),)})


def test_files_are_those_of_every_layout(of_layout, tmp_path):
    """Restored bit for bit on other grids and layouts, and back; all train on alike."""
    layout, model, _ = of_layout
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert all(map(np.array_equal, values(loaded), values(model)))
    path = Checkpoint(model=model).save(tmp_path / "checkpoint")
    others = [
        unisono.MirroredStrategy(devices(3), state_layout=layout),
        grid("mirrored", 1, 2),
        grid("fully_sharded", 2, 2),
    ]
    x, y = data(8)
    losses = []
    for strategy in others:
        again = compiled(strategy)
        again.optimizer.build(again.trainable_variables)
        Checkpoint(model=again).restore(path)
        assert all(map(np.array_equal, values(again), values(model)))
        losses.append(again.fit(x, y, batch_size=8, verbose=0).history["loss"])
    back = compiled(grid(layout))
    back.optimizer.build(back.trainable_variables)
    written = Checkpoint(model=again).save(tmp_path / "other")
    Checkpoint(model=back).restore(written)
    assert all(map(np.array_equal, values(back), values(again)))
    np.testing.assert_allclose(losses[1:], losses[:-1], **grids.CLOSE)


@pytest.mark.parametrize("layout", [pytest.param("sharded", marks=pytest.mark.exhaustive), "fully_sharded"])
def test_first_values_are_those_of_one_device(layout):
    plain, model = compiled(one_device()), compiled(grid(layout))
    for ours, theirs in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), err_msg=ours.path)


def test_a_first_value_is_whole_on_no_device(monkeypatch):
    """The initializer runs in a program of all devices of a replica, and each makes its part."""
    from unisono.model_parallel import _first_values
    from unisono.step._value_handle import DeferredValue

    made = []

    def noted(original):
        def make(self, *seed):
            value = original(self, *seed)
            made.append((self.shape, isinstance(value, jax.core.Tracer)))
            return value

        return make

    for kind, name in ((DeferredValue, "whole"), (_first_values.FirstValueProgram, "drawn")):
        monkeypatch.setattr(kind, name, noted(getattr(kind, name)))
    # Of other tests.
    _first_values._compiled.cache_clear()
    model = compiled(grid("fully_sharded"))
    assert model.get_layer("up").kernel.shape == (INPUTS, WIDTH)
    assert ((INPUTS, WIDTH), True) in made
    assert ((INPUTS, WIDTH), False) not in made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("automatic", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_custom_loop_of_uneven_batches(layout, automatic):
    found = []
    for strategy in (one_device(), grid(layout, layout_map=None if automatic else grids.UP_AND_DOWN)):
        model = compiled(strategy)
        x, y = data(20)

        def step(batch, model=model):
            x, y = batch
            with unisono.GradientTape() as tape:
                loss = unisono.nn.compute_average_loss(keras.ops.mean((model(x, training=True) - y) ** 2, -1))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        batches = strategy.distribute_dataset(
            [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)] + [(x[:5], y[:5])]
        )
        losses = [strategy.reduce("SUM", strategy.run(step, (b,)), axis=None) for b in batches]
        found.append([*map(np.asarray, losses), *values(model)])
    assert_close(found[1], found[0])
    if layout == "fully_sharded":
        assert parts(model.get_layer("up").kernel)[0] == 1
    slot = next(v for v in model.optimizer.variables if v.path.endswith("up_kernel_velocity"))
    assert parts(slot)[0] == 1


def in_messages(strategy, size, make=mlp):
    """The collectives of a step as pairs of kind and bytes: within a replica, and of replicas."""
    model = compiled(strategy, make=make, optimizer=lambda: K.Adam(0.01))
    found = messages_of(lowered_step(model, *data(8)).compile().as_text(), size)
    return [[m for m in found if m.is_inside is inside] for inside in (True, False)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_exchange_what_they_do_with_one_device_each(layout):
    """As many messages, and no byte more; within a replica no gather, and the sums of two products."""
    inside, between = in_messages(grid(layout), 2)
    _, plain = in_messages(unisono.MirroredStrategy(devices(2), state_layout=layout), 1)
    assert {m.kind for m in inside} == {"all-reduce"}
    # The result forward; backward the input needs no gradient.
    assert len(inside) == 1
    counts = [
        {kind: sum(m.kind == kind for m in ms) for kind in {m.kind for m in ms}} for ms in (between, plain)
    ]
    assert counts[0] == counts[1]
    assert sum(m.nbytes for m in between) < 0.75 * sum(m.nbytes for m in plain)


def wide_transformer(width=512):
    tokens = keras.Input((grids.LENGTH,), dtype="int32")
    h = L.Embedding(grids.WORDS, width)(tokens)
    n = L.LayerNormalization()(h)
    h = h + L.MultiHeadAttention(8, width // 8, name="attention")(n, n, use_causal_mask=True)
    n = L.Dense(4 * width, activation="gelu", name="layer_up")(L.LayerNormalization()(h))
    h = h + L.Dense(width, name="layer_down")(n)
    return keras.Model(tokens, L.Dense(grids.WORDS)(h))


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("mirrored", "sharded")), "fully_sharded"],
)
def test_memory_of_a_device_is_its_part(layout):
    """XLA's plan for a step of Adam is this sum, within a tenth, for weights of w bytes on a device.

    Of n replicas of m devices each; w counts 1/m of a weight that is cut, and the whole of another one:

    - "mirrored": weights w, slots 2w, gradients w, and on CPUs the message w in which gradients travel;
    - "sharded": weights w, slots 2w/n, gradients w, and the replica's reduced part of them, w/n;
    - "fully_sharded": weights w/n, slots 2w/n, gradients w/n, and of the layer that computes the weight and
      its gradient, 1/m of each.

    Activations come on top: less than 20 arrays of the model's width for each token here.
    """
    replicas, size, width, rows = 2, 2, 512, 4
    strategy = grids.grid(replicas, size, state_layout=layout)
    model = grids.compiled(strategy, lambda: wide_transformer(width), lambda: K.Adam(0.01))
    program = lowered_step(model, *grids.data(rows)).compile()
    cut = [v.path for v in model.weights if strategy.state_layout.of(v).axis is not None]
    assert len(cut) == 10
    w = 4 * sum(math.prod(v.shape) / (size if v.path in cut else 1) for v in model.weights)
    layer = 4 * 4 * width**2
    sums = {
        "mirrored": 5 * w,
        "sharded": 2 * w + 3 * w / replicas,
        "fully_sharded": 4 * w / replicas + 2 * layer / size,
    }
    activations = rows / replicas * grids.LENGTH * 20 * width * 4
    memory = program.memory_analysis()
    planned = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert planned == pytest.approx(sums[layout] + activations, rel=0.1)
    inside = [m for m in messages_of(program.as_text(), size) if m.is_inside]
    # As in Megatron: two sums in the forward pass, two in the backward pass, and no gather.
    assert {m.kind for m in inside} == {"all-reduce"}
    assert len(inside) <= 4


def test_an_optimizer_of_whole_weights_keeps_them_as_they_are_cut(caplog):
    def lamb():
        return K.Lamb(0.01)

    with caplog.at_level(logging.WARNING, "unisono"):
        model, found = trained(grid("fully_sharded"), rows=8, optimizer=lamb)
    assert "state whole" in caplog.text
    plain, wanted = trained(one_device(), rows=8, optimizer=lamb)
    assert_close(found, wanted)
    assert_close(values(model), values(plain))
    assert grids.cut_axis(model.get_layer("up").kernel) == 1
    slots = [v for v in model.optimizer.variables if "up_kernel" in v.path]
    assert [grids.cut_axis(v) for v in slots] == [1, 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: K.SGD(0.1, 0.9, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
        lambda: K.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.1),
        lambda: K.LossScaleOptimizer(K.Adam(0.01, amsgrad=True, global_clipnorm=0.2), 8.0),
    ],
    ids=["ema", "accumulation", "loss scale"],
)
def test_optimizers(layout, make):
    model, found = trained(grid(layout), optimizer=make)
    plain, wanted = trained(one_device(), optimizer=make)
    assert_close(found, wanted)
    assert_close(values(model), values(plain))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("automatic", [False, True])
def test_a_transformer(layout, automatic):
    layout_map = None if automatic else grids.MEGATRON
    model, found = grids.trained(grids.grid(4, 2, layout_map, state_layout=layout))
    plain, wanted = grids.trained(one_device())
    assert_close(found, wanted)
    assert_close(values(model), values(plain))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_precision_and_parts_that_are_not_trained(layout):
    """Half-precision weights are gathered; a frozen layer and low-rank updates of another one."""
    found = []
    for strategy in (unisono.MirroredStrategy(devices(2)), grid(layout)):
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            model = compiled(strategy)
        finally:
            keras.config.set_dtype_policy("float32")
        x, y = data(16)
        losses = model.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"]
        model.get_layer("other").trainable = False
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model.get_layer("up").enable_lora(4)
            model.compile(K.Adam(0.01), "mse")
        losses += model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
        found.append((losses, values(model)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=0.02)
    for ours, theirs in zip(found[1][1], found[0][1], strict=True):
        # Of bfloat16, whose sums are made in another order.
        np.testing.assert_allclose(ours, theirs, rtol=0.05, atol=0.02)
    if layout == "fully_sharded":
        assert parts(model.get_layer("up")._kernel)[0] == 1


@pytest.mark.parametrize("layout", [pytest.param("sharded", marks=pytest.mark.exhaustive), "fully_sharded"])
def test_a_run_that_was_stopped_is_resumed_bit_for_bit(layout, tmp_path):
    x, y = data(16)

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise InterruptedError

    def fit(*callbacks):
        model = compiled(grid(layout))
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[*callbacks])
        return model

    whole = fit()
    with pytest.raises(InterruptedError):
        fit(BackupAndRestore(tmp_path), Stop())
    resumed = fit(BackupAndRestore(tmp_path))
    assert all(map(np.array_equal, values(resumed), values(whole)))


def test_one_replica_has_no_other_to_share_its_state_with():
    assert type(grid("fully_sharded", 1, 2).state_layout) is type(grid("mirrored", 1, 2).state_layout)
