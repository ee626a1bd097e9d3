"""Training with gradients that are sent in fewer bytes: what is not sent is kept, and nothing is lost."""

import re

import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from tests.virtual.training._digits import crossentropy, digits
from unisono import CompressedAllReduce
from unisono.checkpoint import Checkpoint
from unisono.compression._compressed_layout import is_of_compression
from unisono.sharding._shards import Shards
from unisono.step._call_signature import Call
from unisono.step._keras_internals import stored_value

pytestmark = pytest.mark.numbers

OPS = {
    "bfloat16": lambda: CompressedAllReduce(exact_below=1024),
    "float16": lambda: CompressedAllReduce("float16", exact_below=1024),
    "int8": lambda: CompressedAllReduce("int8", exact_below=1024),
    "power_sgd": lambda: CompressedAllReduce("power_sgd", rank=2, exact_below=1024),
    "top_k": lambda: CompressedAllReduce("top_k", k=0.1, exact_below=1024),
}
K = keras.optimizers
LAYOUTS = ["mirrored", "sharded", pytest.param("fully_sharded", marks=pytest.mark.exhaustive)]


def strategy_with(ops, replicas=2, state_layout="mirrored"):
    return unisono.MirroredStrategy(devices(replicas), ops, state_layout=state_layout)


def compiled(strategy, optimizer=None, width=64):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(width, activation="relu"), keras.layers.Dense(10)]
        )
        model.compile(optimizer or K.Adam(0.005), crossentropy(), metrics=["accuracy"])
    return model


def fitted(model, epochs=1, rows=1536, batch_size=64):
    x, y = digits()
    return model.fit(
        x[:rows], y[:rows], batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0
    ).history


def errors(optimizer):
    """The sum over the replicas of what was not sent, for each weight that is compressed."""
    found = [v for v in optimizer.variables if is_of_compression(v) and v.name.endswith("error")]
    return [np.asarray(v).sum(axis=0, dtype="f8") for v in found]


# --- fit --------------------------------------------------------------------------------------------


#: How far the loss of the tenth epoch may be from that of the exact run, relative to it. Of rank 2, or a part
#: of the numbers, errors take some steps until they are sent.
TOLERANCES = {"bfloat16": 0.01, "float16": 0.002, "int8": 0.02, "power_sgd": 0.7, "top_k": 0.4}


@pytest.fixture(scope="module")
def exact():
    return fitted(compiled(strategy_with(None)), 10)


@pytest.mark.parametrize("kind", OPS)
def test_each_kind_learns_digits(kind, exact):
    """Within a relative tolerance of the exact run, in both layouts."""
    found = []
    for layout in ("mirrored", "sharded"):
        model = compiled(strategy_with(OPS[kind](), 2, layout))
        history = fitted(model, 10)
        assert history["loss"][-1] == pytest.approx(exact["loss"][-1], rel=TOLERANCES[kind])
        assert history["accuracy"][-1] > exact["accuracy"][-1] - 0.02
        found.append(history["loss"])
        # Both kernels are compressed, of which each device holds the row of its replica.
        held = [stored_value(v) for v in model.optimizer.variables if "error" in v.name]
        assert len(held) == 2
        assert all(isinstance(h, Shards) for h in held)
        slots = [v for v in model.optimizer.variables if not is_of_compression(v)]
        assert any(isinstance(stored_value(v), Shards) for v in slots) == (layout == "sharded")
    np.testing.assert_allclose(*found, rtol=1e-3)


@pytest.mark.parametrize("rows", [27, 37])
def test_the_last_batch_may_be_of_any_size(rows):
    """One batch is filled up; five rows run whole on every replica, where nothing is sent."""
    model = compiled(strategy_with(OPS["int8"]()))
    loss = fitted(model, 1, rows, 16 if rows == 37 else 9)["loss"]
    other = fitted(compiled(strategy_with(None)), 1, rows, 16 if rows == 37 else 9)["loss"]
    np.testing.assert_allclose(loss, other, rtol=1e-3)


def test_small_gradients_losses_and_metrics_are_exact():
    strategy = strategy_with(CompressedAllReduce("int8"))
    model = compiled(strategy, width=16)
    history = fitted(model)
    assert not errors(model.optimizer)
    assert history == fitted(compiled(strategy_with(None), width=16))

    def step(x):
        return unisono.get_replica_context().all_reduce("sum", x)

    values = np.linspace(0, 1, 6000, dtype="f4").reshape(2, 3000)
    given = strategy.distribute_values_from_function(lambda c: values[c.replica_id_in_sync_group])
    np.testing.assert_array_equal(strategy.run(step, (given,)).values[1], values.sum(0))


def test_a_strategy_of_workers_takes_no_other_algorithm():
    with pytest.raises(unisono.InvalidTypeError, match=r"must be a `CompressedAllReduce`. Received: cross"):
        unisono.MultiWorkerMirroredStrategy(cross_device_ops=unisono.RingAllReduce())


# --- custom loops -----------------------------------------------------------------------------------


SHAPES = ((40, 30), (3, 3, 8, 7), (301,), ())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", OPS)
def test_what_was_applied_and_the_errors_are_all_gradients(kind, layout):
    """Of plain descent with rate 1, after several steps on three replicas."""
    strategy = strategy_with(OPS[kind](), 3, layout)
    with strategy.scope():
        weights = [keras.Variable(np.zeros(s, "f4"), name=f"w{i}") for i, s in enumerate(SHAPES)]
        optimizer = K.SGD(1.0, momentum=0.0)
    generator = np.random.default_rng(0)
    steps = [[generator.normal(size=(3, *s)).astype("f4") for s in SHAPES] for _ in range(4)]

    def step(*grads):
        # Others may follow one another in any order.
        optimizer.apply(list(grads)[::-1], weights[::-1])

    for grads in steps:
        given = [
            strategy.distribute_values_from_function(lambda c, g=g: g[c.replica_id_in_sync_group])
            for g in grads
        ]
        strategy.run(step, given)
    left = errors(optimizer)[::-1]
    assert len(left) == (2 if kind == "power_sgd" else 3)
    for i, weight in enumerate(weights):
        total = sum(grads[i].sum(axis=0, dtype="f8") for grads in steps)
        error = left[i] if i < len(left) else np.zeros(SHAPES[i])
        assert error.any() == (i < len(left))
        np.testing.assert_allclose(-np.asarray(weight) + error, total, rtol=0, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_with_an_infinity_leaves_nothing_behind(layout):
    """On the last replica, in a gradient that is sent exactly; the loss scale is halved."""
    strategy = strategy_with(OPS["int8"](), 3, layout)
    with strategy.scope():
        weights = [keras.Variable(np.zeros(s, "f4"), name=f"w{i}") for i, s in enumerate(((40, 30), (5,)))]
        optimizer = K.LossScaleOptimizer(K.SGD(1.0, momentum=0.0), initial_scale=8.0)
        optimizer.build(weights)

    def step(grad, small):
        optimizer.apply([grad * optimizer.dynamic_scale, small * optimizer.dynamic_scale], weights)

    grads = np.random.default_rng(0).normal(size=(3, 3, 40, 30)).astype("f4")
    small = np.zeros((3, 3, 5), "f4")
    small[1, 2, 0] = np.inf
    seen = []
    for each, bias in zip(grads, small, strict=True):
        given = [
            strategy.distribute_values_from_function(lambda c, g=g: g[c.replica_id_in_sync_group])
            for g in (each, bias)
        ]
        strategy.run(step, given)
        seen.append(errors(optimizer)[0])
    np.testing.assert_array_equal(seen[0], seen[1])
    assert np.abs(seen[2] - seen[1]).max() > 0
    assert float(optimizer.dynamic_scale.numpy()) == 4.0
    total = grads[[0, 2]].sum(axis=(0, 1), dtype="f8")
    np.testing.assert_allclose(-np.asarray(weights[0]) + seen[2], total, rtol=0, atol=2e-5)


def test_replicas_of_unequal_sizes_send_nothing():
    """They run in one program, which sums their gradients exactly."""
    found = []
    for ops in (OPS["int8"](), None):
        strategy = strategy_with(ops)
        with strategy.scope():
            weight = keras.Variable(np.ones((40, 30), "f4"))
            optimizer = K.SGD(0.1)

        def step(x, weight=weight, optimizer=optimizer):
            optimizer.apply([weight * keras.ops.sum(x)], [weight])

        for batch in strategy.distribute_dataset([np.arange(n, dtype="float32") / 9 for n in (3, 4, 3)]):
            strategy.run(step, (batch,))
        found.append(np.asarray(weight))
    np.testing.assert_allclose(*found, rtol=1e-2)


# --- checkpoints ------------------------------------------------------------------------------------


def state_of(model):
    return [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


@pytest.mark.parametrize("kind", ["int8", "power_sgd"])
def test_a_checkpoint_holds_errors(kind, tmp_path):
    """Training goes on with the same bits; a file of Keras holds what every strategy has."""
    model = compiled(strategy_with(OPS[kind]()))
    fitted(model)
    path = Checkpoint(model=model).write(str(tmp_path / "c"))
    model.save(tmp_path / "m.keras")
    other = compiled(strategy_with(OPS[kind]()))
    Checkpoint(model=other).restore(path)
    for each in (model, other):
        fitted(each)
    for ours, theirs in zip(state_of(other), state_of(model), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    plain = keras.saving.load_model(tmp_path / "m.keras")
    assert len(plain.optimizer.variables) == 2 + 2 * 4
    with strategy_with(OPS[kind]()).scope():
        again = keras.saving.load_model(tmp_path / "m.keras")
    assert len(errors(again.optimizer)) == 2
    slots = [v for v in again.optimizer.variables if not is_of_compression(v)]
    for ours, theirs in zip(slots, plain.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_other_numbers_of_replicas_keep_the_sum_of_the_errors(tmp_path):
    """From 3 to 2 to 1 to 2; one replica adds it to its next gradients."""
    model = compiled(strategy_with(OPS["top_k"](), 3))
    fitted(model, rows=192)
    wanted = errors(model.optimizer)
    assert max(np.abs(e).max() for e in wanted) > 1e-3
    for replicas in (2, 1, 2):
        path = Checkpoint(model=model).write(str(tmp_path / f"to-{replicas}"))
        model = compiled(strategy_with(OPS["top_k"](), replicas))
        Checkpoint(model=model).restore(path)
        for found, before in zip(errors(model.optimizer), wanted, strict=True):
            np.testing.assert_allclose(found, before, rtol=0, atol=1e-7)
        if replicas == 1:
            alone = compiled(strategy_with(OPS["top_k"](), 1))
            Checkpoint(model=alone).restore(path)
            fitted(alone, rows=64)
            assert not any(e.any() for e in errors(alone.optimizer))


@pytest.mark.parametrize("kind", ["int8", "power_sgd"])
def test_what_is_added_may_have_the_shape_of_a_weight_by_chance(kind, tmp_path):
    """On two replicas errors of a bias have that of the first kernel, and a basis that of the last one."""

    def model_on(replicas):
        ops = CompressedAllReduce(kind, exact_below=1, **{"rank": 2} if kind == "power_sgd" else {})
        with strategy_with(ops, replicas, "sharded").scope():
            layers = [keras.layers.Dense(n) for n in (12, 16, 2)]
            model = keras.Sequential([keras.Input((2,)), *layers])
            model.compile("adam", "mse")
        return model

    rows = np.random.default_rng(0).standard_normal((64, 2)).astype("f4")
    model = model_on(2)
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    model.fit(rows, rows, batch_size=16, verbose=0)
    added = [v for v in model.optimizer.variables if is_of_compression(v)]
    assert any(tuple(v.shape) in shapes for v in added)
    wanted = errors(model.optimizer)
    for replicas in (3, 2):
        path = Checkpoint(model=model).write(str(tmp_path / f"to-{replicas}"))
        model = model_on(replicas)
        # How variables lie is known from the first step on.
        model.fit(rows, rows, batch_size=16, verbose=0)
        Checkpoint(model=model).restore(path)
        for found, before in zip(errors(model.optimizer), wanted, strict=True):
            np.testing.assert_allclose(found, before, rtol=0, atol=1e-7)


def test_one_replica_applies_what_others_have_not_sent():
    strategy = strategy_with(OPS["top_k"](), 1)
    with strategy.scope():
        weight = keras.Variable(np.zeros((40, 30), "f4"))
        optimizer = K.SGD(1.0)
        optimizer.build([weight])
    (error,) = (v for v in optimizer.variables if is_of_compression(v))
    error.assign(np.full((1, 40, 30), 3.0))
    for _ in range(2):
        strategy.run(lambda: optimizer.apply([weight * 0 + 1.0], [weight]))
    np.testing.assert_array_equal(weight, np.full((40, 30), -5.0))


# --- what is sent -----------------------------------------------------------------------------------


def received(text):
    """The bytes that a replica of two receives in a program, by the type of their numbers."""
    found = {}
    for result, name in re.findall(r"= (.*) (all-gather|all-to-all|all-reduce|collective-permute)\(", text):
        # XLA joins sums: their result is a tuple.
        for letter, bits, dims in re.findall(r"([a-z]+)(\d+)\[([\d,]*)\]", result):
            size = np.prod([int(d) for d in dims.split(",") if d], initial=1) * int(bits) // 8
            key = letter + bits
            found[key] = found.get(key, 0) + int(size if name != "all-gather" else size // 2)
    return found


#: The bytes of 40 times 30 and 3 times 3 times 8 times 7 numbers; int8 sends two rows of four blocks.
SENT = {
    "bfloat16": {"u16": 2 * 1704},
    "int8": {"u8": 2 * 4 * (256 + 4)},
    "top_k": {"s32": 8 * 170},
    "power_sgd": {"f32": 4 * 2 * (40 + 30 + 72 + 7)},
}


@pytest.mark.parametrize("kind", SENT)
def test_a_step_sends_fewer_bytes(kind):
    """Everything that is compressed travels together, and what is exact with nothing else."""
    strategy = strategy_with(OPS[kind]())
    with strategy.scope():
        shapes = [*SHAPES[:2], (7,)]
        weights = [keras.Variable(np.zeros(s, "f4")) for s in shapes]
        optimizer = K.Adam(0.1)

    def step(x):
        optimizer.apply([w + x for w in weights], weights)

    scale = strategy.distribute_values_from_function(lambda _: np.float32(1))
    strategy.run(step, (scale,))
    call = Call.parse((scale,), {})
    entry = strategy._compiler.entry(step, call)
    found = received(entry.step.lower(*entry.arguments(call)).compile().as_text())
    # The seven numbers of the third weight.
    assert found.pop("f32") == 4 * 7 + SENT[kind].get("f32", 0)
    assert found == {name: nbytes for name, nbytes in SENT[kind].items() if name != "f32"}
