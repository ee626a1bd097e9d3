"""Names of `tf.keras.applications.xception` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.xception import (
    Xception as Xception,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
