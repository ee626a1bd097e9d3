"""Runs programs that import TensorFlow, in this process and without it; with data that needs no download."""

import importlib
import sys
import types

import keras
import numpy as np
from sklearn.datasets import load_digits

from unisono.data import Dataset
from unisono.tf._run import provide_tensorflow


def digits(train=512, test=128):
    """Scikit-learn's digits in the shape of MNIST."""
    found = load_digits()
    images = np.pad(np.kron(found.images, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2))) * (255 / 16)
    images, labels = images.astype("uint8"), found.target.astype("uint8")
    end = train + test
    return (images[:train], labels[:train]), (images[train:end], labels[train:end])


def _mnist():
    return {
        split: (images[..., None], labels.astype("int64"))
        for split, (images, labels) in zip(("train", "test"), digits(), strict=True)
    }


def _cats_vs_dogs():
    (images, labels), _ = digits(8, 0)
    return {"train": (np.repeat(images[..., None], 3, axis=-1), (labels % 2).astype("int64"))}


def tensorflow_datasets():
    """A module with what the documents use of `tensorflow_datasets`, which needs TensorFlow."""
    contents = {"mnist": _mnist, "cats_vs_dogs": _cats_vs_dogs}

    def load(name, with_info, as_supervised):
        assert with_info
        assert as_supervised
        found = contents[name]()
        splits = {k: types.SimpleNamespace(num_examples=len(y)) for k, (_, y) in found.items()}
        datasets = {k: Dataset.from_tensor_slices(data) for k, data in found.items()}
        return datasets, types.SimpleNamespace(splits=splits)

    module = types.ModuleType("tensorflow_datasets")
    module.load = load
    return module


def changed(text, changes):
    """Return a program with other data, sizes, devices or addresses; each replaced text must occur."""
    for old, new in changes.items():
        assert old in text, f"{old!r} is not in the program"
        text = text.replace(old, new)
    return text


def run(program, monkeypatch, folder, changes=(), **names):
    """Run the text of a program in a folder, and return its names.

    `tf.keras.datasets.mnist` and `tensorflow_datasets` give the digits.
    """
    finders, modules = list(sys.meta_path), set(sys.modules)
    provide_tensorflow()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(keras.datasets.mnist, "load_data", digits)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", tensorflow_datasets())
    try:
        importlib.import_module("tensorflow")
        found = {"__name__": "__main__", **names}
        exec(compile(changed(program, dict(changes)), "seed.py", "exec"), found)
        return found
    finally:
        sys.meta_path[:] = finders
        for name in set(sys.modules) - modules:
            if name.split(".")[0] == "tensorflow":
                del sys.modules[name]
