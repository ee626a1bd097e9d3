"""Names of `tf.keras.datasets.fashion_mnist` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.datasets.fashion_mnist import (
    load_data as load_data,
)
