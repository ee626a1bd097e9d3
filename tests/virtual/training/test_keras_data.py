"""What `fit`, `evaluate` and `predict` take for data, and what they say of data that they cannot use."""

import contextlib
import sys

import keras
import numpy as np
import pytest

import unisono
from unisono.data import Dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed, but will be ignored"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]

X = np.random.default_rng(0).normal(size=(22, 3)).astype("f4")
Y = 2 * X.sum(1, keepdims=True) + 1


@pytest.fixture(scope="module")
def strategy():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def model(strategy):
    with strategy.scope():
        return compiled()


def compiled():
    layers = [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def rows(size):
    return Dataset.from_tensor_slices((X, Y)).batch(size)


class Loader:
    """Batches of a loader of the user's own, which Keras does not know."""

    def __iter__(self):
        return ((X[i : i + 8], Y[i : i + 8]) for i in range(0, 22, 8))


class LoaderOfKnownLength(Loader):
    """The same, with their number."""

    def __len__(self):
        return 3


SOURCES = {
    "list of batches": lambda s: [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 22, 8)],
    "list of lists": lambda s: [[X[i : i + 8], Y[i : i + 8]] for i in range(0, 22, 8)],
    "loader": lambda s: Loader(),
    "loader of known length": lambda s: LoaderOfKnownLength(),
    "dataset": lambda s: s.distribute_dataset(rows(8)),
    "list": lambda s: s.distribute_dataset([[X[i : i + 8], Y[i : i + 8]] for i in range(0, 22, 8)]),
    "function": lambda s: s.distribute_dataset(lambda: iter(rows(8))),
    "dataset_fn": lambda s: s.distribute_datasets_from_function(lambda _: rows(4)),
}


def test_an_iterator_gives_its_batches_once(model):
    history = model.fit(iter(list(Loader())), verbose=0).history
    assert np.isfinite(history["loss"]).all()
    single = compiled()
    single.set_weights(model.get_weights())
    result = model.evaluate(iter(list(Loader())), verbose=0)
    np.testing.assert_allclose(result, single.evaluate(X, Y, 8, verbose=0), rtol=1e-5)


def test_inputs_in_a_list_are_no_batches(strategy):
    """Keras' own meaning of a list, for a model that takes one."""
    with strategy.scope():
        inputs = [keras.Input((3,)), keras.Input((1,))]
        model = keras.Model(inputs, keras.layers.Concatenate()(inputs))
        model.compile("sgd", "mse")
    assert model.fit([X, Y], np.zeros((22, 4), "f4"), verbose=0).history["loss"][0] > 0
    assert model.predict([X, Y], verbose=0).shape == (22, 4)


class Rows:
    """What a dataset of Hugging Face looks like."""

    column_names = ("text", "label")

    def with_format(self, name):
        return self

    def __iter__(self):
        yield {"text": "a", "label": 0}


def test_rows_without_a_target_are_rejected(strategy, model):
    with pytest.raises(unisono.InvalidTypeError, match=r"Received: a list of dicts .*\['x'\].* Write"):
        model.fit([{"x": X}], verbose=0)
    with pytest.raises(unisono.InvalidTypeError, match=r"columns .*label.*from_generator"):
        model.fit(Rows(), verbose=0)
    with pytest.raises(unisono.InvalidTypeError, match=r"columns .*label.*from_generator"):
        strategy.distribute_dataset(Rows())


def test_what_belongs_to_keras_distribution_is_rejected(strategy, model):
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
    try:
        with pytest.raises(unisono.MixedStrategyError, match=r"DataParallel.*set_distribution"):
            model.fit(X, Y, verbose=0)
        with pytest.raises(unisono.MixedStrategyError, match="DataParallel"), strategy.scope():
            pass
    finally:
        keras.distribution.set_distribution(None)


def test_a_callback_is_an_object(model):
    with pytest.raises(unisono.InvalidTypeError, match=r"the class EarlyStopping.*EarlyStopping\(...\)"):
        model.fit(X, Y, callbacks=[keras.callbacks.EarlyStopping], verbose=0)


@pytest.mark.parametrize("source", SOURCES)
def test_distributed_data_trains_like_one_device(strategy, source):
    single = compiled()
    expected = single.fit(X, Y, 8, epochs=2, shuffle=False, verbose=0).history
    with strategy.scope():
        model = compiled()
    data = SOURCES[source](strategy)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0).history
    for name, numbers in expected.items():
        np.testing.assert_allclose(history[name], numbers, rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(data, verbose=0), single.evaluate(X, Y, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.predict(data, verbose=0), single.predict(X, verbose=0), rtol=1e-5)


def test_distributed_data_of_another_strategy_is_refused(model):
    data = unisono.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).distribute_dataset(rows(8))
    with pytest.raises(unisono.MixedStrategyError, match="made by the strategy of the model"):
        model.fit(data)


class NoBatches(keras.utils.PyDataset):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


def nothing():
    yield from ()


EMPTY = {
    "arrays": lambda: (X[:0], "x of shape"),
    "py_dataset": lambda: (NoBatches(), "without a batch"),
    "generator": lambda: (nothing(), "empty generator"),  # Keras' own error
    "dropped": lambda: (Dataset.range(3).batch(4, drop_remainder=True), "without a batch"),
    "filtered": lambda: (rows(8).filter(lambda x, y: False), "has no batch"),
}


@pytest.mark.parametrize("data", EMPTY)
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_empty_data_are_an_error(model, method, data):
    x, text = EMPTY[data]()
    arguments = {"y": Y[:0]} if data == "arrays" and method != "predict" else {}
    with pytest.raises(ValueError, match=f"at least one (row|batch).*{text}"):
        getattr(model, method)(x, verbose=0, **arguments)


def test_empty_validation_data_are_an_error(model):
    with pytest.raises(ValueError, match=r"validation_data\[0\] of shape \(0, 3\)"):
        model.fit(X, Y, validation_data=(X[:0], Y[:0]), verbose=0)


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError)])
def test_batch_sizes_are_whole_and_positive(model, size, error):
    for call in (
        lambda: model.fit(X, Y, batch_size=size),
        lambda: model.fit(X, Y, size),
        lambda: model.evaluate(X, Y, size),
        lambda: model.predict(X, size),
        lambda: model.fit(X, Y, validation_data=(X, Y), validation_batch_size=size),
    ):
        with pytest.raises(error, match=f"Received: batch_size={size}"):
            call()


@pytest.mark.parametrize(("epochs", "error"), [("5", TypeError), (2.5, TypeError), (-1, ValueError)])
def test_epochs_are_whole(model, epochs, error):
    with pytest.raises(error, match=rf"Received: epochs={epochs!r}.*Write `epochs=5`"):
        model.fit(X, Y, epochs=epochs)


WORDS = np.array([["a", "b", "c"]] * 4)
LARGE = np.full((4, 3), 2**40)
BAD = {
    "none": (lambda: None, TypeError, "needs data. Received: x=None"),
    "strings": (lambda: WORDS, TypeError, "x with strings, such as .*StringLookup"),
    "objects": (lambda: WORDS.astype(object) + "x", TypeError, "x with strings"),
    "string dataset": (
        lambda: Dataset.from_tensor_slices((WORDS, Y[:4])).batch(2),
        TypeError,
        r"batch\[0\] wi",
    ),
    "large": (lambda: LARGE, ValueError, "x of dtype int64 with 1099511627776"),
    "large dataset": (
        lambda: Dataset.from_tensor_slices((LARGE, Y[:4])).batch(2),
        ValueError,
        r"batch\[0\] of",
    ),
    "late": (lambda: ((np.full((2, 3), i**30), Y[:2]) for i in range(4)), ValueError, r"batch\[0\] of dtype"),
    "unbatched": (lambda: Dataset.from_tensor_slices((X, Y[:, 0])), ValueError, "Did you forget `.batch"),
    "unbatched rows": (
        lambda: Dataset.from_tensor_slices((X, Y)),
        ValueError,
        r"elements of shape .* takes \(None, .*Did you forget `.batch",
    ),
}


@pytest.mark.parametrize("data", BAD)
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_data_that_devices_cannot_hold_are_an_error(model, method, data):
    make, error, text = BAD[data]
    arguments = {"y": Y[:4]} if data in ("strings", "objects", "large") and method != "predict" else {}
    with pytest.raises(error, match=text):
        getattr(model, method)(make(), verbose=0, **arguments)


def test_keras_own_word_about_strings_gets_a_note(strategy):
    with strategy.scope():
        model = compiled()
    with pytest.raises(ValueError, match="Invalid dtype") as raised:
        model.fit((pair for pair in [(WORDS, Y[:4])]), verbose=0)
    assert "StringLookup" in raised.value.__notes__[0]


def test_large_integers_in_run_are_an_error(strategy):
    with pytest.raises(ValueError, match=r"args\[0\]\['ids'\] of dtype int64 with 1099511627776"):
        strategy.run(lambda x: x["ids"], args=({"ids": LARGE},))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("bound", [True, False])
def test_targets_and_weights_beside_a_dataset_are_an_error(strategy, known, bound):
    """In words of a dataset, and not of the adapters that Keras reads."""
    dataset = Dataset.from_tensor_slices((np.ones((4, 3), "f4"), np.ones((4, 1), "f4"))).batch(2)
    data = dataset if known else dataset.filter(lambda x, y: True)
    with strategy.scope() if bound else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for name in ("y", "sample_weight"):
        with pytest.raises(unisono.InvalidArgumentError, match=f"holds targets and weights itself.*`{name}`"):
            model.fit(data, **{name: np.ones(4)}, verbose=0)
    if known:
        model.fit(data, class_weight={0: 1.0, 1: 2.0}, verbose=0)
    else:
        with pytest.raises(unisono.InvalidArgumentError, match="assert_cardinality"):
            model.fit(data, class_weight={0: 1.0, 1: 2.0}, verbose=0)


def test_sizes_beside_a_dataset_are_an_error(model):
    with pytest.raises(unisono.InvalidArgumentError, match=r"dataset and batch_size=8.*dataset.batch\(8\)"):
        model.fit(rows(4), batch_size=8)
    with pytest.raises(unisono.InvalidArgumentError, match=r"`validation_split` is for arrays.*skip"):
        model.fit(rows(4), validation_split=0.5)


@pytest.mark.parametrize("method", ["fit", "predict"])
def test_an_argument_that_keras_does_not_have_is_named(model, method):
    with pytest.raises(unisono.InvalidTypeError, match=r"Received: 'workers'.*batch_size"):
        getattr(model, method)(X, workers=4)


def test_missing_targets_are_explained(model, capsys):
    with pytest.raises(ValueError, match="None is not a valid value") as raised:
        model.fit(X, verbose=0)
    sys.excepthook(type(raised.value), raised.value, raised.tb)
    assert "Write `model.fit(x, y)`" in capsys.readouterr().err


@pytest.mark.parametrize("scope", ["strategy", "none"])
def test_data_without_end_need_a_number_of_batches(model, scope):
    model = model if scope == "strategy" else compiled()
    endless = rows(8).repeat()
    for call, needed in (
        (lambda: model.fit(endless), "steps_per_epoch"),
        (lambda: model.fit(rows(8), validation_data=endless), "validation_steps"),
        (lambda: model.evaluate(endless), "steps"),
        (lambda: model.predict(endless), "steps"),
    ):
        with pytest.raises(unisono.InvalidArgumentError, match=f"without end.* Write `{needed}=n`"):
            call()


# --- frames of polars, which need not be installed


def polars(name, module, array):
    """An object like polars': its class is known by its name."""
    kind = type(name, (), {"__module__": f"polars.{module}", "to_numpy": lambda self: array})
    return kind()


@pytest.fixture
def with_polars(monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", sys)


@pytest.mark.usefixtures("with_polars")
def test_frames_of_polars_train_like_their_arrays(model):
    frame = polars("DataFrame", "dataframe.frame", X)
    series = polars("Series", "series.series", Y[:, 0])
    weights = model.get_weights()
    results = []
    for x, y in ((X, Y), (frame, series)):
        model.set_weights(weights)
        results.append(
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0, validation_data=(x, y)).history
        )
    assert results[0] == results[1]
    np.testing.assert_array_equal(model.predict(frame, verbose=0), model.predict(X, verbose=0))


@pytest.mark.usefixtures("with_polars")
def test_a_lazy_frame_was_not_read(model):
    with pytest.raises(unisono.InvalidTypeError, match=r"a LazyFrame of polars. Write `frame.collect\(\)`"):
        model.fit(polars("LazyFrame", "lazyframe.frame", X), Y, verbose=0)
