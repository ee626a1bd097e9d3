"""Names of `tf.keras.datasets.mnist` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.datasets.mnist import (
    load_data as load_data,
)
