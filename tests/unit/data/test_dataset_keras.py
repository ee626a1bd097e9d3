"""Data sets as inputs of plain Keras, and the pipelines of the programs that must run as written."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest

from unisono._errors import InvalidArgumentError
from unisono.data import AUTOTUNE, Dataset
from unisono.data._keras_input import KerasInput, as_keras_input

FEATURES = np.random.RandomState(0).rand(50, 3).astype(np.float32)
LABELS = FEATURES.sum(axis=1, keepdims=True)
RUNS_OUT = "ignore:Your input ran out of data"


def _model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class _Counter(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.known: list[Any] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.batches.append(0)
        self.known.append(self.params["steps"])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches[-1] += 1


def _fit(data: Any, **kwargs: Any) -> _Counter:
    counter = _Counter()
    _model().fit(data, verbose=0, shuffle=False, callbacks=[counter], **kwargs)
    return counter


def _data() -> Dataset:
    return Dataset.from_tensor_slices((FEATURES, LABELS)).shuffle(50, seed=1).batch(8)


def test_fit_knows_the_number_of_batches() -> None:
    counter = _fit(as_keras_input(_data()), epochs=2, validation_data=as_keras_input(_data().take(2)))
    assert counter.batches == [7, 7]
    assert counter.known == [7, 7]


def test_each_epoch_is_a_new_iteration() -> None:
    seen: list[int] = []

    def note(x: Any, y: Any) -> Any:
        seen.append(int(x[0] * 1e6))
        return x, y

    dataset = Dataset.from_tensor_slices((FEATURES, LABELS)).map(note).shuffle(50, seed=1).batch(8)
    _fit(as_keras_input(dataset), epochs=2)
    # Keras looked at the first batch before.
    first, second = seen[8:58], seen[58:]
    assert first[:8] == seen[:8]
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.filterwarnings(RUNS_OUT)
@pytest.mark.parametrize("convert", [as_keras_input, lambda dataset: dataset], ids=["converted", "plain"])
def test_endless_and_unknown_sizes(convert: Any) -> None:
    assert _fit(convert(_data().repeat()), epochs=2, steps_per_epoch=4).batches == [4, 4]
    assert _fit(convert(_data().filter(lambda x, y: True)), epochs=2).batches == [7, 7]
    assert _fit(convert(_data()), epochs=2).batches == [7, 7]


def test_steps_go_on_where_the_last_epoch_stopped() -> None:
    seen: list[float] = []

    def note(x: Any, y: Any) -> Any:
        seen.append(float(y[0]))
        return x, y

    dataset = Dataset.from_tensor_slices((FEATURES, LABELS)).map(note)
    _fit(as_keras_input(dataset.batch(10)), epochs=2, steps_per_epoch=2)
    # Keras looked at the first batch before.
    assert seen[10:] == LABELS[:40, 0].tolist()


def test_evaluate_predict_and_class_weight() -> None:
    model = _model()
    dataset = Dataset.from_tensor_slices((FEATURES, LABELS)).batch(8)
    assert model.evaluate(as_keras_input(dataset), verbose=0) == pytest.approx(
        model.evaluate(FEATURES, LABELS, batch_size=8, verbose=0)
    )
    expected = model.predict(FEATURES, verbose=0)
    inputs = as_keras_input(Dataset.from_tensor_slices(FEATURES).batch(8))
    np.testing.assert_allclose(model.predict(inputs, verbose=0), expected, rtol=1e-5)
    binary = Dataset.from_tensor_slices((FEATURES, (LABELS > 1.5).astype(np.int32))).batch(8)
    assert _fit(as_keras_input(binary), class_weight={0: 1.0, 1: 3.0}).batches == [7]


def test_batches_must_be_asked_for_in_order() -> None:
    view = KerasInput(_data())
    view[0]
    with pytest.raises(InvalidArgumentError, match="index=3 after 1 batches"):
        view[3]


def test_a_run_resumes_from_the_state_after_a_batch() -> None:
    def batches(view: KerasInput, numbers: Any) -> list[Any]:
        return [view[number][1].tolist() for number in numbers]

    view = KerasInput(_data(), keep_states=4)
    batches(view, range(7))
    batches(view, range(5))
    state = json.loads(json.dumps(view.position.state_after(3)))
    rest = batches(view, range(5, 7))
    next_epoch = batches(view, range(7))

    resumed = KerasInput(_data(), keep_states=4)
    resumed.position.resume_from(state)
    assert batches(resumed, range(4))[2:] == rest
    assert batches(resumed, range(7)) == next_epoch
    with pytest.raises(InvalidArgumentError, match="the last 4 batches"):
        resumed.position.state_after(1)


def test_the_pipelines_of_the_programs() -> None:
    features = Dataset.from_tensors([1.0]).repeat(10000).batch(10)
    labels = Dataset.from_tensors([1.0]).repeat(10000).batch(10)
    zipped = Dataset.zip((features, labels))
    assert next(iter(zipped))[0].shape == (10, 1)
    assert len(zipped) == 1000
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(as_keras_input(zipped), epochs=5, steps_per_epoch=10, verbose=0, shuffle=False)
    model.evaluate(as_keras_input(zipped), steps=1, verbose=0)
    assert model.predict(as_keras_input(features), steps=1, verbose=0).shape == (10, 1)

    single = Dataset.zip((Dataset.from_tensors([[1.0]]).repeat(100), Dataset.from_tensors(1.0).repeat(100)))
    assert [np.shape(part) for part in next(iter(single))] == [(1, 1), ()]

    def scale(image: Any, label: Any) -> Any:
        return image.astype(np.float32) / 255, label

    images = np.random.RandomState(0).randint(0, 256, (64, 28, 28, 1), np.uint8)
    train = Dataset.from_source([(image, number % 10) for number, image in enumerate(images)])
    train = train.map(scale).shuffle(10000).batch(16)
    image, label = next(iter(train))
    assert (image.shape, image.dtype, label.dtype) == ((16, 28, 28, 1), np.float32, np.int32)
    assert sum(len(label) for _, label in train.cache().prefetch(AUTOTUNE)) == 64
