"""`LocalUpdates` with replicas of several devices: the numbers of replicas of one device, in parts."""

import math
import signal

import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint
from unisono.local_updates._local_phase import TRAINABLE
from unisono.local_updates._local_training import LocalState
from unisono.model_parallel._program_messages import messages_of
from unisono.step._keras_internals import stored_value
from unisono.training.trainer._lowered_step import lowered_step
from unisono.training.trainer._protocol import plain_function_of

pytestmark = pytest.mark.numbers

L = keras.layers
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
CUT = {".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)}
CUT |= {".*norm/(gamma|beta|moving_.*)": ("model",)}


def outer():
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


def local(replicas, size, has_outer=True, every=2, layout_map=CUT, **options):
    options = {"sync": unisono.LocalUpdates(every, outer if has_outer else None, **options)}
    if size > 1:
        options |= {"devices_per_replica": size, "layout_map": layout_map}
    return unisono.MirroredStrategy(devices(replicas * size), **options)


def compiled(strategy, wide=16, optimizer=lambda: keras.optimizers.Adam(0.01)):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [L.Dense(wide, name="up"), L.ReLU(), L.BatchNormalization(name="norm")]
        model = keras.Sequential([keras.Input((6,)), *layers, L.Dropout(0.2), L.Dense(3, name="down")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
    return model


def data(rows):
    return np.random.default_rng(0).normal(size=(rows, 6)).astype("float32"), np.arange(rows) % 3


def trained(strategy, steps=5, model=None, **options):
    """Five steps: two phases, and one that the end of the epoch ends."""
    model = model or compiled(strategy, **options)
    x, y = data(8 * steps)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    found = [*map(np.asarray, history["loss"] + history["accuracy"]), model.predict(x, verbose=0)]
    return model, found


def values(model):
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


def assert_close(found, wanted, **close):
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, **(CLOSE | close))


def part_of(variable):
    return stored_value(variable).addressable_shards[0].data.shape


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"every": 3, "fragments": 2, "overlap": 1},
        pytest.param({"has_outer": False}, marks=pytest.mark.exhaustive),
        pytest.param({"fragments": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"overlap": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_numbers_are_those_of_replicas_of_one_device(options):
    wanted_model, wanted = trained(local(2, 1, **options))
    model, found = trained(local(2, 2, **options))
    assert_close([*found, *values(model)], [*wanted, *values(wanted_model)])
    assert part_of(model.get_layer("up").kernel) == (6, 8)
    parts = {v.path.split("/")[-1]: part_of(v) for v in model.optimizer.variables}
    # A row of each replica, in parts on its devices.
    assert next(shape for name, shape in parts.items() if "up_kernel_momentum" in name) == (1, 6, 8)
    if options.get("has_outer", True):
        assert (6, 8) in [shape for name, shape in parts.items() if name.startswith("outer_")]


def test_an_exchange_sends_parts():
    """Replicas sum parts, and no weight is put together for that."""
    strategy = local(2, 2)
    model = compiled(strategy, wide=64)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    slot = next(v for v in model.optimizer.variables if "up_kernel_momentum" in v.path)
    # From its beginning.
    assert part_of(slot) == (1, 6, 32)
    messages = messages_of(lowered_step(model, *data(8)).compile().as_text(), 2)
    assert {m.kind for m in messages} == {"all-reduce"}
    whole = 4 * sum(math.prod(v.shape) for v in model.trainable_variables)
    assert max(m.nbytes for m in messages if not m.is_inside) < 0.6 * whole


def test_what_is_kept_beside_an_exchange_lies_in_parts():
    model, seen = compiled(local(2, 2, every=4, overlap=2)), set()

    def see(batch, logs=None):
        for sent in plain_function_of(model.train_function)._beside._running:
            seen.add((sent.rows[0].addressable_shards[0].data.shape, tuple(x.shape for x in sent.sums)))

    x, y = data(40)
    look = keras.callbacks.LambdaCallback(on_train_batch_end=see)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[look])
    ((row, sums),) = seen
    assert row == (1, 6, 8)
    kept = [v for v in model.variables if v.dtype == "float32"]
    own = sum(math.prod(v.shape) // (2 if any(stored_value(v).sharding.spec) else 1) for v in kept)
    # On each of a replica's devices the packed floats; metrics are more.
    assert sums[0] == sums[len(sums) // 2]
    assert own <= sums[0][0] < own + 10


@pytest.mark.exhaustive
def test_axes_that_the_program_decides():
    # Adam would enlarge the roundings of so many weights.
    options = {"steps": 3, "wide": 1024, "optimizer": lambda: keras.optimizers.SGD(0.001, momentum=0.9)}
    wanted_model, wanted = trained(local(2, 1), **options)
    model, found = trained(local(2, 2, layout_map="auto"), **options)
    assert_close([*found, *values(model)], [*wanted, *values(wanted_model)])
    assert part_of(model.get_layer("up").kernel) == (6, 512)
    parts = [part_of(v) for v in model.optimizer.variables]
    # A slot of the inner optimizer, and one of the outer.
    assert parts.count((1, 6, 512)) == 1
    assert parts.count((6, 512)) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", [(1, 2), (2, 1), (4, 2)])
def test_a_checkpoint_goes_to_another_number_of_replicas_and_devices(tmp_path, other):
    model, _ = trained(local(2, 2))
    path = Checkpoint(model=model).write(tmp_path / "checkpoint")
    strategy = local(*other)
    again = compiled(strategy)
    with strategy.scope():
        again.optimizer.build(again.trainable_variables)
    Checkpoint(model=again).restore(path)
    for ours, theirs in zip(again.variables, model.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    names = [
        [v.path.split("/")[-1] for v in m.optimizer.variables if "outer" in v.path] for m in (model, again)
    ]
    assert names[0] == names[1]
    trained(None, model=again)


def test_weights_that_a_callback_reads_in_a_phase_do_not_end_it():
    found = []
    for reads in (False, True):
        model = compiled(local(2, 2))
        read = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, m=model: m.jax_state_sync()
        )
        x, y = data(40)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[read] * reads)
        found.append(values(model))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Ends(keras.callbacks.Callback):
    """Ends a run by a notice of preemption; never after 0 steps."""

    def __init__(self, after):
        super().__init__()
        self._after, self.batches = after, 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if self.model.optimizer.iterations == self._after:
            signal.raise_signal(signal.SIGTERM)

    def get_state(self):
        return {}

    def set_state(self, state):
        """When it ends is an argument."""


def fitted_in_phases(folder, ends, replicas, size, *, saves=True, every=5, steps=8, **options):
    """Phases end after 5 and 8 of the 8 steps of an epoch; the last batch does not divide."""
    given = {name: options.pop(name) for name in ("wide", "optimizer") if name in options}
    model = compiled(local(replicas, size, every=every, **options), **given)
    backup = [BackupAndRestore(folder, save_before_preemption=True)] if saves else []
    x, y = data(8 * steps - 5)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[*backup, ends])
    return model, [history.history["loss"][-1], *values(model)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"fragments": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"layout_map": "auto"}, marks=pytest.mark.exhaustive),
        # Saved while a fragment is sent.
        pytest.param({"overlap": 3}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_resumes_within_a_phase_has_the_same_bits(tmp_path, options):
    """The rows of replicas, in parts, and the steps since the last exchange are in the backup."""
    with pytest.raises(SystemExit):
        fitted_in_phases(tmp_path, Ends(15), 2, 2, **options)
    resumed = Ends(0)
    _, found = fitted_in_phases(tmp_path, resumed, 2, 2, **options)
    _, wanted = fitted_in_phases(tmp_path, Ends(0), 2, 2, saves=False, **options)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert resumed.batches == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(2, 1, marks=pytest.mark.exhaustive),
        (1, 2),
        pytest.param(2, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_a_phase_goes_on_with_as_many_replicas_of_other_devices(tmp_path, before, after):
    """Also what is being sent: its sums, and the rows as they were."""
    options = {"fragments": 2, "overlap": 2}
    with pytest.raises(SystemExit):
        # A fragment is sent after two steps of the phase, and the other one after five.
        fitted_in_phases(tmp_path, Ends(6), 2, before, **options)
    resumed = Ends(0)
    model, found = fitted_in_phases(tmp_path, resumed, 2, after, **options)
    _, wanted = fitted_in_phases(tmp_path, Ends(0), 2, after, saves=False, **options)
    assert_close(found, wanted)
    assert resumed.batches == 10
    assert part_of(model.get_layer("up").kernel) == (6, 16 // after)


@pytest.mark.exhaustive
def test_a_phase_goes_on_in_parts_that_its_first_batch_decides(tmp_path, monkeypatch):
    """Rows are read before it is known how weights are cut: no device has them whole even then."""
    seen, resume = [], LocalState.resume

    def noted(self, phase):
        resume(self, phase)
        seen.append(
            [x.addressable_shards[0].data.shape for pair in self.held.values[TRAINABLE] for x in pair]
        )

    monkeypatch.setattr(LocalState, "resume", noted)
    options = {"wide": 1024, "optimizer": lambda: keras.optimizers.SGD(0.001, momentum=0.9), "overlap": 2}
    options |= {"layout_map": "auto", "steps": 4}
    with pytest.raises(SystemExit):
        fitted_in_phases(tmp_path, Ends(6), 2, 2, every=3, **options)
    model, found = fitted_in_phases(tmp_path, Ends(0), 2, 2, every=3, **options)
    _, wanted = fitted_in_phases(tmp_path, Ends(0), 2, 2, every=3, saves=False, **options)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    (shapes,) = seen
    assert shapes[:2] == [(6, 512), (1, 6, 512)]
    assert part_of(model.get_layer("up").kernel) == (6, 512)
    assert [part_of(v) for v in model.optimizer.variables].count((1, 6, 512)) == 1
