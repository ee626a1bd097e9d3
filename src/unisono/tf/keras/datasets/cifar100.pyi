"""Names of `tf.keras.datasets.cifar100` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.datasets.cifar100 import (
    load_data as load_data,
)
