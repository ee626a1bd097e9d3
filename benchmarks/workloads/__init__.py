"""The models that the suite trains: each is written once for each framework, with the same sizes and data."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

#: name: (module of this package, arguments of its `workload`)
WORKLOADS = {
    "mlp": ("mlp", {}),
    "cnn": ("cnn", {"convolutions": 1}),
    "cnn3": ("cnn", {"convolutions": 3}),
    "cnn-no-pooling": ("cnn", {"convolutions": 1, "pooling": False}),
    "cnn3-no-pooling": ("cnn", {"convolutions": 3, "pooling": False}),
    "resnet": ("resnet", {}),
    "transformer": ("transformer", {}),
    "lstm": ("lstm", {}),
    "resnet50": ("resnet50", {}),
    "resnet50-small": ("resnet50", {"size": 32, "blocks": (1, 1), "width": 16, "classes": 10}),
    "gpt2": ("gpt2", {}),
    "gpt2-small": ("gpt2", {"layers": 2, "width": 64, "heads": 2, "tokens": 64, "vocabulary": 1000}),
    "deep50": ("deep", {"depth": 50}),
    "deep150": ("deep", {"depth": 150}),
    "deep300": ("deep", {"depth": 300}),
}
#: Models whose step a GPU computes in less time than its host needs to start it.
SMALL = {
    "mlp": ("mlp", {}),
    "cnn": ("cnn", {"convolutions": 1}),
    "lstm": ("lstm", {"tokens": 48, "vocabulary": 500, "units": 48, "classes": 10}),
    "transformer": (
        "transformer", {"layers": 3, "width": 96, "hidden": 256, "tokens": 48, "vocabulary": 500}
    ),
}  # fmt: skip
# 10 and 32 divide the steps of an epoch; a CPU needs longer for each.
for _name, (_module, _arguments) in SMALL.items():
    WORKLOADS[f"small-{_name}"] = _module, _arguments | {"steps": 320}
    WORKLOADS[f"small-{_name}-short"] = _module, _arguments | {"steps": 32}

#: Rows of a batch on each replica.
BATCH = 64


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model and its data.

    Args:
        steps: optimizer steps of an epoch that is timed: a second or so.
        rounds: epochs that count; long ones vary less.
        data: a number of rows to NumPy arrays `(x, y)`; `y` holds classes.
        keras_model: Keras' model, which ends in a softmax or in logits, not yet compiled.
        torch_model: torch's, which ends in logits.
        jax_model: a key to `(params, apply)`, where `apply(params, x)` returns logits.
        image: whether `x` has channels last, which torch takes first.
        logits: whether Keras' model ends in them.
    """

    steps: int
    rounds: int
    data: Callable[[int], Any]
    keras_model: Callable[[], Any]
    torch_model: Callable[[], Any] | None = None
    jax_model: Callable[[Any], Any] | None = None
    image: bool = False
    logits: bool = False

    def loss(self):
        """Keras' loss of the model."""
        import keras

        return keras.losses.SparseCategoricalCrossentropy(from_logits=self.logits)


def workload(name):
    """The workload of a name in `WORKLOADS`."""
    module, arguments = WORKLOADS[name]
    return importlib.import_module(f"workloads.{module}").workload(**arguments)


def random_data(shape, classes, vocabulary=None):
    """A function from a number of rows to random `(x, y)`: numbers, or tokens of a vocabulary."""

    def data(rows):
        import numpy as np

        rng = np.random.default_rng(0)
        if vocabulary:
            x = rng.integers(0, vocabulary, (rows, *shape)).astype(np.int32)
        else:
            x = rng.random((rows, *shape), dtype=np.float32)
        return x, rng.integers(0, classes, rows).astype(np.int32)

    return data
