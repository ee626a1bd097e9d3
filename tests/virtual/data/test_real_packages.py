"""Loaders and datasets of other libraries, with the libraries themselves, train like arrays."""

import keras
import numpy as np
import pytest

import unisono

RNG = np.random.default_rng(0)
#: 22 rows in batches of 8, which two replicas halve, and a last one of 6.
X = RNG.normal(size=(22, 3)).astype("float32")
Y = RNG.integers(0, 2, 22)


def compiled():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.fixture(scope="module")
def strategy():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture(scope="module")
def trained(strategy):
    """A function that trains one model from the same weights, so that its programs are compiled once."""
    with strategy.scope():
        model = compiled()
    initial = model.get_weights()

    def fit(*data, epochs=1):
        model.set_weights(initial)
        return model.fit(*data, epochs=epochs, verbose=0).history["loss"]

    return fit


@pytest.fixture(scope="module")
def expected():
    return compiled().fit(X, Y, 8, epochs=2, shuffle=False, verbose=0).history["loss"]


def torch_loader():
    torch = pytest.importorskip("torch", reason="needs the package torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(data, batch_size=8)


def hugging_face():
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    return datasets.Dataset.from_dict({"x": X, "y": Y}).with_format("numpy")


def mapped_rows():
    data = unisono.data.Dataset.from_source(hugging_face())
    return data.map(lambda row: (row["x"], row["y"])).batch(8)


def streamed_rows():
    rows = hugging_face().to_iterable_dataset()
    data = unisono.data.Dataset.from_generator(lambda: rows).map(lambda row: (row["x"], row["y"]))
    return data.batch(8).assert_cardinality(3)


def loader_of_rows():
    torch = pytest.importorskip("torch", reason="needs the package torch")
    loader = torch.utils.data.DataLoader(hugging_face().with_format("torch"), batch_size=8)
    data = unisono.data.Dataset.from_generator(lambda: loader)
    return data.map(lambda batch: (batch["x"], batch["y"])).assert_cardinality(3)


def list_of_batches():
    return [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 22, 8)]


@pytest.mark.parametrize(
    "make",
    [torch_loader, mapped_rows, streamed_rows, loader_of_rows, list_of_batches],
    ids=lambda m: m.__name__,
)
def test_a_source_trains_like_arrays(strategy, trained, expected, make):
    np.testing.assert_allclose(trained(make(), epochs=2), expected, rtol=1e-5)
    rows = [strategy.gather(batch, axis=0) for batch in strategy.distribute_dataset(make())]
    assert [len(x) for x, _ in rows] == [8, 8, 6]
    np.testing.assert_array_equal(np.concatenate([x for x, _ in rows]), X)
    np.testing.assert_array_equal(np.concatenate([y for _, y in rows]), Y)


def rejected(strategy, trained, data, *more):
    """What an error says of data in `fit`, and in `distribute_dataset`."""
    with pytest.raises(unisono.InvalidTypeError) as in_fit:
        trained(data, *more)
    with pytest.raises(unisono.InvalidTypeError) as in_loop:
        strategy.distribute_dataset(data)
    assert str(in_fit.value).partition("Received: ")[2] == str(in_loop.value).partition("Received: ")[2]
    return str(in_fit.value)


def test_rows_of_hugging_face_say_how_to_make_batches(strategy, trained):
    data = hugging_face()
    assert "columns ['x', 'y']. Write" in rejected(strategy, trained, data)
    assert "a column of a Hugging Face dataset. Write" in rejected(strategy, trained, data["x"], data["y"])
    splits = pytest.importorskip("datasets").DatasetDict({"train": data})
    assert "splits ['train']. Write `data = data['train']`" in rejected(strategy, trained, splits)
    with pytest.raises(unisono.InvalidTypeError, match=r"`y` needs .* a column of a Hugging Face"):
        trained(X, data["y"])


def test_rows_of_torch_say_how_to_make_batches(strategy, trained):
    assert "torch.utils.data.DataLoader(data, batch_size=64)" in rejected(
        strategy, trained, torch_loader().dataset
    )
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(hugging_face().with_format("torch"), batch_size=8)
    with strategy.scope():
        new = keras.Sequential([keras.layers.Dense(2)])
        new.compile("sgd", "mse")
    # Keras looks at the first batch of a model that is not built, and Unisono at that of another one.
    for fit in (trained, new.fit):
        with pytest.raises(
            unisono.InvalidTypeError, match=r"dicts from a loader.*batch\['x'\], batch\['y'\]"
        ):
            fit(loader)
