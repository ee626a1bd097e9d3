"""Models as other people write them, small, and how they are trained and compared."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tests.virtual.training._digits import mirrored

#: float32 sums in another order; Adam brings the last bits of small gradients forward.
CLOSE = {"rtol": 5e-4, "atol": 5e-5}

#: Half precision and float8 have few digits.
HALF = {"rtol": 2e-2, "atol": 1e-2}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Args:
        build: makes the model.
        compiled: arguments of `compile`.
        data: from a number of rows to `(x, y)`.
        splits: whether its numbers on parts of a batch are those of the whole: not where rows meet
            inside the model, as in a BatchNormalization.
        tolerance: for weights and losses.
        fit: more arguments of `fit`.
    """

    build: Callable[[], Any]
    compiled: Callable[[], dict[str, Any]] = lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse"}
    data: Callable[[int], Any] = lambda rows: vectors(rows)
    splits: bool = True
    tolerance: Any = dataclasses.field(default_factory=lambda: CLOSE)
    fit: Callable[[int], dict[str, Any]] = lambda rows: {}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def vectors(rows):
    return numbers(rows, 6), numbers(rows, 3, seed=1)


def classes(rows):
    return numbers(rows, 6), (np.arange(rows) % 3).astype("i4")


def images(rows):
    return numbers(rows, 8, 8, 3), (np.arange(rows) % 3).astype("i4")


def tokens(rows):
    x = np.random.default_rng(0).integers(1, 12, (rows, 5)).astype("i4")
    x[::3, 3:] = 0  # padded ends, not spread evenly
    return x, (np.arange(rows) % 3).astype("i4")


def sequences(rows):
    return numbers(rows, 5, 4), numbers(rows, 3, seed=1)


def sgd(**changes):
    return lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", **changes}


def labels(**changes):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": loss, "metrics": ["accuracy"], **changes}


def trained(entry, replicas, rows, batch_size):
    """Train on so many replicas, or by plain Keras for 0; return the history and the weights."""
    keras.utils.set_random_seed(3)
    with mirrored(replicas).scope() if replicas else contextlib.nullcontext():
        model = entry.build()
        model.compile(**entry.compiled())
    x, y = entry.data(rows)
    options = {"batch_size": batch_size, "epochs": 1, "shuffle": False, "verbose": 0, **entry.fit(rows)}
    history = model.fit(x, y, **options).history
    return history, [np.asarray(v, "f8") for v in (*model.weights, *_moments(model))]


def _moments(model):
    optimizer = getattr(model, "optimizer", None)
    return [] if optimizer is None else [v for v in optimizer.variables if "float" in v.dtype]


def assert_alike(found, expected, tolerance):
    (history, weights), (wanted, others) = found, expected
    assert history.keys() == wanted.keys()
    for key, values in wanted.items():
        np.testing.assert_allclose(history[key], values, err_msg=key, **tolerance)
    for number, (a, b) in enumerate(zip(weights, others, strict=True)):
        np.testing.assert_allclose(a, b, err_msg=f"weight {number}", **tolerance)
