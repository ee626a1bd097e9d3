"""Checkpoints that are restored before the variables exist, as in TensorFlow."""

import contextlib
import gc
import logging

import keras
import numpy as np
import pytest
from tests.virtual.training._digits import mirrored

import unisono
from unisono import CheckpointMismatchError, CheckpointUnmatchedError
from unisono.checkpoint import Checkpoint, CheckpointManager
from unisono.checkpoint._tracking import TrackedDict

L = keras.layers
ROWS = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
TARGETS = ROWS[:, :2] * 2


class Lazy(keras.Model):
    """Built by its first call; with random state that exists before."""

    def __init__(self, units=4):
        super().__init__()
        self.first, self.drop, self.last = L.Dense(units), L.Dropout(0.1, seed=3), L.Dense(2)

    def call(self, x, training=False):
        return self.last(self.drop(self.first(x), training=training))


class Built(keras.Model):
    """Creates its variables in `build`."""

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 2), "ones", name="kernel")
        self.inner = L.Dense(2)
        self.inner.build((None, 2))

    def call(self, x):
        return self.inner(x @ self.kernel)


def sequential():
    return keras.Sequential([L.Dense(4), L.BatchNormalization(), L.Dense(2)])


MODELS = {"lazy": Lazy, "built": Built, "sequential": sequential}
STRATEGIES = {"none": lambda: None, "mirrored": lambda: mirrored(2)}


def scope(strategy):
    return strategy.scope() if strategy else contextlib.nullcontext()


def state(*objects):
    return [v.numpy() for o in objects for v in o.variables]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def loop(strategy, model, optimizer, steps=1):
    """A custom loop whose first step builds the model and the optimizer."""

    def step(x, y):
        with unisono.GradientTape() as tape:
            loss = keras.ops.mean((model(x, training=True) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    for _ in range(steps):
        strategy.run(step, args=(ROWS, TARGETS))


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """A model of each kind that was trained, its state, and its checkpoint."""
    keras.utils.set_random_seed(1)
    model = MODELS[request.param]()
    model.compile("adam", "mse")
    model.fit(ROWS, TARGETS, verbose=0, epochs=2)
    path = Checkpoint(model=model).save(tmp_path_factory.mktemp("saved") / "ckpt")
    return MODELS[request.param], model, path


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_lazily_built_model_and_its_optimizer_are_restored_when_fit_builds_them(saved, strategy):
    make, original, path = saved
    keras.utils.set_random_seed(2)
    with scope(STRATEGIES[strategy]()):
        model = make()
        model.compile(keras.optimizers.Adam(), "mse")
    status = Checkpoint(model=model).restore(path)
    assert status == {}
    status.assert_existing_objects_matched()
    with pytest.raises(CheckpointUnmatchedError, match="not used: model/weights/"):
        status.assert_consumed()
    model.evaluate(ROWS, TARGETS, verbose=0)
    assert_same(state(model), state(original))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_goes_on_as_if_the_model_had_been_built_first(saved, strategy):
    make, _, path = saved
    histories, states = [], []
    for is_built_first in (True, False):
        keras.utils.set_random_seed(2)
        with scope(STRATEGIES[strategy]()):
            model = make()
            model.compile(keras.optimizers.Adam(), "mse")
            if is_built_first:
                model(ROWS)
                model.optimizer.build(model.trainable_variables)
        status = Checkpoint(model=model).restore(path)
        keras.utils.set_random_seed(3)
        histories.append(model.fit(ROWS, TARGETS, verbose=0, epochs=2).history)
        states.append(state(model, model.optimizer))
        status.assert_consumed()
    assert histories[0] == histories[1]
    assert_same(states[1], states[0])


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_custom_loop_builds_model_and_optimizer_in_its_first_step(tmp_path, replicas):
    """TensorFlow's tutorial restores before the first step."""

    def made():
        strategy = mirrored(replicas)
        with strategy.scope():
            return strategy, Lazy(), keras.optimizers.Adam(0.1)

    strategy, model, optimizer = made()
    loop(strategy, model, optimizer, steps=2)
    path = Checkpoint(net=model, optimizer=optimizer).save(tmp_path / "ckpt")
    loop(strategy, model, optimizer, steps=2)
    expected = state(model, optimizer)

    strategy, model, optimizer = made()
    status = Checkpoint(net=model, optimizer=optimizer).restore(path)
    # What exists is restored at once.
    assert int(optimizer.iterations.value) == 2
    loop(strategy, model, optimizer, steps=2)
    status.assert_consumed()
    assert_same(state(model, optimizer), expected)
    for variable in model.variables:
        assert len({np.asarray(s.data).tobytes() for s in variable.value.addressable_shards}) == 1


def test_slots_are_restored_when_the_optimizer_is_built(tmp_path):
    layer, optimizer = L.Dense(2), keras.optimizers.SGD(0.1, momentum=0.9)
    layer.build((None, 3))
    optimizer.build(layer.trainable_variables)
    optimizer.apply([keras.ops.ones(v.shape) for v in layer.trainable_variables])
    path = Checkpoint(layer=layer, optimizer=optimizer).save(tmp_path / "ckpt")
    layer2, optimizer2 = L.Dense(2), keras.optimizers.SGD(0.5, momentum=0.9)
    status = Checkpoint(layer=layer2, optimizer=optimizer2).restore(path)
    assert float(optimizer2.learning_rate) == np.float32(0.1)
    layer2(ROWS)
    assert_same(state(layer2), state(layer))
    optimizer2.build(layer2.trainable_variables)
    assert_same(state(optimizer2), state(optimizer))
    status.assert_consumed()


def test_a_model_that_is_compiled_later(saved):
    make, original, path = saved
    model = make()
    status = Checkpoint(model=model).restore(path)
    model(ROWS)
    assert_same(state(model), state(original))
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    assert_same(state(model.optimizer), state(original.optimizer))
    status.assert_consumed()


def test_another_model_is_noticed_when_it_is_built(tmp_path):
    model = Lazy(4)
    model(ROWS)
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    other = Lazy(5)
    Checkpoint(model=other).restore(path)
    with pytest.raises(CheckpointMismatchError, match=r"dense/kernel has shape \(3, 5\)"):
        other(ROWS)
    unlike = keras.Sequential([L.Dense(4)])
    Checkpoint(model=unlike).restore(path)
    with pytest.raises(CheckpointMismatchError, match="only in the checkpoint"):
        unlike(ROWS)


def test_a_model_that_is_not_in_the_checkpoint_is_noticed_when_it_is_built(tmp_path):
    path = Checkpoint(step=keras.Variable(1)).save(tmp_path / "ckpt")
    model = sequential()
    Checkpoint(model=model).restore(path).expect_partial()
    with pytest.raises(CheckpointMismatchError, match="missing in the checkpoint: model/weights/dense"):
        model(ROWS)


def test_attributes_that_are_set_later_are_restored_then(tmp_path):
    """https://www.tensorflow.org/guide/checkpoint#delayed_restorations"""
    bias, kernel = keras.Variable([1.0, 2.0]), keras.Variable([3.0])
    path = Checkpoint(net=Checkpoint(l1=Checkpoint(bias=bias, kernel=kernel)), step=bias).save(tmp_path / "c")
    found = keras.Variable([0.0, 0.0])
    layer = Checkpoint(bias=found)
    root = Checkpoint(net=Checkpoint(l1=layer))
    status = root.restore(path).assert_existing_objects_matched().assert_nontrivial_match()
    assert found.numpy().tolist() == [1, 2]
    later = keras.Variable([0.0])
    layer.kernel = later
    assert later.numpy().tolist() == [3]
    assert layer.kernel is later
    with pytest.raises(CheckpointUnmatchedError, match="not used: step"):
        status.assert_consumed()
    root._include(step=found)
    assert status.assert_consumed() == {}
    root.new = keras.Variable(0.0)
    with pytest.raises(CheckpointUnmatchedError, match="not in the checkpoint: new"):
        status.assert_existing_objects_matched()


def test_another_kind_of_value_than_was_saved_is_noticed_at_once(tmp_path):
    saved = Checkpoint(net=Checkpoint(a=keras.Variable(1.0)), step=keras.Variable(1.0))
    path = saved.save(tmp_path / "c")
    with pytest.raises(CheckpointMismatchError, match="net/a"):
        Checkpoint(net=keras.Variable(0.0), step=keras.Variable(0.0)).restore(path)
    # A number, which holds no place for the variable of its name.
    with pytest.raises(CheckpointMismatchError, match="only in the checkpoint: step"):
        Checkpoint(step=3).restore(path)


def test_lists_and_dicts_that_grow(tmp_path):
    """https://www.tensorflow.org/guide/checkpoint#list_and_dictionary_tracking"""
    save = Checkpoint()
    save.listed = [keras.Variable(1.0)]
    save.listed.append(keras.Variable(2.0))
    save.mapped = {"one": save.listed[0]}
    save.mapped["two"] = save.listed[1]
    path = save.save(tmp_path / "list")
    restore, v2 = Checkpoint(), keras.Variable(0.0)
    restore.mapped = {"two": v2}
    restore.restore(path)
    assert float(v2.value) == 2
    restore.listed = []
    v1, more = keras.Variable(0.0), keras.Variable(0.0)
    restore.listed.append(v1)
    assert float(v1.value) == 1
    restore.listed += [more]
    assert float(more.value) == 2
    restore.mapped.update(one=keras.Variable(0.0))
    assert float(restore.mapped["one"].value) == 1


def test_what_was_never_used_is_said_unless_it_was_expected(tmp_path, caplog):
    path = Checkpoint(a=keras.Variable(1.0), b=keras.Variable(2.0)).save(tmp_path / "c")

    def partly():
        return Checkpoint(a=keras.Variable(0.0)).restore(path)

    # Of other tests.
    gc.collect()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        partly().expect_partial()
        gc.collect()
        assert caplog.text == ""
        partly()
        gc.collect()
    assert "were never used: b." in caplog.text


def test_nothing_to_restore(tmp_path, caplog):
    status = Checkpoint(a=keras.Variable(1.0)).restore(None)
    assert "latest_checkpoint(directory)" in caplog.text
    assert status.expect_partial() == {}
    with pytest.raises(AssertionError, match=r"restore\(None\)"):
        status.assert_consumed()


def test_a_manager_restores_what_is_created_later(saved, tmp_path):
    make, original, _ = saved
    with CheckpointManager(Checkpoint(model=original), tmp_path) as manager:
        manager.save()
    model = make()
    with CheckpointManager(Checkpoint(model=model), tmp_path) as manager:
        assert manager.restore_or_initialize() == manager.latest_checkpoint
    model(ROWS)
    assert_same(state(model), state(original))


def test_a_second_restore_replaces_the_first(tmp_path):
    models = [Lazy(), Lazy()]
    paths = []
    for model in models:
        model(ROWS)
        paths.append(Checkpoint(model=model).save(tmp_path / "ckpt"))
    model = Lazy()
    checkpoint = Checkpoint(model=model)
    for path in paths:
        checkpoint.restore(path)
    model(ROWS)
    assert_same(state(model), state(models[1]))


def test_tracked_containers_return_what_those_of_python_return():
    tracked = TrackedDict(a=1)
    assert (tracked.setdefault("a", 2), tracked.setdefault("b", 3), tracked) == (1, 3, {"a": 1, "b": 3})
    same = tracked
    same |= {"c": 4}
    assert same is tracked
