"""Data of the examples: scikit-learn's handwritten digits, or MNIST where it can be downloaded."""

import numpy as np


def load(mnist=False):
    """Return ((x_train, y_train), (x_test, y_test)) with pixels from 0 to 255, as MNIST has them."""
    if mnist:
        import keras

        return keras.datasets.mnist.load_data()
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.images * (255 / 16)).astype("uint8")
    y = digits.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:1500], order[1500:]
    return (x[train], y[train]), (x[test], y[test])


def devices():
    """All accelerators; on a machine without them two virtual CPU devices, to try things out."""
    import importlib.util

    has_plugin = any(importlib.util.find_spec(f"jax_{kind}_plugin") for kind in ("cuda12", "cuda13", "rocm7"))
    return None if has_plugin or importlib.util.find_spec("libtpu") else ["cpu:0", "cpu:1"]
