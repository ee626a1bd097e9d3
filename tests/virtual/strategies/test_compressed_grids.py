"""`CompressedAllReduce` with replicas of several devices: a device sends of its own part in fewer bytes."""

import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from tests.virtual.strategies.test_compressed_gradients import OPS, TOLERANCES, errors, received
from tests.virtual.training._digits import crossentropy, digits
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint
from unisono.compression._compressed_layout import is_of_compression
from unisono.step._call_signature import Call
from unisono.step._keras_internals import stored_value

pytestmark = pytest.mark.numbers

K = keras.optimizers
CUT = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}
CUT |= {"columns": (None, "model"), "rows": ("model", None)}


def grid(ops, replicas=2, size=2, layout="mirrored", layout_map=CUT):
    given = {"devices_per_replica": size, "layout_map": layout_map} if size > 1 else {}
    return unisono.MirroredStrategy(devices(replicas * size), ops, state_layout=layout, **given)


def compiled(strategy, optimizer=None):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [keras.layers.Dense(64, activation="relu", name="up"), keras.layers.Dense(10, name="down")]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile(optimizer or K.Adam(0.005), crossentropy(), metrics=["accuracy"])
    return model


def fitted(model, epochs=1, rows=1536, batch_size=64):
    x, y = digits()
    options = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(x[:rows], y[:rows], **options).history


def parts(variable):
    held = stored_value(variable)
    array = getattr(held, "parts", held)
    return {s.data.size for s in array.addressable_shards}


@pytest.fixture(scope="module")
def exact():
    return fitted(compiled(grid(None)), 10)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("int8", "mirrored"),
        *(
            pytest.param(kind, layout, marks=pytest.mark.exhaustive)
            for kind in OPS
            for layout in ("mirrored", "sharded", "fully_sharded")
            if (kind, layout) != ("int8", "mirrored")
        ),
    ],
)
def test_each_kind_learns_digits(kind, layout, exact):
    """Within the tolerance of replicas of one device, and with errors in parts as their weights."""
    model = compiled(grid(OPS[kind](), layout=layout))
    history = fitted(model, 10)
    assert history["loss"][-1] == pytest.approx(exact["loss"][-1], rel=TOLERANCES[kind])
    assert history["accuracy"][-1] > exact["accuracy"][-1] - 0.02
    held = [parts(v) for v in model.optimizer.variables if v.name.endswith("error")]
    assert held == [{64 * 32}, {32 * 10}]


SHAPES = {"columns": (40, 30), "rows": (24, 50), "whole": (301,), "bias": ()}


def leaves_nothing_out(strategy):
    """Check that what several steps applied, and the errors, are all gradients; return the weights.

    Of plain descent with rate 1.
    """
    kind, replicas = strategy.cross_device_ops.compression.kind, strategy.num_replicas_in_sync
    with strategy.scope():
        weights = [keras.Variable("zeros", s, name=name) for name, s in SHAPES.items()]
        optimizer = K.SGD(1.0, momentum=0.0)
    generator = np.random.default_rng(0)
    steps = [[generator.normal(size=(replicas, *s)).astype("f4") for s in SHAPES.values()] for _ in range(4)]

    def step(*grads):
        optimizer.apply(list(grads), weights)

    for grads in steps:
        given = [
            strategy.distribute_values_from_function(lambda c, g=g: g[c.replica_id_in_sync_group])
            for g in grads
        ]
        strategy.run(step, given)
    left = errors(optimizer)
    assert len(left) == (2 if kind == "power_sgd" else 3)
    for i, weight in enumerate(weights):
        total = sum(grads[i].sum(axis=0, dtype="f8") for grads in steps)
        error = left[i] if i < len(left) else np.zeros(weight.shape)
        assert error.any() == (i < len(left))
        np.testing.assert_allclose(-np.asarray(weight) + error, total, rtol=0, atol=2e-5)
    (error, *_) = (v for v in optimizer.variables if is_of_compression(v))
    assert parts(error) == {40 * 30 // 2}
    return weights


@pytest.mark.parametrize("layout", ["mirrored", "sharded", "fully_sharded"])
@pytest.mark.parametrize(
    "kind", [k if k == "top_k" else pytest.param(k, marks=pytest.mark.exhaustive) for k in OPS]
)
def test_what_was_applied_and_the_errors_are_all_gradients(kind, layout):
    """And what each device has whole stays equal on all."""
    weights = leaves_nothing_out(grid(OPS[kind](), 3 if kind == "int8" else 2, 2, layout))
    copies = [np.asarray(s.data) for s in stored_value(weights[2]).addressable_shards]
    for copy in copies[1:]:
        np.testing.assert_array_equal(copy, copies[0])


#: What a device receives of its half of 40 times 30 and 24 times 50 numbers; int8 sends scales, too.
SENT = {"bfloat16": {"u16": 2 * 1200}, "int8": {"u8": 2 * 3 * (256 + 4)}, "top_k": {"s32": 8 * 120}}


@pytest.mark.parametrize("kind", [pytest.param("bfloat16", marks=pytest.mark.exhaustive), "int8"])
def test_a_device_sends_its_part_in_fewer_bytes(kind):
    strategy = grid(OPS[kind]())
    with strategy.scope():
        names = list(SHAPES)[:2]
        weights = [keras.Variable("zeros", SHAPES[name], name=name) for name in names]
        optimizer = K.Adam(0.1)
        optimizer.build(weights)

    def step(x):
        optimizer.apply([w + x for w in weights], weights)

    scale = strategy.distribute_values_from_function(lambda _: np.float32(1))
    strategy.run(step, (scale,))
    call = Call.parse((scale,), {})
    entry = strategy._compiler.entry(step, call)
    assert received(entry.step.lower(*entry.arguments(call)).compile().as_text()) == SENT[kind]


def test_errors_go_to_other_numbers_of_replicas_and_devices(tmp_path):
    """By a map and by the program, where nothing is known of the axes when the errors are made."""
    model = compiled(grid(OPS["top_k"](), layout_map="auto"))
    fitted(model, rows=192)
    wanted = errors(model.optimizer)
    assert max(np.abs(e).max() for e in wanted) > 1e-3
    for replicas, size, layout in (
        (3, 1, "mirrored"),
        (2, 2, "fully_sharded"),
        (1, 2, "mirrored"),
        (2, 2, "sharded"),
    ):
        path = Checkpoint(model=model).write(str(tmp_path / f"to-{replicas}"))
        strategy = grid(OPS["top_k"](), replicas, size, layout)
        model = compiled(strategy)
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        Checkpoint(model=model).restore(path)
        for found, before in zip(errors(model.optimizer), wanted, strict=True):
            np.testing.assert_allclose(found, before, rtol=0, atol=1e-7)
    fitted(model, rows=64)
    assert any(is_of_compression(v) for v in model.optimizer.variables)


@pytest.mark.parametrize("layout", [pytest.param("sharded", marks=pytest.mark.exhaustive), "fully_sharded"])
def test_a_run_that_resumes_has_the_same_bits(tmp_path, layout):
    """Within an epoch, with the errors of what was not sent; in parts of parts, as before."""

    def trained(*callbacks):
        model = compiled(grid(OPS["int8"](), layout=layout))
        x, y = digits()
        given = {"batch_size": 24, "epochs": 2, "shuffle": False, "verbose": 0}
        losses = model.fit(x[:108], y[:108], callbacks=[*callbacks], **given).history["loss"]
        held = [parts(v) for v in (*model.trainable_variables, *model.optimizer.variables)]
        return losses, [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)], held

    def stop(batch, logs=None):
        if batch == 2:
            raise InterruptedError

    wanted = trained()
    backup = lambda: BackupAndRestore(tmp_path, save_freq=2)  # noqa: E731
    with pytest.raises(InterruptedError):
        trained(backup(), keras.callbacks.LambdaCallback(on_train_batch_end=stop))
    losses, values, held = trained(backup())
    assert losses == wanted[0]
    for ours, theirs in zip(values, wanted[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert held == wanted[2]
