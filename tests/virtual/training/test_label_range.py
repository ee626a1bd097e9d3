"""A label outside of the model's classes is one warning."""

import keras
import numpy as np
import pytest

import unisono
from unisono.training.replica._losses import check_labels

X = np.ones((6, 2), "float32")
Y = np.array([0, 1, 2, 0, 1, 2])
BY_NUMBER = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def made(loss=BY_NUMBER, units=3, kind=keras.Sequential):
    model = kind([keras.Input((2,)), keras.layers.Dense(units)], name="m")
    model.compile("sgd", loss)
    return model


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if "Labels must be" in r.getMessage()]


@pytest.mark.parametrize("form", ["arrays", "dataset"])
def test_fit_says_it_once(caplog, form):
    with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = made()
    data = [X, Y + 1]
    if form == "dataset":
        data = [unisono.data.Dataset.from_tensor_slices((X, Y + 1)).batch(4)]
    for _ in range(2):
        model.fit(*data, verbose=0)
    (text,) = warnings(caplog)
    assert "from 0 to 2, as 'm' has 3 classes. Received: labels from 1 to 3." in text
    assert "Write `y - 1`." in text


@pytest.mark.parametrize(
    ("labels", "remedy"),
    [
        (Y * 3, "a last layer of 7 units"),
        (Y[:, None] + 1.0, "`y - 1`"),
        (Y - 1, "`SparseCategoricalCrossentropy(ignore_class=-1)`, where -1 stands for no class"),
    ],
)
@pytest.mark.parametrize("loss", [BY_NUMBER, "sparse_categorical_crossentropy"])
def test_what_to_write(caplog, loss, labels, remedy):
    check_labels(made(loss), labels)
    (text,) = warnings(caplog)
    assert text.endswith(f"Write {remedy}.")


class OwnStep(keras.Sequential):
    def train_step(self, *args):
        return super().train_step(*args)


@pytest.mark.parametrize(
    ("model", "labels", "weights"),
    [
        (made(), Y, None),
        (made(), Y + 1, np.ones(6)),
        (made("mse", 1), Y + 1, None),
        (made(keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)), Y - 1, None),
        (made(keras.losses.SparseCategoricalCrossentropy(ignore_class=9)), np.full(6, 9), None),
        (made(kind=OwnStep), Y + 1, None),
        (made(), np.zeros((6, 0)), None),
        (made(), np.full((6, 2), 9), None),
        (made(), None, None),
    ],
)
def test_no_warning(caplog, model, labels, weights):
    check_labels(model, labels, weights)
    assert warnings(caplog) == []
