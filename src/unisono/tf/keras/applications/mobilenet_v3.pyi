"""Names of `tf.keras.applications.mobilenet_v3` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.mobilenet_v3 import (
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
