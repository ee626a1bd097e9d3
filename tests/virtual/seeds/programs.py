"""Runs programs that import TensorFlow, in this process and without it; with data that needs no download."""

import importlib
import sys

import numpy as np
from sklearn.datasets import load_digits

from unisono.tf._run import provide_tensorflow


def digits(train=512, test=128):
    """Scikit-learn's digits in the shape of MNIST."""
    found = load_digits()
    images = np.pad(np.kron(found.images, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2))) * (255 / 16)
    images, labels = images.astype("uint8"), found.target.astype("uint8")
    end = train + test
    return (images[:train], labels[:train]), (images[train:end], labels[train:end])


def run(program, monkeypatch, folder, **names):
    """Run the text of a program in a folder, and return its names.

    `tf.keras.datasets.mnist` gives the digits.
    """
    finders, modules = list(sys.meta_path), set(sys.modules)
    provide_tensorflow()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("keras.datasets.mnist.load_data", digits)
    try:
        importlib.import_module("tensorflow")
        found = {"__name__": "__main__", **names}
        exec(compile(program, "seed.py", "exec"), found)
        return found
    finally:
        sys.meta_path[:] = finders
        for name in set(sys.modules) - modules:
            if name.split(".")[0] == "tensorflow":
                del sys.modules[name]
