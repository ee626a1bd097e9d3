"""Names of `tf.keras.datasets.boston_housing` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.datasets.boston_housing import (
    load_data as load_data,
)
