"""Mistakes of a first program: each is said where it is made, with what to write instead."""

import importlib.util
import logging
import re
import types

import jax
import keras
import numpy as np
import pytest

import unisono
from unisono.callbacks import BackupAndRestore, StepTimer, TensorBoard
from unisono.checkpoint import Checkpoint
from unisono.data import Dataset
from unisono.step._explain import explain_at_end
from unisono.training._mistakes import note_on
from unisono.training.replica import _whole_batches

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 24, 8)]


@pytest.fixture(scope="module")
def strategy():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def model(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


# --- scopes ----------------------------------------------------------------------------------------------


def test_a_scope_needs_its_brackets(strategy):
    with pytest.raises(unisono.ContextError, match=r"Received: `with strategy.scope:`, without brackets"):
        with strategy.scope:
            pass


def test_a_scope_is_one_of_a_strategy_and_not_of_its_class():
    with pytest.raises(unisono.ContextError, match=r"Received: `scope\(\)` of a class"):
        unisono.MirroredStrategy.scope()


def test_a_strategy_itself_is_no_scope(strategy):
    with pytest.raises(unisono.ContextError, match=r"Received: `with` and the MirroredStrategy itself"):
        with strategy:
            pass


def test_a_scope_is_a_method_as_before(strategy):
    assert strategy.scope.__doc__.startswith("Make this strategy current")
    with unisono.MirroredStrategy.scope(strategy) as entered:
        assert entered is strategy is unisono.get_strategy()


# --- paths and devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["C:\\runs\\ck", "C:/runs/ck", "\\\\server\\runs\\ck"])
def test_a_path_of_windows_is_none_of_posix(model, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(unisono.InvalidArgumentError, match=r"a path of Windows.*Write '/.*ck'"):
        Checkpoint(model=model).save(path)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_saved_outside_of_the_replicas(strategy, model, tmp_path):
    checkpoint = Checkpoint(model=model)
    with pytest.raises(
        unisono.ContextError, match=r"`checkpoint.save` must be called in cross-replica context"
    ):
        strategy.run(lambda: checkpoint.save(tmp_path / "ck"))


@pytest.mark.parametrize(
    ("plugin", "write"),
    [(None, r"pip install -U 'jax\[cuda13\]'"), ("jax_cuda13_plugin", "see `nvidia-smi`")],
)
def test_a_missing_gpu_names_what_is_to_be_installed(monkeypatch, plugin, write):
    found = importlib.util.find_spec
    spec = types.SimpleNamespace()

    def chosen(name, *args):
        return (spec if name == plugin else None) if "_plugin" in name else found(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", chosen)
    with pytest.raises(unisono.DeviceError, match=rf"Received: 'gpu:0'. There are: cpu:0.*{write}"):
        unisono.MirroredStrategy(["gpu:0"])


def test_a_platform_is_no_list_of_devices():
    with pytest.raises(unisono.DeviceError, match=r"Write `\['gpu:0', 'gpu:1'\]`, or leave it out"):
        unisono.MirroredStrategy("GPU")


def test_devices_in_one_text_are_told_apart():
    with pytest.raises(unisono.DeviceError, match=r"Write `\['cpu:0', 'cpu:1'\]`"):
        unisono.MirroredStrategy("cpu:0, cpu:1")


# --- data ------------------------------------------------------------------------------------------------


class Items:
    """A user's own collection, without iteration."""

    def __init__(self, items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, index):
        return self._items[index]


def batches():
    yield X, Y


ROWS = [{"image": x, "label": y} for x, y in zip(X, Y, strict=True)]
IN_DICTS = Dataset.from_tensor_slices({"x": X, "y": Y}).batch(8)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            Items(ROWS),
            "Items with 24 items that are dicts with the keys ['image', 'label']. For items that are "
            "rows write `unisono.data.Dataset.from_source(data).map(lambda row: (row['image'], "
            "row['label'])).batch(64)`",
        ),
        (Items(X), "24 items. For items that are rows write `unisono.data.Dataset.from_source(data).batch("),
        (IN_DICTS, "Write `dataset.map(lambda batch: (batch['x'], batch['y']))`"),
        (list(zip(X, Y, strict=True)), "Received: elements of (4,), where 'sequential"),
        (zip(X, Y, strict=True), "of a dataset of rows write `dataset.batch(64)`"),
        (X.tolist(), "as `x` a list of 24 objects of the class list, or as `y`"),
        ((x for x in [X, X]), "Write `yield x, y`, or `yield (x,)` for inputs alone."),
        (([X, Y] for _ in range(2)), "A generator for `fit` must give tuples, `(x, y)` or `(x,)`."),
        (batches, "Write `fit(batches(), …)`; for several epochs"),
    ],
    ids=[
        "rows of dicts", "rows", "batches of dicts", "list of rows", "iterator of rows", "lists of numbers",
        "generator of arrays", "generator of lists", "generator that is not called",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed, but will be ignored")
def test_fit_says_what_its_data_lack(model, data, text):
    with pytest.raises((TypeError, ValueError), match=re.escape(text)) as raised:
        model.fit(data, verbose=0)
    assert isinstance(raised.value, unisono.UnisonoError)
    # One traceback, of the message that helps.
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_predict_names_the_inputs_of_dicts(model):
    with pytest.raises(unisono.InvalidTypeError, match=r"Write `dataset.map\(lambda batch: batch\['x'\]\)`"):
        model.predict(IN_DICTS, verbose=0)


def test_targets_that_are_one_hot_need_another_loss(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="must have the same shape") as raised:
        model.fit(X, np.eye(3)[np.arange(24) % 3], verbose=0)
    assert 'write the loss "categorical_crossentropy"' in raised.value.__notes__[0]


def test_batches_of_batches_and_weights_in_a_list_have_advice(model):
    with pytest.raises(ValueError, match="incompatible shape") as raised:
        model.fit(Dataset.from_tensor_slices((X, Y)).batch(8).batch(2), verbose=0)
    assert "leave out one of two `batch` calls" in raised.value.__notes__[0]
    with pytest.raises(AttributeError) as raised:
        model.fit(X, Y, class_weight=[1.0, 2.0], verbose=0)
    assert "Write `{0: 1.0, 1: 2.0}`" in raised.value.__notes__[0]


def test_a_number_is_no_path(strategy):
    for make in (BackupAndRestore, TensorBoard):
        with pytest.raises(unisono.InvalidTypeError, match=r"a text or a `Path`. Received: 5\."):
            make(5)


def test_rows_of_several_sizes_ask_for_batches(strategy):
    with pytest.raises(
        unisono.InvalidArgumentError, match=r"of a dataset of rows write `dataset.batch\(64\)`"
    ):
        next(iter(strategy.distribute_dataset(Dataset.from_tensor_slices((X, Y)))))


def test_a_generator_in_place_of_its_function_is_named():
    def rows():
        yield 1

    with pytest.raises(unisono.InvalidTypeError, match=r"Write from_generator\(rows\), without a call"):
        Dataset.from_generator(rows())


# --- callbacks -------------------------------------------------------------------------------------------


def test_a_timer_that_is_listed_last_adds_its_numbers_for_all_callbacks(model):
    seen = {}
    writer = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.update(logs))
    given = [writer, StepTimer()]
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=given)
    assert {"loss", "step_ms", "data_ms"} <= set(seen)
    assert given[0] is writer


# --- loops -----------------------------------------------------------------------------------------------


def test_a_forward_pass_outside_of_the_tape_is_said(strategy, model):
    optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        predictions = model(x)
        with unisono.GradientTape() as tape:
            loss = keras.ops.mean(predictions**2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    text = r"None for each of 2, 'sequential.*/kernel', .*inside of the tape"
    with pytest.raises(unisono.InvalidArgumentError, match=rf"(?s){text}"):
        strategy.run(step, args=(next(iter(strategy.distribute_dataset([X]))),))


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap], ids=["jit", "grad", "vmap"])
def test_a_step_in_a_function_that_jax_traces_is_said_and_changes_nothing(strategy, transform):
    with strategy.scope():
        layer = keras.layers.Dense(1)
        layer.build((None, 4))

    def whole(x):
        return strategy.reduce("sum", strategy.run(lambda x: layer(x).sum(), args=(x,)), axis=None)

    with pytest.raises(unisono.ContextError, match=r"compiles the step itself.*Received: .*jit"):
        transform(whole)(X[:2])
    # No variable holds what was traced.
    assert np.isclose(float(whole(X[:2])), 2 * float(np.sum(X[:2] @ np.asarray(layer.kernel))), rtol=1e-5)


def test_eager_gradients_of_nothing_are_said():
    variable = keras.Variable(np.ones(2, "float32"), name="weight")
    with pytest.raises(unisono.InvalidArgumentError, match="None for each of 1, 'weight'"):
        keras.optimizers.SGD(0.1).apply_gradients([(None, variable)])


def trained(model, optimizer):
    def step(x, y):
        with unisono.GradientTape() as tape:
            loss = keras.ops.mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


@pytest.fixture
def said(caplog, monkeypatch):
    """Warnings of whole batches, as of a new program."""
    monkeypatch.setattr(_whole_batches, "_said", set())
    caplog.set_level(logging.WARNING, "unisono")
    return lambda: [r.getMessage() for r in caplog.records if "as a whole. Received" in r.getMessage()]


def test_a_plain_array_for_a_step_that_trains_is_warned_of_once(strategy, model, said):
    with strategy.scope():
        step = trained(model, keras.optimizers.SGD(0.0))
    for x, y in BATCHES[:2]:
        strategy.run(step, args=(x, y))
    unisono.function(lambda x, y: strategy.run(step, args=(x, y)))(X, Y)
    (text,) = said()
    assert "one of 8 rows for 'step', of which each of 2 replicas computes all" in text
    assert "strategy.distribute_dataset(dataset)" in text
    assert "unisono.Mirrored(array)" in text


@pytest.mark.parametrize("case", ["function", "beside", "predicts"])
def test_further_plain_arrays_that_look_like_a_whole_batch(strategy, model, said, case):
    (batch,) = strategy.distribute_dataset([X[:8]])
    if case == "function":
        run = unisono.function(lambda x: strategy.run(lambda x: model(x), args=(x,)))
        run(X[:8])
    elif case == "beside":
        strategy.run(lambda x, y: x.sum() + y.sum(), args=(batch, Y[:8]))
    else:
        strategy.run(lambda x: model(x), args=(X[:8],))
    assert len(said()) == 1


def test_constants_and_values_for_all_are_not_warned_of(strategy, model, said):
    (batch,) = strategy.distribute_dataset([X[:8]])
    with strategy.scope():
        variable = unisono.Variable(np.zeros((8, 4), "float32"))
        step = trained(model, keras.optimizers.SGD(0.0))
    strategy.run(lambda x: x * 2, args=(X[:8],))
    strategy.run(lambda x, scale: model(x) * scale, args=(batch, np.ones(4, "float32")))
    strategy.run(lambda x: model(x), args=(X[:2],))
    strategy.run(lambda x: variable.assign(x), args=(X[:8],))
    strategy.run(step, args=(unisono.Mirrored(X[:8]), unisono.Mirrored(Y[:8])))
    strategy.run(step, args=(batch, np.float32(1)))
    assert not said()


def test_the_arguments_of_a_step_are_a_tuple(strategy):
    (batch,) = strategy.distribute_dataset([X])
    with pytest.raises(
        unisono.InvalidTypeError, match=r"Received: PerReplica. Write `.*args=\(x,\)\)`, with"
    ):
        strategy.run(lambda x: x.sum(), args=batch)


def test_a_batch_size_of_one_replica_is_warned_of_once(strategy, caplog, monkeypatch):
    monkeypatch.setattr(unisono.nn, "_said", [])

    def average(x, size):
        return unisono.nn.compute_average_loss(x[:, 0], global_batch_size=size)

    for size, words in ((8, 0), (9, 0), (4, 1), (4, 1)):
        (batch,) = strategy.distribute_dataset([X[:8]])
        strategy.run(lambda x, size=size: average(x, size), args=(batch,))
        assert len(caplog.records) == words, size
    assert "Received: 4, for a batch of 8 rows on 2 replicas" in caplog.text
    assert "2 times as large as on one device. Write `global_batch_size=8`" in caplog.text


# --- the last error of a program -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "write"),
    [
        (lambda s, b: next(s.distribute_dataset([X])), "`iterator = iter(dataset)`"),
        (lambda s, b: s.distribute_dataset([X])[0], "for batch in dataset:"),
        (lambda s, b: b.shape, "`strategy.local_results(value)`"),
        (lambda s, b: keras.optimizers.SGD().minimize(None, []), "unisono.GradientTape()"),
        (lambda s, b: s.run(lambda x: x.backward(), args=(b,)), "tape.gradient(loss, variables)"),
        (lambda s, b: s.reduce("sum", b), "axis=None"),
        (lambda s, b: s.num_replicas, "Write `strategy.num_replicas_in_sync`."),
        (lambda s, b: s.all_reduce("SUM", b), "`strategy.reduce("),
        (lambda s, b: s.run(None, arg=(b,)), "Write `args=…` in place of `arg=…`."),
        (lambda s, b: type(s)(device=["cpu:0"]), "Write `devices=…` in place of `device=…`."),
        (lambda s, b: type(s)(colour=1), "`MirroredStrategy` takes devices, cross_device_ops, "),
        (
            lambda s, b: unisono.data.Dataset.range(3).batch(size=2),
            "Write `batch_size=…` in place of `size=…`.",
        ),
    ],
    ids=[
        "next",
        "index",
        "attribute",
        "minimize",
        "backward",
        "axis",
        "replicas",
        "all-reduce",
        "method",
        "class",
        "list",
        "dataset",
    ],
)
def test_the_error_that_ends_a_program_says_what_to_write(strategy, mistake, write):
    (batch,) = strategy.distribute_dataset([X])
    with pytest.raises((TypeError, AttributeError)) as raised:
        mistake(strategy, batch)
    explain_at_end(raised.value)
    assert write in raised.value.__notes__[0]


def test_a_missing_tensorflow_leads_to_the_ways_without_it():
    assert "python -m unisono.tf" in note_on(ModuleNotFoundError("No module named 'tensorflow'"))
    assert note_on(ModuleNotFoundError("No module named 'tensorflow_probability'")) is None


def test_an_error_of_a_program_is_left_alone():
    assert note_on(TypeError("unsupported operand")) is None
    unexpected = "got an unexpected keyword argument 'device'"
    assert note_on(TypeError(f"MirroredStrategy.of_somebody_else() {unexpected}")) is None
    assert note_on(TypeError(f"Theirs.__init__() {unexpected}")) is None
    # From Python 3.13 on, some of these errors have a proposal of Python's.
    assert note_on(TypeError(f"MirroredStrategy.__init__() {unexpected}. Did you mean 'devices'?")) is None
